"""Selection of the parameters of a quantized module that files can store as integers with identical results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.registry import Registry
from clika_ref.core.targets import Target
from clika_ref.exporting.export import lower_for
from clika_ref.formulas import Formula
from clika_ref.quantization.compressing import has_rows
from clika_ref.quantization.layer_weights import numbers_of, weight_of
from clika_ref.quantization.quantizing import Plan, axis_of, layer_integers
from clika_ref.quantization.stored_weights import Moved, StoredWeight, Times
from clika_ref.quantization.unfolding import way_back


@torch.no_grad()
def integer_weights(graph: Graph, plan: Plan, target: Target, registry: Registry) -> dict[str, StoredWeight]:
    """Return the parameters that can be stored as integers and restored with identical results, by name.

    The integers are those of the lowered weights, which include batch norms, factors and orders of dims. A restored
    parameter must give the same integers when it is lowered and rounded, bit for bit. To verify this, the graph is
    lowered with the restored parameters and compared with the original. Parameters that fail are left out, and those
    with other readers, such as a table that is tied to the last layer.

    Args:
        graph: that of the module, bound to its current weights.
        plan: with the learned scales.
        target: to lower for.
        registry: the plugins.
    """
    lowered = _lowered(graph, plan, target, registry)
    found = _candidates(graph, lowered, plan, registry.operators)
    changed = graph.clone()
    for name, weight in found.items():
        changed.constants[name].data = weight.parameter()
    changed = _lowered(changed, plan, target, registry)
    layers = {weight.layer for weight in found.values()}
    if not _is_same(lowered, changed, but_weights_of=layers):
        return {}
    nodes, nearest = {n.name: n for n in changed.nodes if n.name in layers}, without_moves(plan, layers)
    again = {name: layer_integers(nodes[w.layer], nearest, registry.operators)[0] for name, w in found.items()}
    return {name: weight for name, weight in found.items() if torch.equal(again[name], weight.integers)}


def without_moves(plan: Plan, layers: Collection[str]) -> Plan:
    """Return a plan that rounds the weights of some layers to nearest, which restores their stored integers."""
    moved = {name: steps for name, steps in plan.moved.items() if name not in layers}
    compressed = {n: replace(held, moved=None) if n in layers else held for n, held in plan.compressed.items()}
    return replace(plan, moved=moved, compressed=compressed)


def _lowered(graph: Graph, plan: Plan, target: Target, registry: Registry) -> Graph:
    """Return a lowered clone of a graph, as it is right before quantization."""
    clone = graph.clone()
    lower_for(plan, clone, registry, target)
    clone.drop_unused_constants()
    return clone


def _candidates(
    stored: Graph, lowered: Graph, plan: Plan, operators: Mapping[str, Operator]
) -> dict[str, StoredWeight]:
    """Return the parameters that only the integers of one layer depend on, with the steps that restore each."""
    followers = Counter(name for constant in lowered.constants.values() for name in {*_origins(constant)})
    found: dict[str, StoredWeight] = {}
    for node in lowered.nodes:
        if node.name in plan.weights or node.name in plan.compressed:
            back = way_back(weight_of(node)) if len(weight_of(node).uses) == 1 else None
            if back is not None and _is_free(back[0], stored) and followers[back[0].name] == 1:
                found[back[0].name] = _stored(node, *back, plan, operators)
    return found


def _origins(constant: Any) -> Iterator[str]:
    """Yield the names of the constants that a constant is computed from."""
    if isinstance(constant, Value) and isinstance(constant.formula, Formula):
        for source in constant.formula.sources:
            yield from _origins(source)
    elif isinstance(constant, Value):
        yield constant.name


def _is_free(parameter: Value, stored: Graph) -> bool:
    """Return whether a constant is a parameter of the module, that no call writes to and that is finite."""
    known = stored.constants.get(parameter.name)
    is_own = known is not None and known.data is parameter.data and parameter.name not in stored.state
    return is_own and bool(numbers_of(parameter).isfinite().all())


def _stored(
    node: Node, parameter: Value, steps: list[Times | Moved], plan: Plan, operators: Mapping[str, Operator]
) -> StoredWeight:
    """Return the integers of a layer, with the steps that restore its parameter."""
    integers, scales = layer_integers(node, plan, operators)
    held, sides = plan.compressed.get(node.name), tuple(integers.shape)
    if held is None:
        axis = axis_of(node, scales)
        first = [Times(sides, scales.reshape([-1 if a == axis else 1 for a in range(len(sides))]))]
        bits = plan.scheme.weights.bits
    else:
        outputs, blocks = scales.shape
        first = [Times((outputs, blocks, sides[1] // blocks), scales[..., None])]
        first += [] if has_rows(node) else [Moved(sides[::-1], (1, outputs))]
        bits = held.bits
    assert parameter.data is not None
    return StoredWeight(node.name, integers, bits, (*first, *steps), parameter.data.dtype)


def _is_same(graph: Graph, other: Graph, *, but_weights_of: Collection[str]) -> bool:
    """Return whether two graphs compute the same, with the same names, except for the weights of some layers."""
    if len(graph) != len(other):
        return False
    for node, twin in zip(graph.nodes, other.nodes, strict=True):
        if (node.kind, node.attrs, [v.name for v in node.outputs]) != (
            twin.kind,
            twin.attrs,
            [v.name for v in twin.outputs],
        ):
            return False
        skipped = node.op.trait.weight if node.name in but_weights_of else None
        operands = enumerate(zip(node.inputs, twin.inputs, strict=True))
        if not all(_is_same_operand(a, b) for position, (a, b) in operands if position != skipped):
            return False
    return True


def _is_same_operand(operand: Any, other: Any) -> bool:
    if not isinstance(operand, Value) or not isinstance(other, Value):
        return operand == other
    if operand.name != other.name:
        return False
    one, two = operand.data, other.data
    return one is two or (one is not None and two is not None and torch.equal(one, two))
