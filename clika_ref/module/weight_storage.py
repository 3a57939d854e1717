"""Selection of the parameters of a quantized module that files can store as integers with identical results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from clika_ref.compiled.lowering import lower_for
from clika_ref.core.deferred_constants import DeferredConstant
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.registry import Registry
from clika_ref.core.targets import Target
from clika_ref.core.traits import LOOKUP
from clika_ref.quantization.qdq.insertion import Plan, quantize_layer_weight, scale_axis_of, weight_as_table
from clika_ref.quantization.qdq.invert_folding import find_inverse_steps
from clika_ref.quantization.qdq.layer_weights import data_of, reshape_along_dim, weight_of
from clika_ref.quantization.qdq.packed_weights import has_output_rows
from clika_ref.quantization.qdq.stored_weights import LayoutStep, MultiplyStep, StoredWeight


@torch.no_grad()
def find_storable_weights(graph: Graph, plan: Plan, target: Target, registry: Registry) -> dict[str, StoredWeight]:
    """Return the parameters that can be stored as integers and restored with identical results, by name.

    The integers are those of the lowered weights, which include batch norms, factors and orders of dims. A restored
    parameter must give the same integers when it is lowered and rounded, bit for bit. To verify this, the graph is
    lowered with the restored parameters and compared with the original. Parameters that fail are left out, and those
    with other readers; a lookup with the integers of a layer is none.

    Args:
        graph: that of the module, bound to its current weights.
        plan: with the learned scales.
        target: to lower for.
        registry: the plugins.
    """
    lowered = _lower_clone(graph, plan, target, registry)
    found = _find_candidates(graph, lowered, plan, registry.operators)
    changed = graph.clone()
    for name, weight in found.items():
        changed.constants[name].data = weight.restore_parameter()
    changed = _lower_clone(changed, plan, target, registry)
    layers = {name for weight in found.values() for name in weight.readers}
    if not _is_equivalent(lowered, changed, but_weights_of=layers):
        return {}
    nodes, nearest = {n.name: n for n in changed.nodes if n.name in layers}, with_nearest_rounding(plan, layers)
    again = {name: quantize_layer_weight(nodes[w.layer], nearest, registry.operators)[0] for name, w in found.items()}
    return {name: weight for name, weight in found.items() if torch.equal(again[name], weight.quantized)}


def with_nearest_rounding(plan: Plan, layers: Collection[str]) -> Plan:
    """Return a plan that rounds the weights of some layers to nearest, which restores their stored integers."""
    moved = {name: steps for name, steps in plan.offsets.items() if name not in layers}
    compressed = {
        n: replace(weight, offsets=None) if n in layers else weight for n, weight in plan.packed_weights.items()
    }
    return replace(plan, offsets=moved, packed_weights=compressed)


def _lower_clone(graph: Graph, plan: Plan, target: Target, registry: Registry) -> Graph:
    """Return a lowered clone of a graph, as it is right before quantization."""
    clone = graph.clone()
    lower_for(plan, clone, registry, target)
    clone.drop_unused_constants()
    return clone


def _find_candidates(
    stored: Graph, lowered: Graph, plan: Plan, operators: Mapping[str, Operator]
) -> dict[str, StoredWeight]:
    """Return the parameters that only the integers of one layer depend on, with the steps that restore each."""
    followers = Counter(name for constant in lowered.constants.values() for name in {*_source_names(constant)})
    found: dict[str, StoredWeight] = {}
    for node in lowered.nodes:
        if node.name in plan.weights or node.name in plan.packed_weights:
            lookups = _find_equal_lookups(node, plan)
            back = find_inverse_steps(weight_of(node)) if len(weight_of(node).uses) == 1 + len(lookups) else None
            if back is not None and _is_restorable(back[0], stored) and followers[back[0].name] == 1:
                found[back[0].name] = replace(_store_weight(node, *back, plan, operators), lookups=lookups)
    return found


def _find_equal_lookups(node: Node, plan: Plan) -> tuple[str, ...]:
    """Return the names of the lookups in the weight of a layer that read the same integers."""
    own = plan.packed_weights.get(node.name) or weight_as_table(node, plan)
    users = {use.user for use in weight_of(node).uses if isinstance(use.user, Node) and use.user is not node}
    forms = {user.name: plan.packed_weights.get(user.name) for user in users if user.op.trait is LOOKUP}
    return tuple(sorted(name for name, form in forms.items() if form is not None and form.is_equal(own)))


def _source_names(constant: Any) -> Iterator[str]:
    """Yield the names of the constants that a constant is computed from."""
    if isinstance(constant, Value) and isinstance(constant.deferred_data, DeferredConstant):
        for source in constant.deferred_data.sources:
            yield from _source_names(source)
    elif isinstance(constant, Value):
        yield constant.name


def _is_restorable(parameter: Value, stored: Graph) -> bool:
    """Return whether a constant is a parameter of the module, that no call writes to and that is finite."""
    known = stored.constants.get(parameter.name)
    is_own = known is not None and known.data is parameter.data and parameter.name not in stored.state
    return is_own and bool(data_of(parameter).isfinite().all())


def _store_weight(
    node: Node, parameter: Value, steps: list[MultiplyStep | LayoutStep], plan: Plan, operators: Mapping[str, Operator]
) -> StoredWeight:
    """Return the integers of a layer, with the steps that restore its parameter."""
    integers, scales = quantize_layer_weight(node, plan, operators)
    packed, shape = plan.packed_weights.get(node.name), tuple(integers.shape)
    if packed is None:
        axis = scale_axis_of(node, scales) or 0
        first = [MultiplyStep(shape, reshape_along_dim(scales, axis, len(shape)))]
        bits = plan.scheme.weights.bits
    else:
        outputs, blocks = scales.shape
        first = [MultiplyStep((outputs, blocks, shape[1] // blocks), scales[..., None])]
        first += [] if has_output_rows(node) else [LayoutStep(shape[::-1], (1, outputs))]
        bits = packed.bits
    return StoredWeight(node.name, integers, bits, (*first, *steps), data_of(parameter).dtype)


def _is_equivalent(graph: Graph, other: Graph, *, but_weights_of: Collection[str]) -> bool:
    """Return whether two graphs compute the same, with the same names, except for the weights of some layers."""
    if len(graph) != len(other):
        return False
    for node, twin in zip(graph.nodes, other.nodes, strict=True):
        if (node.op_type, node.attrs, [v.name for v in node.outputs]) != (
            twin.op_type,
            twin.attrs,
            [v.name for v in twin.outputs],
        ):
            return False
        skipped = node.op.trait.weight if node.name in but_weights_of else None
        operands = enumerate(zip(node.inputs, twin.inputs, strict=True))
        if not all(_is_equal_operand(a, b) for position, (a, b) in operands if position != skipped):
            return False
    return True


def _is_equal_operand(operand: Any, other: Any) -> bool:
    if not isinstance(operand, Value) or not isinstance(other, Value):
        return operand == other
    if operand.name != other.name:
        return False
    one, two = operand.data, other.data
    return one is two or (one is not None and two is not None and torch.equal(one, two))
