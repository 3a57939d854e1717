"""Build the dependency graph of channels, by tracing the results of each node to its operands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from clika_ref.core.ir import Graph, Node, Value, list_read_constants
from clika_ref.pruning.attribute_search import check_removable
from clika_ref.pruning.channel_dims import GROUP_DIM, ChannelDims, find_channel_dims
from clika_ref.pruning.dependency_graph import DependencyGraph, DimUnits, is_periodic
from clika_ref.pruning.index_tracing import IndexSources, trace_sources
from clika_ref.pruning.node_probes import NodeProbe, probe_node
from clika_ref.pruning.unit_propagation import propagate_units
from clika_ref.pruning.units import ABSENT_UNIT, Units

MAX_CACHED_SOURCES = 64
"""Maximum number of cached results: models repeat the same few layers."""


def build_dependency_graph(graph: Graph, sizes: Mapping[str, int]) -> DependencyGraph:
    """Return the units of a graph: the indices along dims that can only be removed together.

    Most nodes are analysed by `trace_sources`, which needs no declaration by the operator. For layers that multiply by
    weights, the trait states the channel dims.

    Source: Fang et al., DepGraph: Towards Any Structural Pruning (2023), for the graph; tracing replaces its rules.

    Args:
        graph: the graph of a module.
        sizes: values of the graph's symbols, for running nodes.
    """
    found = DependencyGraph(graph)
    with torch.no_grad():
        for node in graph.nodes:
            dims = find_channel_dims(node)
            if node.bodies:
                _fix_control_flow(found, node)
            elif dims is not None and found.units_of(dims.weight):
                _couple_layer(found, node, dims)
            elif any(found.units_of(v) for v in node.inputs if isinstance(v, Value)):
                _couple_node(found, node, sizes)
    for value in graph.outputs:
        found.fix(value, f"the model returns %{value.name}")
    for name, value in graph.state.items():
        found.fix(value, f"a call writes it to {name!r}")
    return found


def _fix_control_flow(found: DependencyGraph, node: Node) -> None:
    """Keep all channels that control flow reads or returns, also in its bodies."""
    inner = [value for body in node.bodies for value in list_read_constants(body)]
    for value in (*node.inputs, *inner, *node.outputs):
        if isinstance(value, Value):
            found.fix(value, f"{node.op_type} ({node.name}) runs layers that are not pruned")


def _couple_layer(found: DependencyGraph, node: Node, layer: ChannelDims) -> None:
    """Couple the output channels of a layer with its weight and bias, and its input channels with the weight."""
    units, given, weight = found.units, found.units_of(layer.x), found.units_of(layer.weight)
    because = f"{node!r} has its channels on other dims"
    for axis, some in weight.items():
        if axis not in (layer.outer, layer.inner):
            units.fix_all(some, because)
    passed = {a: some for a, some in given.items() if layer.keeps_other_dims and a != layer.channel}
    for axis in given.keys() - passed.keys() - {layer.channel}:
        units.fix_all(given[axis], because)
    made = _couple_groups(found, node, layer) if layer.groups > 1 else _couple_ungrouped(found, node, layer)
    if layer.bias is not None and made is not None:
        units.merge_all(made, found.units_of(layer.bias).get(0, made))
    found.layers[node] = layer
    found.dim_units[node.output] = {**passed, **({} if made is None else {layer.channel % node.output.type.rank: made})}


def _couple_ungrouped(found: DependencyGraph, node: Node, layer: ChannelDims) -> Tensor | None:
    """Couple the input channels of an ungrouped layer with its weight; return its output channels."""
    given, weight = found.units_of(layer.x).get(layer.channel), found.units_of(layer.weight)
    inner = weight.get(layer.inner)
    if given is None and inner is not None:
        found.units.fix_all(inner, f"{node!r} reads %{layer.x.name}, and its dim {layer.channel} cannot change")
    elif inner is None and given is not None:
        found.units.fix_all(given, f"{node!r} has one channel")
    elif given is not None and inner is not None:
        found.units.merge_all(given, inner)
    return weight.get(layer.outer)


def _couple_groups(found: DependencyGraph, node: Node, layer: ChannelDims) -> Tensor | None:
    """Make each group of a layer one unit, with its input and output channels."""
    given, weight = found.units_of(layer.x).get(layer.channel), found.units_of(layer.weight)
    reason = f"{node!r} reads %{layer.x.name}, and its dim {layer.channel} cannot change"
    if 1 - GROUP_DIM in weight:
        found.units.fix_all(weight[1 - GROUP_DIM], f"{node!r} has groups of equally many channels")
    own = weight[GROUP_DIM]
    if given is None:
        found.units.fix_all(own, reason)
        return None
    read = given.reshape(layer.groups, -1)
    for number, members in enumerate(own.reshape(layer.groups, -1)):
        for unit in (*read[number].tolist(), *members.tolist()):
            found.units.merge(int(read[number][0]), unit)
    return read[:, 0].repeat_interleave(layer.out_channels // layer.groups)


def _couple_node(found: DependencyGraph, node: Node, sizes: Mapping[str, int]) -> None:
    """Trace the results of a node to its operands, and couple the units accordingly."""
    values = [v for v in node.inputs if isinstance(v, Value)]
    given = [
        (i, axis)
        for i, v in enumerate(node.inputs)
        if isinstance(v, Value)
        for axis, units in found.units_of(v).items()
        if found.units.free(units.tolist())
    ]
    others = [v for v in values if not v.is_constant and v.type.rank and v.type.dtype.is_floating_point]
    if others and all(node.inputs[i].is_constant for i, _ in given):
        for i, axis in given:
            found.units.fix_all(
                found.units_of(node.inputs[i])[axis], f"{node!r} reads %{others[0].name}, which cannot change"
            )
        return
    asked = probe_node(node, sizes)
    if isinstance(asked, str):
        reason = asked
    else:
        _propagate(found, asked, given, sizes)
        _split_shuffled(found, node)
        reason = check_removable(asked, found)
    if reason:
        for value in (*values, *node.outputs):
            found.fix(value, f"{node!r}: {reason}")


def _propagate(
    found: DependencyGraph, asked: NodeProbe, given: Iterable[tuple[int, int]], sizes: Mapping[str, int]
) -> None:
    """Set the units of the outputs of a node."""
    node = asked.node
    other = probe_node(node, sizes, chosen=1) if asked.chooses else asked
    reached: list[dict[int, list[DimUnits]]] = [{} for _ in node.outputs]

    def follow(position: int, axis: int, own: Tensor) -> None:
        come = _get_sources(found, asked, position, axis)
        again = come if other is asked or isinstance(other, str) else _get_sources(found, other, position, axis)
        label = f"dim {axis} of its operand {position}"
        if come is None:
            found.units.fix_all(own, f"{node!r} combines elements along {label}")
        elif isinstance(other, str) or not come.is_same(again):
            found.units.fix_all(own, f"{node!r} selects from {label} by data")
        else:
            if come.has_no_source:
                found.units.fix_all(own, f"the effect of {node!r} on {label} is unknown")
            found.units.merge_all(own[come.tied[:, 0]], own[come.tied[:, 1]])
            for dims, p in zip(reached, come.indices, strict=True):
                dims.setdefault(position, []).append(propagate_units(found.units, own, p, f"{node!r}"))

    for position, axis in given:
        follow(position, axis, found.units_of(node.inputs[position])[axis])
    for position, axis in _find_mapped_dims(asked, given, reached):
        stays = f"{node!r} reads %{node.inputs[position].name}, which cannot change"
        follow(position, axis, found.units.add_fixed(asked.operands[position].shape[axis], stays))
    for output, dims in zip(node.outputs, reached, strict=True):
        found.dim_units[output] = _merge_units(found.units, output, dims.values(), f"{node!r}")


def _split_shuffled(found: DependencyGraph, node: Node) -> None:
    """Split a permuted dim into the number of parts that an attribute of the node states, for channel shuffles.

    The parts are crossed like heads: whole parts may be removed, or the same indices within each part.
    """
    units = found.units
    counts = [n for n in node.attrs.values() if type(n) is int and n > 1]
    pairs = [(v, output) for v in node.inputs if isinstance(v, Value) for output in node.outputs if counts]
    for value, output in pairs:
        for axis, own in found.units_of(value).items():
            before, after = units.roots(own), units.roots(found.units_of(output).get(axis, own))
            if torch.equal(before, after) or not torch.equal(before.sort()[0], after.sort()[0]):
                continue
            for count in (n for n in counts if len(own) % n == 0 and n < len(own)):
                parts, within = units.fresh(count).tolist(), units.fresh(len(own) // count).tolist()
                for i, unit in enumerate(own.tolist()):
                    units.merge(unit, units.cross([parts[i // len(within)], within[i % len(within)]]))


def _get_sources(found: DependencyGraph, asked: NodeProbe, position: int, axis: int) -> IndexSources | None:
    """Return the result of `trace_sources`, cached for nodes of the same behavior."""
    of_node = asked.cache_key
    if of_node is None:
        return trace_sources(asked, position, axis)
    key = of_node, position, axis
    if key not in found.traced_sources:
        if len(found.traced_sources) >= MAX_CACHED_SOURCES:
            found.traced_sources.clear()
        found.traced_sources[key] = trace_sources(asked, position, axis)
    return found.traced_sources[key]


def _find_mapped_dims(
    asked: NodeProbe, given: Iterable[tuple[int, int]], reached: list[dict[int, list[DimUnits]]]
) -> Iterator[tuple[int, int]]:
    """Yield dims without units of operands that map to a dim of a result with units of other operands."""
    for position in filter(asked.is_floating, range(len(asked.operands))):
        lengths = enumerate(asked.operands[position].shape)
        for axis in (a for a, n in lengths if n > 1 and (position, a) not in given):
            last = torch.tensor([asked.operands[position].shape[axis] - 1])
            marked = asked.operands[position].index_fill(axis, last, torch.nan)
            results = asked.run([*asked.operands[:position], marked, *asked.operands[position + 1 :]])
            for dims, result in zip(reached, results, strict=True):
                of_others = {a for i, some in dims.items() if i != position for one in some for a in one}
                own = {a for one in dims.get(position, ()) for a in one}
                if any(_is_partly_nan(result.isnan(), a) for a in of_others - own):
                    yield position, axis
                    break


def _is_partly_nan(is_nan: Tensor, axis: int) -> bool:
    """Whether some indices along a dim hold NaN, and others none."""
    rows = is_nan.movedim(axis, 0).reshape(is_nan.shape[axis], -1).any(1)
    return bool(rows.any() and not rows.all())


def _merge_units(units: Units, output: Value, operands: Iterable[Iterable[DimUnits]], reason: str) -> DimUnits:
    """Return the units of an output: those from several dims of one operand cross, those of several operands merge."""
    found: DimUnits = {}
    for reached in operands:
        own: DimUnits = {}
        for dims in reached:
            for axis, some in dims.items():
                own[axis] = _cross_units(units, own[axis], some) if axis in own else some
        for axis, some in own.items():
            before = found.get(axis, some)
            units.merge_all(before, some)
            found[axis] = torch.where(before == ABSENT_UNIT, some, before)
    for axis, some in found.items():
        missing = some == ABSENT_UNIT
        if missing.any():
            some[missing] = units.add_fixed(int(missing.sum()), f"{reason}: it adds elements of its own there")
        if not is_periodic(output.type.shape[axis], units.roots(some)):
            units.fix_all(some, f"{reason}: the length of dim {axis} depends on the input")
    return found


def _cross_units(units: Units, some: Tensor, others: Tensor) -> Tensor:
    pairs = zip(some.tolist(), others.tolist(), strict=True)
    return torch.tensor(
        [units.cross([u for u in pair if u != ABSENT_UNIT]) if max(pair) >= 0 else ABSENT_UNIT for pair in pairs]
    )
