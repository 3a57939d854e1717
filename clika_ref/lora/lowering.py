"""Lower the adapters of a graph: merge them into weights first, or add them to the lowered layers at the end.

The passes in between do not see adapters: batch norm is folded, SmoothQuant applied, and names are those of a plan made
without adapters. The changes of the weight are then applied to the adapter: a factor per output scales the second
matrix, a factor per input the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.formulas import Formula, transposed
from clika_ref.lora.adapters import (
    BESIDE,
    Adapter,
    adapters_of,
    arguments_of_merging,
    merged_weight,
    place_of_weight,
)
from clika_ref.lora.attaching import put_beside
from clika_ref.norm_folding import folded_weight
from clika_ref.pruning.masks import PREFIX as MASKS
from clika_ref.quantization.factors import scaled_along, times


@dataclass(frozen=True)
class SetAside:
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


def set_aside(graph: Graph, *, is_quantized: bool) -> list[SetAside]:
    """Remove the adapters from a clone before lowering; return those that are not merged into weights.

    Args:
        graph: changed in place.
        is_quantized: whether the weights are quantized. Then adapters with ``merging="auto"`` are not merged, so that
            the quantized weights do not change.
    """
    found: list[SetAside] = []
    for adapter in adapters_of(graph):
        merging = adapter.attributes["merging"]
        if merging == "on" or (merging == "auto" and not is_quantized and not adapter.is_masked):
            _merge(graph, adapter)
        else:
            origin = str(adapter.nodes[0].origin)
            names = {layer.name: node.name for layer, node in zip(adapter.layers, adapter.nodes, strict=True)}
            found.append(SetAside(adapter.weight.name, adapter.down, adapter.up, adapter.attributes, names, origin))
        for node in adapter.nodes:
            graph.replace(node.output, node.inputs[0])
            graph.erase(node)
    return found


def _merge(graph: Graph, adapter: Adapter) -> None:
    """Replace the weight of the adapter's layers by the merged weight."""
    weight, layers = adapter.weight, adapter.layers
    arguments = tuple(arguments_of_merging(adapter, layers[0]).items())
    made = Formula(merged_weight, (weight, adapter.down, adapter.up), arguments)
    merged = graph.add_constant(made, weight.name, weight.type)
    for layer in layers:
        graph.set_input(layer, place_of_weight(layer), merged)


def restore_beside(graph: Graph, aside: Sequence[SetAside], operators: Mapping[str, Operator]) -> list[Node]:
    """Add adapters to the lowered layers that read weights derived from theirs; return the nodes.

    Raises:
        ModelError: a pass changed a weight in a way that cannot be applied to its adapter.
    """
    if not aside:
        return []
    known, found = {adapter.weight: adapter for adapter in aside}, dict[str, list[Node]]()
    nodes = list(graph.nodes)
    for layer, following in zip(nodes, [*nodes[1:], None], strict=True):
        weight = layer.inputs[place_of_weight(layer)] if layer.kind in BESIDE else None
        root, steps = _made_of(weight)
        if root in known:
            down, up = _followed(graph, known[root], steps)
            node = put_beside(graph, layer, (down, up), known[root].attributes, operators, following)
            node.output.name = known[root].names.get(layer.name, node.name)
            found.setdefault(root, []).append(node)
    lost = [adapter for adapter in aside if adapter.weight not in found]
    if lost:
        shown = ", ".join(f"{adapter.weight!r} in {adapter.origin}" for adapter in lost)
        msg = (
            f"the adapters beside {shown} have no layer where the graph is written: a pass has made something else of "
            "it; attach them with LoraSettings(merging='on')"
        )
        raise ModelError(msg)
    return [node for nodes in found.values() for node in nodes]


def _made_of(operand: Any) -> tuple[str, list[Formula]]:
    """Return the name of the parameter behind a weight, and the formulas applied to it, in order."""
    steps: list[Formula] = []
    while isinstance(operand, Value):
        formula = operand.formula
        if isinstance(formula, Formula) and formula.sources and isinstance(formula.sources[0], Value):
            steps.append(formula)
            operand = formula.sources[0]
        elif operand.producer is not None and _is_mask(operand.producer.inputs):
            operand = operand.producer.inputs[0]
        else:
            return operand.name, steps[::-1]
    return "", []


def _is_mask(operands: Sequence[Any]) -> bool:
    """Whether the second of two factors is the mask of the first, which the adapter does not have."""
    return len(operands) == 2 and isinstance(operands[1], Value) and operands[1].name.startswith(MASKS)


def _followed(graph: Graph, adapter: SetAside, steps: Sequence[Formula]) -> tuple[Value, Value]:
    """Return the matrices of an adapter after applying the changes of the weight."""
    down, up = adapter.down, adapter.up
    for formula in steps:
        arguments = dict(formula.arguments)
        if formula.function is times:
            down = _after(down, formula)
        elif formula.function is folded_weight or (formula.function is scaled_along and arguments["axis"] == 0):
            up = _after(up, formula)
        elif formula.function is not transposed and not _is_mask(formula.sources):
            name = getattr(formula.function, "__name__", repr(formula.function))
            msg = (
                f"an adapter cannot stay beside the layers of {adapter.weight!r} in {adapter.origin}: a pass has made "
                f"something of the weight that is no factor of its channels ({name}); attach it with "
                "LoraSettings(merging='on')"
            )
            raise ModelError(msg)
    return _registered(graph, down), _registered(graph, up)


def _after(matrix: Value, formula: Formula) -> Value:
    return Value(
        matrix.type,
        matrix.name,
        data=Formula(formula.function, (matrix, *formula.sources[1:]), formula.arguments),
    )


def _registered(graph: Graph, matrix: Value) -> Value:
    """Register a matrix as a constant of the graph; a derived one becomes a constant of its own."""
    if matrix.formula is not None:
        return graph.add_constant(matrix.formula, matrix.name, matrix.type)
    return graph.constants.setdefault(matrix.name, Value(matrix.type, matrix.name, data=matrix.data))
