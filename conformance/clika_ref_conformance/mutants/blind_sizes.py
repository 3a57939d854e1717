"""Faults at sizes other than the traced ones, written without knowledge of the tests that must find them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

from clika_ref_aten import grids

from clika_ref.core.ir import Graph
from clika_ref.core.symbols import evaluate, is_symbolic
from clika_ref.core.types import TensorType
from clika_ref.onnx_export.emission import _Emission
from clika_ref.torch_internals.symbols import FloorDiv
from clika_ref_conformance.mutants.seeding import Catalogue

FAULTS = Catalogue("blind-sizes", blind=True, levels=("dynamic",))


def _collect_traced_sizes(graph: Graph) -> dict[str, int]:
    """Return the sizes seen in the trace."""
    return {symbol.name: symbol.example or max(symbol.low or 0, 2) for symbol in graph.symbols.values()}


def _substitute_sizes(item: Any, sizes: Mapping[str, int]) -> Any:
    """Return a type, a size or an attribute with its symbols replaced by numbers."""
    if isinstance(item, TensorType):
        return TensorType(item.dtype, _substitute_sizes(item.shape, sizes))
    if isinstance(item, tuple):
        return tuple(_substitute_sizes(part, sizes) for part in item)
    return evaluate(item, sizes) if is_symbolic(item) else item


def hard_code_sizes(
    subject: str, change: str, *, attributes: bool = False, operands: bool = False, result: bool = False
) -> None:
    """Seed a lowering that sees traced sizes instead of symbols, in its attributes or in types."""

    def faulty(original, self, node, values):
        if node.op_type != subject:
            return original(self, node, values)
        sizes = _collect_traced_sizes(self.graph)
        types = {onnx: v.type for onnx, v in zip(values, node.inputs, strict=True) if onnx is not v}
        for onnx, known in types.items() if operands else ():
            self.op.declare(onnx, _substitute_sizes(known, sizes))
        if result:
            self.op.results = tuple(_substitute_sizes(known, sizes) for known in self.op.results)
        attrs = {name: _substitute_sizes(value, sizes) for name, value in node.attrs.items()} if attributes else {}
        with patch.dict(node.attrs, attrs):
            lowered = original(self, node, values)
        for onnx, known in types.items():
            self.op.declare(onnx, known)
        return lowered

    FAULTS.function(subject, change, _Emission, "_call")(faulty)


# Lowerings that hard-code the traced size


hard_code_sizes("reshape", "the shape is that of the trace", attributes=True, operands=True)
hard_code_sizes("expand", "the size is that of the trace", attributes=True, operands=True)
hard_code_sizes("slice", "an end that counts from the last element counts from the traced one", attributes=True)
hard_code_sizes("arange", "the number of results is that of the trace", attributes=True, result=True)
hard_code_sizes("upsample_nearest2d", "the output has the size of the trace", attributes=True)
hard_code_sizes("var", "the degrees of freedom are those of the trace", operands=True)
hard_code_sizes("adaptive_avg_pool1d", "the windows are those of the traced length", operands=True)
hard_code_sizes("max_pool2d_with_indices", "positions are counted in planes of the traced size", operands=True)
hard_code_sizes("roll", "a negative shift is made positive by the traced length", operands=True)
hard_code_sizes("diagonal", "the distance of the elements is that of the trace", operands=True, result=True)
hard_code_sizes("scaled_dot_product_attention", "the causal mask has the size of the trace", operands=True)


# Type rules that only hold for some sizes


@FAULTS.type_rule("slice", "an end that is a number is assumed to be within a dynamic dim")
def _(original, x, *, dim, start, end, step):
    found = original(x, dim=dim, start=start, end=end, step=step)
    if not is_symbolic(x.shape[dim]) or step != 1 or not isinstance(end, int) or not (start or 0) <= end < 1 << 31:
        return found
    shape = list(found.shape)
    shape[dim] = end - (start or 0)
    return TensorType(x.dtype, tuple(shape))


@FAULTS.type_rule("avg_pool2d", "ceil_mode adds no window along dynamic dims")
def _(original, x, *, ceil_mode, **attrs):
    return original(x, ceil_mode=ceil_mode and not is_symbolic(x.shape[-2:]), **attrs)


@FAULTS.type_rule("unfold", "a last window that begins but does not end within a dynamic dim counts")
def _(original, x, *, dimension, size, step):
    found = original(x, dimension=dimension, size=size, step=step)
    if not x.rank or not is_symbolic(x.shape[dimension]):
        return found
    shape = list(found.shape[:-1])
    steps: Any = FloorDiv(x.shape[dimension] - size + step - 1, step)
    shape[dimension] = steps + 1
    return TensorType(x.dtype, (*shape, size))


@FAULTS.type_rule("cat", "all tensors of dynamic lengths have the length of the first")
def _(original, *tensors, dim):
    return original(*(tensors[0] if is_symbolic(t.shape[dim]) else t for t in tensors), dim=dim)


@FAULTS.type_rule("arange", "a descending range between unknown numbers has no last partial step")
def _(original, *, start, end, step, **attrs):
    found = original(start=start, end=end, step=step, **attrs)
    whole = all(isinstance(n, int) or (is_symbolic(n) and n.is_integer) for n in (start, end))
    if not whole or not is_symbolic((start, end)) or not isinstance(step, int) or step >= 0:
        return found
    count: Any = FloorDiv(start - end, -step)
    return TensorType(found.dtype, (count,))


# Lowerings that take another path for unknown sizes


@FAULTS.function(
    "affine_grid_generator", "align_corners is ignored along a dim of unknown length", grids, "_coordinates"
)
def _(original, op, n, dtype, *, align_corners):
    return original(op, n, dtype, align_corners=align_corners and not is_symbolic(n))
