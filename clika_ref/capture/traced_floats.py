"""Floats that forward reads from tensors: 0-d tensors that compute and promote like Python floats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from clika_ref.capture.aliasing import TracedTensor
from clika_ref.capture.symbols import SymbolTable
from clika_ref.core.errors import ModelError
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Value
from clika_ref.core.types import TensorType

PYTHON_FLOAT_TYPE = TensorType(torch.float64, ())
"""The type of Python floats."""

ITEM_OVERLOADS = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)

FILL_POSITIONS = {
    torch.ops.aten.full.default: 1,
    torch.ops.aten.new_full.default: 2,
    torch.ops.aten.full_like.default: 1,
}
"""Calls that fill a new tensor with a number, and its position."""

FLOAT_OPERATORS = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "truediv": "div",
    "mod": "remainder",
    "pow": "pow",
    "neg": "neg",
    "abs": "abs",
    "_sym_sqrt": "sqrt",
    "sym_max": "maximum",
    "sym_min": "minimum",
    "trunc": "trunc",
    "floor": "floor",
    "ceil": "ceil",
    "round": "round",
}
"""The operator for each Python function of floats, under its name in traces."""


@dataclass(frozen=True)
class TracedFloat:
    """A Python float that forward reads from a tensor: the element of the 0-d ``value``, without gradient history."""

    value: Value

    def __str__(self) -> str:
        assert self.value.producer is not None
        return f"{self.value.name} (in {self.value.producer.origin})"


def import_number(function: Any, args: Sequence[Any], result: Any, table: SymbolTable, build: Builder) -> Any:
    """Return the result of a call that returns a number: a `TracedFloat`, a Python number or a size expression.

    Raises:
        ModelError: no operator computes it.
    """
    if function in ITEM_OVERLOADS:
        if isinstance(result, torch.SymFloat):
            return _read_float(args[0], build)
        if isinstance(result, torch.SymInt):
            table.bind_element(_make_symbol_source(args[0], build), result)
    elif any(isinstance(arg, TracedFloat) for arg in args) and not isinstance(result, torch.SymBool):
        made = _compute_float(function.__name__, args, build)
        if isinstance(result, torch.SymFloat):
            return made
        table.bind_element(_cast(torch.int64, made.value, build), result)
    return table.translate(result)


def find_fill(target: Any, args: Sequence[Any]) -> Value | None:
    """Return the 0-d tensor that a call fills a new tensor with; None for another call, or a known number."""
    position = FILL_POSITIONS.get(target, len(args))
    number = args[position] if position < len(args) else None
    return number.value if isinstance(number, TracedFloat) else None


def floats_to_tensors(args: tuple[Any, ...], kwargs: dict[str, Any], build: Builder) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a call with each `TracedFloat` as a tensor that promotes like a Python float."""
    given = (*args, *kwargs.values())
    if not any(isinstance(arg, TracedFloat) for arg in given):
        return args, kwargs
    dtype = _promotion_dtype([arg.value.type for arg in given if isinstance(arg, TracedTensor)])

    def cast(arg: Any) -> Any:
        return _cast(dtype, arg.value, build) if isinstance(arg, TracedFloat) else arg

    return tuple(map(cast, args)), {name: cast(arg) for name, arg in kwargs.items()}


def _promotion_dtype(types: list[TensorType]) -> torch.dtype:
    """Return the dtype in which a float computes with tensors: theirs, or the default dtype if they hold integers.

    Tensors with dims take precedence over 0-d ones. With FP16 and BF16 tensors, PyTorch computes floats in float32.
    """
    floats = [t for t in types if t.dtype.is_floating_point or t.dtype.is_complex]
    wide = [t.dtype for t in floats if t.rank]
    dtypes = [*wide, torch.float32] if wide else [t.dtype for t in floats] or [torch.get_default_dtype()]
    return reduce(torch.promote_types, dtypes)


def _make_symbol_source(value: Value, build: Builder) -> Value:
    """Return a value that can be the source of a symbol: an input or a node's output, never a constant."""
    return build("detach", value, types=(value.type,)) if value.is_constant else value


def _read_float(tensor: Value, build: Builder) -> TracedFloat:
    """Return the float in a one-element tensor; no gradient flows back through it."""
    flat = tensor if tensor.type.rank == 0 else build("reshape", tensor, shape=())
    return TracedFloat(build("detach", flat, types=(flat.type,)))


def _compute_float(function: str, args: Sequence[Any], build: Builder) -> TracedFloat:
    """Return the result of a Python function of floats and other numbers."""
    given = [arg for arg in args if arg is not None]
    op = build.operators.get(FLOAT_OPERATORS.get(function, ""))
    if op is None or len(given) > len(op.operands):
        raise ModelError(
            f"{function} of a number that is read from a tensor, as by item(), is not supported. Use the tensor itself."
        )
    operands = [_operand(arg, build, literal=p.literal) for arg, p in zip(given, op.operands, strict=True)]
    return TracedFloat(build(op, *operands, types=(PYTHON_FLOAT_TYPE,)))


def _operand(arg: Any, build: Builder, *, literal: bool) -> Any:
    if isinstance(arg, TracedFloat):
        return _cast(PYTHON_FLOAT_TYPE.dtype, arg.value, build)
    return (
        arg
        if literal
        else build("full", size=(), fill_value=arg, dtype=PYTHON_FLOAT_TYPE.dtype, types=(PYTHON_FLOAT_TYPE,))
    )


def _cast(dtype: torch.dtype, value: Value, build: Builder) -> Value:
    if value.type.dtype == dtype:
        return value
    return build("to", value, dtype=dtype, types=(TensorType(dtype, value.type.shape),))
