"""The calls to trace for, taken apart: one structure, the sides that differ, and what eager returns for each."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from clika_ref.capture.callables import Callee
from clika_ref.capture.dimensions import Comparison, compare
from clika_ref.capture.eager import run_eager
from clika_ref.capture.inputs import ModelCall
from clika_ref.core.errors import ModelError
from clika_ref.signature import as_call, flatten_call, nest, regroup


@dataclass(frozen=True)
class TracedCalls:
    """The calls to trace for, taken apart: their leaves, and what eager returns for each."""

    callee: Callee
    comparison: Comparison
    arguments: tuple[str, ...]
    specs: tuple[pytree.TreeSpec, ...]
    expected: list[tuple[list[Any], pytree.TreeSpec]]

    @property
    def parameters(self) -> inspect.Signature:
        """The signature of the function that is traced."""
        return self.callee.parameters

    def rebuild(self, leaves: Sequence[Any]) -> ModelCall:
        """Return leaves as a call."""
        return ModelCall(*as_call(self.parameters, nest(self.arguments, self.specs, leaves)))

    def dynamic_shapes(self) -> dict[str, Any] | None:
        """Return what torch.export wants to know of dynamic sides."""
        if not self.comparison.lengths:
            return None
        dims: list[Any] = []
        for index, leaf in enumerate(self.comparison.calls[0]):
            sides = [s.dim for s in self.comparison.lengths if s.leaf == index]
            if isinstance(leaf, torch.Tensor):
                dims.append({d: torch.export.Dim.AUTO for d in sides if d is not None} or None)
            else:
                dims.append(torch.export.Dim.AUTO if sides else None)
        return regroup(self.parameters, nest(self.arguments, self.specs, dims))


def take_apart(callee: Callee, calls: Sequence[ModelCall], *, dynamic: bool) -> TracedCalls:
    """Flatten calls, check that they have one structure, and run eager on each.

    Raises:
        ModelError: the structures differ, or eager itself fails on an input.
    """
    flat = [flatten_call(callee.parameters, call.args, call.kwargs) for call in calls]
    arguments, specs, names, _ = flat[0]
    for number, other in enumerate(flat[1:], 2):
        if other[:2] != (arguments, specs):
            msg = (
                f"input {number} has another structure than input 1: {dict(zip(other[0], other[1], strict=True))} instead of "
                f"{dict(zip(arguments, specs, strict=True))}; one graph serves one structure"
            )
            raise ModelError(msg)
    comparison = compare(names, [leaves for *_, leaves in flat], dynamic=dynamic)
    expected = [_eager(callee, call, number) for number, call in enumerate(calls, 1)]
    return TracedCalls(callee, comparison, arguments, specs, expected)


def _eager(callee: Callee, call: ModelCall, number: int) -> tuple[list[Any], pytree.TreeSpec]:
    try:
        return run_eager(callee, call)
    except Exception as error:
        msg = f"{callee.name} itself fails on tracing input {number}: {type(error).__name__}: {error}"
        raise ModelError(msg) from error
