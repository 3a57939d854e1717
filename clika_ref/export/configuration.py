"""``export_configuration``: the form of all exports within a block, for any module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from clika_ref.core.errors import ModelError, format_count


@dataclass(frozen=True)
class ExportConfiguration:
    """The arguments of `export_configuration`, under their names."""

    export_int4: bool | None = None
    """Whether to pack INT4 weights, two to a byte; None to pack them if there are any."""
    export_fp16: bool = False
    """Whether FP16 replaces float32."""
    export_bf16: bool = False
    """Whether BF16 replaces float32."""
    keep_outputs_at_idx: tuple[int, ...] | None = None
    """Indices of the outputs to write; None for all."""
    allow_unchecked_guards: bool = False
    """Whether to write artifacts without nodes that check guards."""

    @property
    def half(self) -> torch.dtype | None:
        """The dtype that replaces float32; None to keep float32."""
        if self.export_fp16:
            return torch.float16
        return torch.bfloat16 if self.export_bf16 else None

    def select_outputs(self, outputs: Sequence[Any]) -> list[Any]:
        """Return the selected outputs, or the items of a parallel list, in the requested order.

        Raises:
            ModelError: an index is out of range, or two indices select the same output.
        """
        indices = range(len(outputs)) if self.keep_outputs_at_idx is None else self.keep_outputs_at_idx
        for index in indices:
            if not -len(outputs) <= index < len(outputs):
                raise ModelError(
                    f"keep_outputs_at_idx contains {index}, but the module returns "
                    f"{format_count(len(outputs), 'tensor')}. Give indices below {len(outputs)}."
                )
        if len({index % len(outputs) for index in indices}) < len(indices):
            raise ModelError(
                f"keep_outputs_at_idx={[*indices]} selects an output twice: the module returns {len(outputs)} "
                "tensors. Give each output once."
            )
        return [outputs[index] for index in indices]


_current = ContextVar[ExportConfiguration | None]("export_configuration", default=None)


def current_configuration() -> ExportConfiguration:
    """Return the active export configuration."""
    return _current.get() or ExportConfiguration()


@contextlib.contextmanager
def export_configuration(
    *,
    export_int4: bool | None = None,
    export_fp16: bool = False,
    export_bf16: bool = False,
    keep_outputs_at_idx: Sequence[int] | None = None,
    allow_unchecked_guards: bool = False,
) -> Iterator[ExportConfiguration]:
    """Configure the exports within this ``with`` statement; inner statements replace outer ones.

    Args:
        export_int4: whether to pack INT4 weights, half a byte each, which needs ONNX opset 21. True requires that there
            are any; False stores each in a byte, which the target must support. By default INT4 weights are packed if
            there are any.
        export_fp16: compute in float16 instead of float32; inputs and outputs keep their types.
        export_bf16: the same in bfloat16.
        keep_outputs_at_idx: indices of the outputs to export, in this order; by default all. Nodes that only other
            outputs need are removed.
        allow_unchecked_guards: write an artifact without nodes that check guards. It may return wrong results for
            inputs that violate one: check them before each call.

    Raises:
        ModelError: a switch is no bool, both FP16 and BF16 are requested, or the indices are no distinct integers.
    """
    switches = {"export_fp16": export_fp16, "export_bf16": export_bf16}
    _check_switches({"export_int4": export_int4, **switches, "allow_unchecked_guards": allow_unchecked_guards})
    if export_fp16 and export_bf16:
        raise ModelError("export_fp16 and export_bf16 are both True. Choose one.")
    indices = None if keep_outputs_at_idx is None else _check_indices(keep_outputs_at_idx)
    configuration = ExportConfiguration(export_int4, export_fp16, export_bf16, indices, allow_unchecked_guards)
    token = _current.set(configuration)
    try:
        yield configuration
    finally:
        _current.reset(token)


def _check_switches(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if not isinstance(value, bool) and (name != "export_int4" or value is not None):
            raise ModelError(f"{name} is {value!r}, a {type(value).__name__}. Give True or False.")


def _check_indices(given: Any) -> tuple[int, ...]:
    is_list = isinstance(given, list | tuple) and given and all(type(index) is int for index in given)
    if not is_list or len(set(given)) != len(given):
        raise ModelError(f"keep_outputs_at_idx is {given!r}. Give distinct indices of outputs, such as [0, 1].")
    return tuple(given)
