"""Check the inputs of a graph: dtypes, dims and guards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from clika_ref.core.errors import ModelError
from clika_ref.core.execution import read_sizes
from clika_ref.core.ir import Graph, Value
from clika_ref.core.symbols import Guard, evaluate
from clika_ref.core.types import TensorType

MAX_GUARD_LENGTH = 300
"""Maximum number of characters of a guard in a message: those of padding and windows have thousands."""

STATIC_ADVICE = "To make this dim dynamic, compile with tracing inputs that differ in it."
SYMBOL_ADVICE = "The model requires these dims to match each other."


def check_inputs(graph: Graph, inputs: Sequence[torch.Tensor]) -> None:
    """Check the inputs of a call against the dtypes, dims and guards of a graph.

    Args:
        graph: the graph whose inputs and guards are checked.
        inputs: one tensor for each input of the graph, in order. Its shape must match ``value.type.shape``.

    Raises:
        ModelError: an input does not match; the message names the dim, the guard and the user's line.
    """
    for value, tensor in zip(graph.inputs, inputs, strict=True):
        _check_type(value, tensor)
    sizes = read_sizes(graph, inputs)
    for value, tensor in zip(graph.inputs, inputs, strict=True):
        _check_dims(value, tensor, sizes)
    # Sizes that depend on the data are unknown before the run, so guards on them are skipped.
    known = {s.expr for s in graph.symbols.values() if s.name in sizes}
    for guard in graph.guards:
        if guard.relation.free_symbols <= known:
            _check_guard(graph, guard, sizes)


def _check_type(value: Value, tensor: torch.Tensor) -> None:
    """Check the rank and the dtype of an input."""
    if tensor.dim() != value.type.rank or tensor.dtype != value.type.dtype:
        msg = f"input {value.name!r}: {TensorType.of(tensor)} does not match {value.type} of the graph."
        if value.type.dtype.is_floating_point and tensor.dtype != value.type.dtype:
            msg += (
                f" A graph computes in the dtypes that it was traced with: convert this input with .to"
                f"({value.type.dtype}), or convert the original model and its tracing inputs and compile them."
            )
        raise ModelError(msg)


def _check_dims(value: Value, tensor: torch.Tensor, sizes: Mapping[str, int]) -> None:
    """Check the size of each dim of an input, given the values of the symbols."""
    for dim, (expected, actual) in enumerate(zip(value.type.shape, tensor.shape, strict=True)):
        size = _evaluate_size(expected, sizes)
        if size == actual:
            continue
        is_static = isinstance(expected, int)
        must, advice = (expected, STATIC_ADVICE) if is_static else (f"{expected} = {size}", SYMBOL_ADVICE)
        raise ModelError(
            f"input {value.name!r}: {TensorType.of(tensor)} does not match {value.type} of the graph: dim {dim} must "
            f"be {must}. {advice}"
        )


def _evaluate_size(expected: Any, sizes: Mapping[str, int]) -> int | str:
    try:
        return evaluate(expected, sizes)
    except ZeroDivisionError:
        return "a division by 0"


def _check_guard(graph: Graph, guard: Guard, sizes: Mapping[str, int]) -> None:
    if is_met(guard, sizes):
        return
    used = [s for s in graph.symbols.values() if s.expr in guard.relation.free_symbols]
    values = ", ".join(f"{s.name} = {sizes[s.name]} ({s.source})" for s in used)
    shown = guard if len(str(guard)) <= MAX_GUARD_LENGTH else f"a long condition on sizes (from {guard.line})"
    raise ModelError(
        f"the graph does not support this input: {values} violates {shown}. If the model supports it, compile for it."
    )


def is_met(guard: Guard, sizes: Mapping[str, int]) -> bool:
    """Whether ``sizes`` satisfy ``guard``; a guard that cannot be evaluated, such as a division by 0, is not met.

    Raises:
        KeyError: ``sizes`` has no value for a symbol of the guard.
        ModelError: the guard contains a function that `evaluate` does not know.
    """
    try:
        return bool(evaluate(guard.relation, sizes))
    except (ArithmeticError, ValueError, TypeError):  # roots of negative numbers raise the latter two
        return False
