"""Float calls with quantized and float neighbors: a runtime must not change their precision."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from clika_ref.core.errors import ClikaError
from clika_ref.core.execution import interpret
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph, Value
from clika_ref.core.operators import Operator
from clika_ref.core.quantization_scheme import QuantizedType
from clika_ref.core.registry import Registry
from clika_ref.core.samples import Call
from clika_ref.core.traits import SHARED_QPARAMS, UNIFIED_QPARAMS
from clika_ref.core.types import TensorType
from clika_ref.quantization.calibration.observers import Range
from clika_ref.quantization.qdq.qparams import QParams, compute_qparams
from clika_ref_conformance.cases import CaseRun, GraphCase
from clika_ref_conformance.drawing.calls.drawn_call import fill_operands, format_call
from clika_ref_conformance.drawing.calls.vectors import make_typical_run


@dataclass(frozen=True)
class Neighborhood:
    """The precision of the values that a call reads and returns, and an activation after it."""

    reads_int8: bool
    returns_int8: bool
    activation: str = ""
    """An operator that a runtime may fuse with the call; empty if there is none."""

    @property
    def name(self) -> str:
        """Precisions and activation in the order of execution."""
        ends = ["int8" if quantized else "float" for quantized in (self.reads_int8, self.returns_int8)]
        return "-".join(filter(None, (ends[0], self.activation, ends[1])))


ACTIVATION_ATTRS = {"relu": {}, "hardtanh": {"min_val": 0.0, "max_val": 6.0}}
"""Activations that runtimes fuse with the layer before them, with their attributes."""

NEIGHBORHOODS = (
    Neighborhood(reads_int8=True, returns_int8=False),
    Neighborhood(reads_int8=False, returns_int8=True),
    Neighborhood(reads_int8=True, returns_int8=True),
    *(Neighborhood(reads_int8=True, returns_int8=True, activation=name) for name in ACTIVATION_ATTRS),
)


def make_neighborhood_cases(op: Operator, call: Call, name: str, registry: Registry, seed: int) -> Iterator[GraphCase]:
    """Yield the call in each neighborhood; one that eager rejects, or with a result that is not finite, is left out.

    Weights and biases of layers are float constants; the other float tensors are inputs of the graph.
    """
    typical = make_typical_run(call.operands, seed)
    for neighborhood in NEIGHBORHOODS:
        building = _NeighborhoodGraph(op, call, typical.inputs, neighborhood, registry)
        try:
            building.build()
        except ClikaError:
            continue
        if building.is_useful:
            facts = {"call": format_call(op, call), "neighborhood": neighborhood.name}
            runs = [CaseRun("typical", tuple(building.inputs))]
            yield GraphCase(f"{name}-{neighborhood.name}", building.graph, runs, facts)


def _is_quantizable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has elements, and all of them are finite."""
    return tensor.numel() > 0 and bool(tensor.isfinite().all())


def range_of(tensor: torch.Tensor) -> Range:
    """Return the range of the elements of a tensor, which is not empty."""
    low, high = torch.aminmax(tensor)
    return Range(float(low), float(high))


def compute_exact_qparams(tensor: torch.Tensor) -> QParams:
    """Return qparams whose scale is a power of two: quantizing multiples of it rounds nothing, in any arithmetic."""
    covered = range_of(tensor)
    scale = 2.0 ** math.ceil(math.log2(max(covered.high - covered.low, MIN_RANGE) / QuantizedType().high))
    return QParams(scale, min(round(-covered.low / scale), QuantizedType().high))


MIN_RANGE = 2.0**-20
"""Smallest range of an input."""


class _NeighborhoodGraph:
    """The graph of a call in a neighborhood."""

    def __init__(
        self, op: Operator, call: Call, tensors: Sequence[torch.Tensor], neighborhood: Neighborhood, registry: Registry
    ) -> None:
        self.op, self.call, self.neighborhood = op, call, neighborhood
        self.operands = fill_operands(call, tensors)
        self.graph = Graph(op.name)
        self.inputs: list[torch.Tensor] = []
        """One tensor for each input of the graph."""
        self.is_useful = False
        """Whether a float value becomes INT8, or an INT8 one float."""
        self._build = Builder(self.graph, registry.operators)
        self._first: QParams | None = None
        """Those of the first quantized operand."""

    def build(self) -> None:
        """Build the graph.

        Raises:
            ClikaError: eager rejects the call.
        """
        made = self._build(self.op.name, *map(self._add_operand, range(len(self.operands))), **self.call.attrs)
        results = (made,) if isinstance(made, Value) else made
        for value in results:
            self.graph.add_output(value)
        found, _ = interpret(self.graph, self.inputs)
        for index, tensor in enumerate(found):
            self.graph.set_output(index, self._add_result(results[index], tensor))
        self.is_useful &= all(map(_is_quantizable, found))

    def _add_operand(self, position: int) -> Any:
        operand, trait = self.operands[position], self.op.trait
        if not isinstance(operand, torch.Tensor):
            return operand
        if position in (trait.weight, trait.bias):
            return self.graph.add_constant(operand, f"w{position}")
        value = self.graph.add_input(TensorType(operand.dtype, tuple(operand.shape)), f"x{position}")
        if operand.dtype != torch.float32 or not self.neighborhood.reads_int8 or not operand.numel():
            self.inputs.append(operand)
            return value
        self.is_useful = True
        chosen = self._first if self._first and trait is UNIFIED_QPARAMS else compute_exact_qparams(operand)
        self._first = self._first or chosen
        self.inputs.append(chosen.scale * (operand / chosen.scale).round())
        return self._add_pair(value, chosen)

    def _add_result(self, value: Value, tensor: torch.Tensor) -> Value:
        if tensor.dtype != torch.float32 or not _is_quantizable(tensor):
            return value
        activation = self.neighborhood.activation
        if activation:
            value = self._build(activation, value, **ACTIVATION_ATTRS[activation])
            tensor = tensor.clamp(min=0)
        if not self.neighborhood.returns_int8:
            return value
        self.is_useful = True
        own = compute_qparams(range_of(tensor), QuantizedType())
        return self._add_pair(value, self._first if self._first and self._moves_elements(tensor) else own)

    def _moves_elements(self, result: torch.Tensor) -> bool:
        """Return whether a result has the elements of the first operand: placement gives both the same qparams."""
        return self.op.trait in (SHARED_QPARAMS, UNIFIED_QPARAMS) or torch.equal(result, self.inputs[0])

    def _add_pair(self, value: Value, scale: QParams) -> Value:
        """Add a ``quantize``/``dequantize`` pair."""
        codes = self._build("quantize", value, scale.scale, scale.zero_point, dtype=torch.uint8)
        return self._build("dequantize", codes, scale.scale, scale.zero_point)
