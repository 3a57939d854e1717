"""Lower the adapters of a graph: merge them into weights first, or add them to the lowered layers at the end.

The passes in between do not see adapters: batch norm is folded, SmoothQuant applied, and names are those of a plan made
without adapters. The changes of the weight are then applied to the adapter: a factor per output scales the second
matrix, a factor per input the first.

Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs (2023), for adapters next to quantized weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clika_ref.core.deferred_constants import DeferredConstant, transpose_weight
from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.lora.adapters import (
    ADAPTER_OPERATORS,
    Adapter,
    adapters_of,
    merge_arguments,
    merge_weight,
    weight_position,
)
from clika_ref.lora.attaching import insert_adapter
from clika_ref.pruning.masks import MASK_PREFIX as MASKS
from clika_ref.quantization.qdq.channel_scales import scale_along_dim, scale_input_channels
from clika_ref.quantization.qdq.norm_folding import fold_weight


@dataclass(frozen=True)
class DetachedAdapter:
    """An adapter that is temporarily removed from the graph."""

    weight: str
    """Name of the parameter; the adapter belongs to its layers."""
    down: Value
    up: Value
    attributes: Mapping[str, Any]
    """The attributes of its nodes, except those copied from the layer."""
    names: Mapping[str, str]
    """The names of its nodes, by the names of the layers."""
    origin: str


def detach_adapters(graph: Graph, *, is_quantized: bool) -> list[DetachedAdapter]:
    """Remove the adapters from a clone before lowering; return those that are not merged into weights.

    Args:
        graph: changed in place.
        is_quantized: whether the weights are quantized. Then adapters with ``merging="auto"`` are not merged, so that
            the quantized weights do not change.
    """
    found: list[DetachedAdapter] = []
    for adapter in adapters_of(graph):
        merging = adapter.attributes["merging"]
        if merging == "on" or (merging == "auto" and not is_quantized and not adapter.is_masked):
            _merge(graph, adapter)
        else:
            origin = str(adapter.nodes[0].origin)
            names = {layer.name: node.name for layer, node in zip(adapter.layers, adapter.nodes, strict=True)}
            found.append(
                DetachedAdapter(adapter.weight.name, adapter.down, adapter.up, adapter.attributes, names, origin)
            )
        for node in adapter.nodes:
            graph.replace(node.output, node.inputs[0])
            graph.erase(node)
    return found


def _merge(graph: Graph, adapter: Adapter) -> None:
    """Replace the weight of the adapter's layers by the merged weight."""
    weight, layers = adapter.weight, adapter.layers
    arguments = tuple(merge_arguments(adapter, layers[0]).items())
    made = DeferredConstant(merge_weight, (weight, adapter.down, adapter.up), arguments)
    merged = graph.add_constant(made, weight.name, weight.type)
    for layer in layers:
        graph.set_input(layer, weight_position(layer), merged)


def reattach_adapters(graph: Graph, aside: Sequence[DetachedAdapter], operators: Mapping[str, Operator]) -> list[Node]:
    """Add adapters to the lowered layers that read weights derived from theirs; return the nodes.

    Raises:
        ModelError: a pass changed a weight in a way that cannot be applied to its adapter.
    """
    if not aside:
        return []
    known, found = {adapter.weight: adapter for adapter in aside}, dict[str, list[Node]]()
    nodes = list(graph.nodes)
    for layer, following in zip(nodes, [*nodes[1:], None], strict=True):
        weight = layer.inputs[weight_position(layer)] if layer.op_type in ADAPTER_OPERATORS else None
        root, steps = _trace_weight(weight)
        if root in known:
            down, up = _apply_steps(graph, known[root], steps)
            node = insert_adapter(graph, layer, (down, up), known[root].attributes, operators, following)
            node.output.name = known[root].names.get(layer.name, node.name)
            found.setdefault(root, []).append(node)
    lost = [adapter for adapter in aside if adapter.weight not in found]
    if lost:
        shown = ", ".join(f"{adapter.weight!r} in {adapter.origin}" for adapter in lost)
        raise ModelError(
            f"cannot lower the adapters of {shown}: a pass replaced their layers. Attach them with "
            "LoraSettings(merging='on')."
        )
    return [node for nodes in found.values() for node in nodes]


def _trace_weight(operand: Any) -> tuple[str, list[DeferredConstant]]:
    """Return the name of the parameter that a weight is computed from, and the deferred constants applied, in order."""
    steps: list[DeferredConstant] = []
    while isinstance(operand, Value):
        deferred = operand.deferred_data
        if isinstance(deferred, DeferredConstant) and deferred.sources and isinstance(deferred.sources[0], Value):
            steps.append(deferred)
            operand = deferred.sources[0]
        elif operand.producer is not None and _is_mask(operand.producer.inputs):
            operand = operand.producer.inputs[0]
        else:
            return operand.name, steps[::-1]
    return "", []


def _is_mask(operands: Sequence[Any]) -> bool:
    """Whether the second of two factors is the mask of the first, which the adapter does not have."""
    return len(operands) == 2 and isinstance(operands[1], Value) and operands[1].name.startswith(MASKS)


def _apply_steps(graph: Graph, adapter: DetachedAdapter, steps: Sequence[DeferredConstant]) -> tuple[Value, Value]:
    """Return the matrices of an adapter after applying the changes of the weight."""
    down, up = adapter.down, adapter.up
    for deferred in steps:
        arguments = dict(deferred.arguments)
        if deferred.function is scale_input_channels:
            down = _apply_deferred(down, deferred)
        elif deferred.function is fold_weight or (deferred.function is scale_along_dim and arguments["axis"] == 0):
            up = _apply_deferred(up, deferred)
        elif deferred.function is not transpose_weight and not _is_mask(deferred.sources):
            name = getattr(deferred.function, "__name__", repr(deferred.function))
            raise ModelError(
                f"cannot keep the adapter of {adapter.weight!r} in {adapter.origin} unmerged: a pass changed the "
                f"weight by more than a scale of its channels ({name}). Attach it with LoraSettings(merging='on')."
            )
    return _register_matrix(graph, down), _register_matrix(graph, up)


def _apply_deferred(matrix: Value, deferred: DeferredConstant) -> Value:
    return Value(
        matrix.type,
        matrix.name,
        data=DeferredConstant(deferred.function, (matrix, *deferred.sources[1:]), deferred.arguments),
    )


def _register_matrix(graph: Graph, matrix: Value) -> Value:
    """Register a matrix as a constant of the graph; a derived one becomes a constant of its own."""
    if matrix.deferred_data is not None:
        return graph.add_constant(matrix.deferred_data, matrix.name, matrix.type)
    return graph.constants.setdefault(matrix.name, Value(matrix.type, matrix.name, data=matrix.data))
