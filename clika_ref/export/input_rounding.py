"""Simulate runtimes that round the inputs of layers with low-bit weights to INT8, block by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from clika_ref.core.ir import Graph, Node, Value, walk
from clika_ref.core.quantization_scheme import QuantizationScheme
from clika_ref.quantization.graph_runs import compute_outputs
from clika_ref.quantization.qdq.packed_weights import round_in_blocks


@dataclass(frozen=True, slots=True)
class LowBitFormat:
    """The low-bit weight format of a layer with float inputs."""

    bits: int
    block_size: int
    """0 for one scale per row."""


def find_low_bit_layers(graph: Graph) -> dict[Node, LowBitFormat]:
    """Return the layers with float inputs and a quantized weight."""
    found: dict[Node, LowBitFormat] = {}
    for node in walk(graph):
        weight = node.op.trait.weight
        if weight is not None and isinstance(node.inputs[weight], Value):
            made = _find_dequantize(_before_permute(node.inputs[weight]))
            if (
                made is not None
                and _before_permute(made.first_tensor).is_constant
                and _find_dequantize(node.inputs[0]) is None
            ):
                found[node] = LowBitFormat(made.attrs["bits"], made.attrs["block_size"] or 0)
    return found


def _before_permute(value: Value) -> Value:
    """Return the operand of a transposition: the weight of a layer has the rows of a table then."""
    node = value.producer
    return node.first_tensor if node is not None and node.op_type == "permute" else value


def _find_dequantize(value: Value) -> Node | None:
    return value.producer if value.producer is not None and value.producer.op_type == "dequantize" else None


def find_rounding_layers(graph: Graph, scheme: QuantizationScheme | None) -> dict[Node, int]:
    """Return the layers with inputs that the target rounds on multiplication, and the number of elements per scale."""
    kind = scheme.weights_only if scheme is not None else None
    if kind is None or not kind.rounds_inputs:
        return {}
    return {node: weight.block_size or kind.block_size for node, weight in find_low_bit_layers(graph).items()}


def run_with_rounded_inputs(graph: Graph, inputs: Sequence[Tensor], layers: Mapping[Node, int]) -> list[Tensor]:
    """Return the outputs of a graph, with the inputs of some layers rounded in blocks."""
    needed = {node.inputs[i] for node in layers for i in (0, node.op.trait.weight or 0)}
    tensors = {v: x for v, x in zip(graph.inputs, inputs, strict=True) if v in needed}

    def observe(node: Node, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if node in layers:
            x, weight = (tensors[node.inputs[i]] for i in (0, node.op.trait.weight or 0))
            others = [v.data if isinstance(v, Value) else v for v in node.inputs[2:]]
            results = (node.op(round_in_blocks(x, layers[node]), weight, *others, **node.attrs),)
        tensors.update((v, x) for v, x in zip(node.outputs, results, strict=True) if v in needed)
        return results

    def enter(body: Graph, operands: Sequence[Tensor]) -> None:
        tensors.update((v, x) for v, x in zip(body.inputs, operands, strict=True) if v in needed)

    return compute_outputs(graph, inputs, observe, enter)
