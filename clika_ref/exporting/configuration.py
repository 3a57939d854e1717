"""``export_configuration``: how the exports within it are written, whichever module they are of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from clika_ref.core.errors import ModelError


@dataclass(frozen=True)
class ExportConfiguration:
    """What `export_configuration` was given, under its names."""

    export_int4: bool | None = None
    export_fp16: bool = False
    export_bf16: bool = False
    keep_outputs_at_idx: tuple[int, ...] | None = None

    @property
    def half(self) -> torch.dtype | None:
        """The dtype in which floats of 32 bits are to be computed; None where they stay."""
        if self.export_fp16:
            return torch.float16
        return torch.bfloat16 if self.export_bf16 else None

    def kept(self, outputs: Sequence[Any]) -> list[Any]:
        """Return those of the outputs, or of what belongs to each, that are to be written, in the order asked for.

        Raises:
            ModelError: there is no output at such a place, or two places are those of one.
        """
        places = range(len(outputs)) if self.keep_outputs_at_idx is None else self.keep_outputs_at_idx
        for place in places:
            if not -len(outputs) <= place < len(outputs):
                msg = f"keep_outputs_at_idx names {place}, but the module returns {len(outputs)} tensors"
                raise ModelError(msg)
        if len({place % len(outputs) for place in places}) < len(places):
            msg = f"keep_outputs_at_idx={[*places]} names an output twice, as the module returns {len(outputs)} tensors"
            raise ModelError(msg)
        return [outputs[place] for place in places]


_current = ContextVar[ExportConfiguration | None]("export_configuration", default=None)


def configuration() -> ExportConfiguration:
    """Return what exports are to obey here."""
    return _current.get() or ExportConfiguration()


@contextlib.contextmanager
def export_configuration(
    *,
    export_int4: bool | None = None,
    export_fp16: bool = False,
    export_bf16: bool = False,
    keep_outputs_at_idx: Sequence[int] | None = None,
) -> Iterator[ExportConfiguration]:
    """Write what is exported in this ``with`` statement in another form; inner statements replace outer ones.

    Args:
        export_int4: whether weights of four bits take half a byte each, which needs ONNX's operator set 21: True
            requires that there are any, False holds each in a byte, which the target must take. By default they do
            where there are any.
        export_fp16: compute in float16 what the module computes in float32; inputs and outputs stay as they are.
        export_bf16: the same in bfloat16.
        keep_outputs_at_idx: which of the tensors that the module returns the file returns, in this order; by default
            all. What only the others need is left out.

    Raises:
        ModelError: a switch is none, both half precisions are asked for, or places are no different integers.
    """
    _refuse_odd_switches({"export_int4": export_int4, "export_fp16": export_fp16, "export_bf16": export_bf16})
    if export_fp16 and export_bf16:
        msg = "export_fp16 and export_bf16 exclude each other; ask for one"
        raise ModelError(msg)
    places = None if keep_outputs_at_idx is None else _places(keep_outputs_at_idx)
    chosen = ExportConfiguration(export_int4, export_fp16, export_bf16, places)
    token = _current.set(chosen)
    try:
        yield chosen
    finally:
        _current.reset(token)


def _refuse_odd_switches(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if not isinstance(value, bool) and (name != "export_int4" or value is not None):
            msg = f"{name} is {value!r}, a {type(value).__name__}; it takes True or False"
            raise ModelError(msg)


def _places(given: Any) -> tuple[int, ...]:
    fit = isinstance(given, list | tuple) and given and all(type(place) is int for place in given)
    if not fit or len(set(given)) != len(given):
        msg = f"keep_outputs_at_idx is {given!r}; give different places of outputs, such as [0, 1]"
        raise ModelError(msg)
    return tuple(given)
