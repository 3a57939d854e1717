"""Convert a float32 graph to FP16 or BF16, keeping the types of its inputs and outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.errors import PassError, TargetError
from clika_ref.core.inference import Builder, infer_types
from clika_ref.core.ir import Data, Graph, Node, Use, Value
from clika_ref.core.operators import Operator
from clika_ref.core.types import TensorType
from clika_ref.quantization.graph_runs import compute_outputs
from clika_ref.quantization.qdq.insertion import QDQ_OPERATORS, redirect_use

FULL_PRECISION = torch.float32

QUANTIZED_DTYPES = (torch.int8, torch.uint8)
"""Dtypes of quantized floats."""

INFINITY_THRESHOLD = 1e30
"""Magnitude from which numbers mean "infinite", as in masks; they may overflow to infinity in FP16."""


def convert_to_half(graph: Graph, half: torch.dtype, operators: Mapping[str, Operator]) -> None:
    """Convert nodes that compute float32 from inputs and weights to FP16 or BF16.

    Nodes that depend on sizes and integers alone, such as positions and the angles of rotary embeddings, stay float32:
    FP16 and BF16 do not represent all integers above 2,048 and 256. So do nodes without an FP16 or BF16 kernel, nodes
    with a number out of its range, and quantization scales that are too small for it.

    Args:
        graph: changed in place; its inputs, outputs and state keep their types.
        half: ``torch.float16`` or ``torch.bfloat16``.
        operators: the operators; ``to`` converts.
    """
    planned = _plan_conversion(graph, half)
    _HalfConversion(graph, half, operators, planned).run()


def _plan_conversion(graph: Graph, half: torch.dtype) -> dict[Node, tuple[TensorType, ...]]:
    """Return the nodes to convert, with their output types."""
    planned: dict[Node, tuple[TensorType, ...]] = {}
    halves = {v for v in graph.inputs if v.type.dtype == FULL_PRECISION}
    for node in graph.nodes:
        floats = [v for v in node.inputs if _is_float32(v)]
        weight = node.inputs[node.op.trait.weight] if node.op.trait.weight is not None else None
        is_layer = isinstance(weight, Value) and weight.is_constant
        if any(
            _is_out_of_range(v, half) for v in (*node.inputs, *(v for v in node.attrs.values() if isinstance(v, float)))
        ):
            continue
        if is_layer or not halves.isdisjoint(node.inputs) or (floats and all(v.is_constant for v in floats)):
            operands = [_in_half(v, half) for v in node.inputs]
            attrs = {name: _in_half(value, half) for name, value in node.attrs.items()}
            try:
                types = infer_types(node.op, operands, attrs)
            except PassError:
                continue
            planned[node] = types
            halves.update(v for v, t in zip(node.outputs, types, strict=True) if t.dtype in (half, *QUANTIZED_DTYPES))
    return planned


def _is_float32(item: object) -> bool:
    return isinstance(item, Value) and item.type.dtype == FULL_PRECISION


def _is_out_of_range(item: Any, half: torch.dtype) -> bool:
    """Whether a number or a constant has an element outside the range of FP16 or BF16."""
    if _is_float32(item):
        sizes = item.data.abs() if item.is_constant else torch.empty(0)
        return bool(((sizes > torch.finfo(half).max) & (sizes < INFINITY_THRESHOLD)).any())
    return isinstance(item, float | int) and torch.finfo(half).max < abs(item) < INFINITY_THRESHOLD


def _in_half(item: Any, half: torch.dtype) -> Any:
    """Return an operand's type, a number or an attribute in FP16 or BF16."""
    if isinstance(item, Value):
        return TensorType(half, item.type.shape) if _is_float32(item) else item.type
    if isinstance(item, float) and abs(item) != float("inf"):
        return max(-torch.finfo(half).max, min(torch.finfo(half).max, item))
    return half if item is FULL_PRECISION else item


@dataclass
class _HalfConversion:
    """Converts the planned nodes of a graph: inserts casts, and converts weights and types."""

    graph: Graph
    half: torch.dtype
    operators: Mapping[str, Operator]
    planned: Mapping[Node, tuple[TensorType, ...]]
    converted: dict[Value, None] = field(default_factory=dict[Value, None])
    """Values that became FP16 or BF16, in order."""
    twins: dict[Value, Value] = field(default_factory=dict[Value, Value])
    """The same values in the other precision."""

    def run(self) -> None:
        for value in self.graph.constants.values():
            if _is_float32(value) and value.uses and all(self._is_read_in_half(value, use) for use in value.uses):
                value.type, value.data = TensorType(self.half, value.type.shape), self._convert_data(value)
        for node in list(self.graph.nodes):
            for position, operand in enumerate(node.inputs):
                if isinstance(operand, Value):
                    self.graph.set_input(node, position, self._convert_operand(node, position, operand))
                elif node in self.planned and isinstance(operand, float):
                    self.graph.set_input(node, position, self._convert_number(node, position, operand))
            if node in self.planned:
                self._convert(node, self.planned[node])
        for value in list(self.converted):
            for use in [use for use in value.uses if use.user is self.graph]:
                redirect_use(self.graph, use, self._cast(value, None, FULL_PRECISION))

    def _convert(self, node: Node, types: Sequence[TensorType]) -> None:
        node.attrs = {name: _in_half(value, self.half) for name, value in node.attrs.items()}
        for value, found in zip(node.outputs, types, strict=True):
            if value.type != found:
                value.type = found
                self.converted[value] = None

    def _convert_number(self, node: Node, position: int, number: float) -> float | Value:
        """Return a number clamped to FP16 or BF16; a scale becomes a constant, as runtimes compute in its dtype."""
        if node.op_type not in QDQ_OPERATORS or position != 1:
            return _in_half(number, self.half)
        if number < torch.finfo(self.half).smallest_normal:
            return number
        return self.graph.add_constant(torch.tensor(number, dtype=self.half), f"{node.name}_scale")

    def _convert_operand(self, node: Node, position: int, value: Value) -> Value:
        """Return the operand of a node in the precision of the node."""
        if node not in self.planned:
            return self._cast(value, node, FULL_PRECISION) if value in self.converted else value
        if not _is_float32(value):
            return value
        if not value.is_constant:
            return self._cast(value, node, self.half)
        if not self._is_read_in_half(value, Use(node, position)):
            return value
        if value not in self.twins:
            narrow = TensorType(self.half, value.type.shape)
            self.twins[value] = self.graph.add_constant(self._convert_data(value), value.name, narrow)
        return self.twins[value]

    def _cast(self, value: Value, before: Node | None, dtype: torch.dtype) -> Value:
        """Return a computed value in another precision; each is converted once, before its first reader."""
        if value not in self.twins:
            self.twins[value] = Builder(self.graph, self.operators, before)("to", value, dtype=dtype)
        return self.twins[value]

    def _is_read_in_half(self, value: Value, use: Use) -> bool:
        """Whether a node reads a constant in FP16 or BF16."""
        if not isinstance(use.user, Node) or use.user not in self.planned:
            return False
        if use.user.op_type in QDQ_OPERATORS and use.position == 1 and value.data is not None:
            return bool((value.data >= torch.finfo(self.half).smallest_normal).all())
        return True

    def _convert_data(self, value: Value) -> Data:
        """Return a function that computes a constant in FP16 or BF16."""
        data = value.deferred_data or value.data
        assert data is not None
        return partial(_narrow, data, self.half)


def _narrow(data: Data, half: torch.dtype) -> Tensor:
    """Convert elements to FP16 or BF16; finite ones stay finite."""
    elements = data() if callable(data) else data
    ends = torch.finfo(half)
    return torch.where(elements.isinf(), elements, elements.clamp(ends.min, ends.max)).to(half)


def check_overflow(
    graph: Graph,
    inputs: Sequence[Tensor],
    expected: Callable[[Sequence[Tensor]], Sequence[Tensor]],
) -> None:
    """Check that results in FP16 or BF16 are finite wherever they are finite in float32.

    Args:
        graph: the graph in FP16 or BF16.
        inputs: inputs of the graph.
        expected: computes the float32 outputs.

    Raises:
        TargetError: a result is not finite; the message names the first node with such a result.
    """
    endless = {v for v, x in zip(graph.inputs, inputs, strict=True) if not _is_finite(x)}
    overflowing, others = list[Node](), list[Node]()

    def look(node: Node, results: tuple[Tensor, ...]) -> None:
        odd = [v for v, x in zip(node.outputs, results, strict=True) if not _is_finite(x)]
        if odd:
            reads_endless = any(_is_nonfinite(operand, endless) for operand in (*node.inputs, *node.attrs.values()))
            (others if reads_endless else overflowing).append(node)  # infinite operands, as in masks, are no overflow
        endless.update(odd)

    found = compute_outputs(graph, inputs, look)
    for reference, result in zip(expected(inputs), found, strict=True):
        if bool(reference.isfinite().all()) and not bool(result.isfinite().all()):
            first = (overflowing or others)[0]
            raise TargetError(
                f"cannot export {graph.name} in FP16: it is finite in float32, but {first.op.name} "
                f"({first.name}) in {first.origin} returns inf or NaN in FP16. Use export_bf16=True: "
                "bfloat16 has the range of float32, float16 only up to 65,504."
            )


def _is_finite(x: Tensor) -> bool:
    return not x.is_floating_point() or bool(x.isfinite().all())


def _is_nonfinite(operand: Any, endless: Collection[Value]) -> bool:
    """Whether an operand of a node contains infinities or NaN."""
    if not isinstance(operand, Value):
        return isinstance(operand, float) and not math.isfinite(operand)
    return operand in endless or (operand.data is not None and not _is_finite(operand.data))
