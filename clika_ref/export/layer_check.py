"""Find the layer of a quantized graph that a runtime computes differently, by running each on its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from clika_ref.compiled.runners import compile_temporarily, load_runner
from clika_ref.core.comparison import describe_differences
from clika_ref.core.errors import ClikaError, format_count
from clika_ref.core.execution import read_sizes
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.symbols import resolve
from clika_ref.core.targets import Target
from clika_ref.core.types import TensorType
from clika_ref.export.artifact_check import ROUNDING_TOLERANCE
from clika_ref.quantization.graph_runs import compute_outputs
from clika_ref.quantization.qdq.layer_weights import data_of, non_bias_operands

MAX_SHIFTED_SHARE = 1e-4
"""Maximum share of a result's integers that may be off by one, since sums are rounded to float32 in another order.

Of the 30 layers and sums of resnet18 in ONNX Runtime, the worst reaches a fifth of it.
"""


@dataclass(frozen=True)
class QuantizedRegion:
    """A node between quantized tensors, with the nodes that a runtime fuses into it."""

    node: Node
    inside: tuple[Node, ...]
    """The node, the dequantize nodes before it, and the nodes after it up to a quantize node."""
    result: Value


def describe_first_broken_layer(target: Target, graph: Graph, inputs: Sequence[torch.Tensor]) -> str:
    """Run each layer of a quantized graph alone in a target; describe the first that differs.

    Args:
        target: the target that runs them.
        graph: the quantized graph.
        inputs: inputs of the graph; the interpreter computes the inputs of each layer from them.
    """
    tensors: dict[Value, torch.Tensor] = dict(zip(graph.inputs, inputs, strict=True))
    compute_outputs(graph, inputs, lambda node, made: tensors.update(zip(node.outputs, made, strict=True)))
    sizes = read_sizes(graph, inputs)
    for region in find_regions(graph):
        alone, given = _isolate(region, tensors, sizes)
        node = region.node
        try:
            with compile_temporarily(alone, target) as artifact:
                (found,) = load_runner(target, artifact)(given)
            problem = _explain_problem(tensors[region.result], found)
        except ClikaError as error:  # the runtime fails on the layer alone; that must not hide the mismatch
            problem = f"it does not run alone: {error}"
        if problem:
            return f"The first layer that differs alone is {node.op.name} ({node.name}) in {node.origin}: {problem}"
    return "Each layer is correct alone: a fusion of the runtime differs"


def find_regions(graph: Graph) -> Iterator[QuantizedRegion]:
    """Yield the nodes that read only quantized tensors, except biases, in order, each with the nodes around it.

    Nodes with several results, such as a split, are omitted: they only move elements.
    """
    for node in graph.nodes:
        if len(node.outputs) != 1:
            continue
        made = {v: v.producer for v in node.inputs if isinstance(v, Value) and v.producer is not None}
        makers = {v: maker for v, maker in made.items() if maker.op_type == "dequantize"}
        multiplied = non_bias_operands(node)
        if multiplied and all(v in makers for v in multiplied):
            quantize = _follow_to_quantize(node)
            yield QuantizedRegion(node, (*dict.fromkeys(makers.values()), *quantize), quantize[-1].output)


def _follow_to_quantize(node: Node) -> list[Node]:
    """Return a node and its only readers up to a quantize node; the node alone if there is none."""
    found = [node]
    while found[-1].op_type != "quantize":
        uses = found[-1].output.uses
        reader = uses[0].user if len(uses) == 1 and uses[0].position == 0 else None
        if not isinstance(reader, Node) or len(reader.outputs) != 1:
            return [node]
        found.append(reader)
    return found


def _isolate(
    region: QuantizedRegion, tensors: Mapping[Value, torch.Tensor], sizes: Mapping[str, int]
) -> tuple[Graph, list[torch.Tensor]]:
    """Return the graph of a region, and its inputs."""
    alone, given = Graph("layer"), list[torch.Tensor]()
    own: dict[Value, Value] = {}

    def take(operand: Any) -> Any:
        if not isinstance(operand, Value):
            return resolve(operand, sizes)
        if operand not in own and operand.is_constant:
            own[operand] = alone.add_constant(data_of(operand), operand.name)
        elif operand not in own:
            tensor = tensors[operand]
            own[operand] = alone.add_input(TensorType(tensor.dtype, tuple(tensor.shape)), f"x{len(given)}")
            given.append(tensor)
        return own[operand]

    for node in region.inside:
        operands = [take(v) for v in node.inputs]
        attrs = {name: resolve(value, sizes) for name, value in node.attrs.items()}
        types = [_make_type(v, tensors) for v in node.outputs]
        twin = alone.insert(Node(node.op, operands, attrs, node.origin), types)
        own.update(zip(node.outputs, twin.outputs, strict=True))
    alone.add_output(own[region.result])
    return alone, given


def _make_type(value: Value, tensors: Mapping[Value, torch.Tensor]) -> TensorType:
    return TensorType(value.type.dtype, tuple(tensors[value].shape))


def _explain_problem(expected: torch.Tensor, found: torch.Tensor) -> str:
    """Describe how a result differs by more than rounding; empty if it does not."""
    if expected.dtype.is_floating_point or expected.shape != found.shape or expected.dtype != found.dtype:
        return describe_differences([expected], [found], ROUNDING_TOLERANCE).get(0, "")
    steps = (expected.int() - found.int()).abs()
    moved, furthest = int((steps > 0).sum()), int(steps.max()) if steps.numel() else 0
    if furthest <= 1 and moved <= max(1, MAX_SHIFTED_SHARE * steps.numel()):
        return ""
    return f"{moved:,} of {steps.numel():,} quantized elements differ, by at most {format_count(furthest, 'step')}"
