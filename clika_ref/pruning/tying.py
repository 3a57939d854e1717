"""Build the dependency graph of channels, by tracing the results of each node to its operands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from clika_ref.core.ir import Graph, Node, Value
from clika_ref.pruning.attributes import refusal
from clika_ref.pruning.dependencies import Dependencies, Sides, in_periods
from clika_ref.pruning.layer_sides import LayerSides, layer_sides
from clika_ref.pruning.probing import Probe, probe
from clika_ref.pruning.sources import Sources, sources
from clika_ref.pruning.spreading import spread
from clika_ref.pruning.units import ABSENT, Units

REMEMBERED = 64
"""Maximum number of cached results: models repeat the same few layers."""


def dependencies(graph: Graph, sizes: Mapping[str, int]) -> Dependencies:
    """Return the units of a graph: the indices along dims that can only be removed together.

    Most nodes are analysed by `sources`, which needs no declaration by the operator. For layers that multiply by
    weights, the trait states the channel dims.

    Args:
        graph: the graph of a module.
        sizes: values of the graph's symbols, for running nodes.
    """
    found = Dependencies(graph)
    with torch.no_grad():
        for node in graph.nodes:
            sides = layer_sides(node)
            if sides is not None and found.of(sides.weight):
                _through_layer(found, node, sides)
            elif any(found.of(v) for v in node.inputs if isinstance(v, Value)):
                _through(found, node, sizes)
    for value in graph.outputs:
        found.fix(value, f"the model returns %{value.name}")
    for name, value in graph.state.items():
        found.fix(value, f"a call leaves it in {name!r}")
    return found


def _through_layer(found: Dependencies, node: Node, layer: LayerSides) -> None:
    """Couple the output channels of a layer with its weight and bias, and its input channels with the weight."""
    units, given, weight = found.units, found.of(layer.x), found.of(layer.weight)
    because = f"{node!r} has its channels on other sides"
    for axis, some in weight.items():
        if axis not in (layer.outer, layer.inner):
            units.fix_all(some, because)
    passed = {a: some for a, some in given.items() if layer.passes_others and a != layer.channel}
    for axis in given.keys() - passed.keys() - {layer.channel}:
        units.fix_all(given[axis], because)
    made = _grouped(found, node, layer) if layer.groups > 1 else _full(found, node, layer)
    if layer.bias is not None and made is not None:
        units.merge_all(made, found.of(layer.bias).get(0, made))
    found.layers[node] = layer
    found.sides[node.output] = {**passed, **({} if made is None else {layer.channel % node.output.type.rank: made})}


def _full(found: Dependencies, node: Node, layer: LayerSides) -> Tensor | None:
    """Couple the input channels of an ungrouped layer with its weight; return its output channels."""
    given, weight = found.of(layer.x).get(layer.channel), found.of(layer.weight)
    inner = weight.get(layer.inner)
    if given is None and inner is not None:
        found.units.fix_all(inner, f"{node!r} reads %{layer.x.name}, whose side {layer.channel} stays")
    elif inner is None and given is not None:
        found.units.fix_all(given, f"{node!r} has one channel")
    elif given is not None and inner is not None:
        found.units.merge_all(given, inner)
    return weight.get(layer.outer)


def _grouped(found: Dependencies, node: Node, layer: LayerSides) -> Tensor | None:
    """Make each group of a layer one unit, with its input and output channels."""
    given, weight = found.of(layer.x).get(layer.channel), found.of(layer.weight)
    reason = f"{node!r} reads %{layer.x.name}, whose side {layer.channel} stays"
    divided = layer.grouped_axis
    rest = ({layer.inner, layer.outer} - {divided}).pop()
    if rest in weight:
        found.units.fix_all(weight[rest], f"{node!r} has groups of as many channels each")
    own = weight[divided]
    if given is None:
        found.units.fix_all(own, reason)
        return None
    read = given.reshape(layer.groups, -1)
    for number, members in enumerate(own.reshape(layer.groups, -1)):
        for unit in (*read[number].tolist(), *members.tolist()):
            found.units.merge(int(read[number][0]), unit)
    return read[:, 0].repeat_interleave(layer.out_channels // layer.groups)


def _through(found: Dependencies, node: Node, sizes: Mapping[str, int]) -> None:
    """Trace the results of a node to its operands, and couple the units accordingly."""
    values = [v for v in node.inputs if isinstance(v, Value)]
    given = [
        (i, axis)
        for i, v in enumerate(node.inputs)
        if isinstance(v, Value)
        for axis, units in found.of(v).items()
        if found.units.free(units.tolist())
    ]
    others = [v for v in values if not v.is_constant and v.type.rank and v.type.dtype.is_floating_point]
    if others and all(node.inputs[i].is_constant for i, _ in given):
        for i, axis in given:
            found.units.fix_all(found.of(node.inputs[i])[axis], f"{node!r} reads %{others[0].name}, which stays")
        return
    asked = probe(node, sizes)
    if isinstance(asked, str):
        reason = asked
    else:
        _spread(found, asked, given, sizes)
        _divide_shuffled(found, node)
        reason = refusal(asked, found)
    if reason:
        for value in (*values, *node.outputs):
            found.fix(value, f"{node!r}: {reason}")


def _spread(found: Dependencies, asked: Probe, given: Iterable[tuple[int, int]], sizes: Mapping[str, int]) -> None:
    """Set the units of the outputs of a node."""
    node = asked.node
    other = probe(node, sizes, chosen=1) if asked.chooses else asked
    reached: list[dict[int, list[Sides]]] = [{} for _ in node.outputs]

    def follow(position: int, axis: int, own: Tensor) -> None:
        come = _known_sources(found, asked, position, axis)
        again = come if other is asked or isinstance(other, str) else _known_sources(found, other, position, axis)
        side = f"side {axis} of its operand {position}"
        if come is None:
            found.units.fix_all(own, f"{node!r} mixes what lies along {side}")
        elif isinstance(other, str) or not come.are(again):
            found.units.fix_all(own, f"{node!r} chooses by data what it takes of {side}")
        else:
            if come.reach_nothing:
                found.units.fix_all(own, f"{node!r} does not show what it makes of {side}")
            found.units.merge_all(own[come.tied[:, 0]], own[come.tied[:, 1]])
            for sides, p in zip(reached, come.places, strict=True):
                sides.setdefault(position, []).append(spread(found.units, own, p, f"{node!r}"))

    for position, axis in given:
        follow(position, axis, found.of(node.inputs[position])[axis])
    for position, axis in _further(asked, given, reached):
        stays = f"{node!r} reads %{node.inputs[position].name}, which stays"
        follow(position, axis, found.units.pinned(asked.operands[position].shape[axis], stays))
    for output, sides in zip(node.outputs, reached, strict=True):
        found.sides[output] = _joined(found.units, output, sides.values(), f"{node!r}")


def _divide_shuffled(found: Dependencies, node: Node) -> None:
    """Split a permuted dim into as many parts as an attribute of the node says, for channel shuffles.

    The parts are crossed like heads: whole parts may be removed, or the same indices within each part.
    """
    units = found.units
    counts = [n for n in node.attrs.values() if type(n) is int and n > 1]
    pairs = [(v, output) for v in node.inputs if isinstance(v, Value) for output in node.outputs if counts]
    for value, output in pairs:
        for axis, own in found.of(value).items():
            before, after = units.roots(own), units.roots(found.of(output).get(axis, own))
            if torch.equal(before, after) or not torch.equal(before.sort()[0], after.sort()[0]):
                continue
            for count in (n for n in counts if len(own) % n == 0 and n < len(own)):
                parts, within = units.fresh(count).tolist(), units.fresh(len(own) // count).tolist()
                for i, unit in enumerate(own.tolist()):
                    units.merge(unit, units.cross([parts[i // len(within)], within[i % len(within)]]))


def _known_sources(found: Dependencies, asked: Probe, position: int, axis: int) -> Sources | None:
    """Return the result of `sources`, cached for nodes of the same behaviour."""
    key = asked.likeness, position, axis
    if asked.likeness is None or key not in found.known:
        come = sources(asked, position, axis)
        if asked.likeness is None:
            return come
        if len(found.known) >= REMEMBERED:
            found.known.clear()
        found.known[key] = come
    return found.known[key]


def _further(
    asked: Probe, given: Iterable[tuple[int, int]], reached: list[dict[int, list[Sides]]]
) -> Iterator[tuple[int, int]]:
    """Yield dims without units of operands that map to a dim of a result with units of other operands."""
    for position in filter(asked.is_floating, range(len(asked.operands))):
        lengths = enumerate(asked.operands[position].shape)
        for axis in (a for a, n in lengths if n > 1 and (position, a) not in given):
            last = torch.tensor([asked.operands[position].shape[axis] - 1])
            marked = asked.operands[position].index_fill(axis, last, torch.nan)
            results = asked.run([*asked.operands[:position], marked, *asked.operands[position + 1 :]])
            for sides, result in zip(reached, results, strict=True):
                of_others = {a for i, some in sides.items() if i != position for one in some for a in one}
                own = {a for one in sides.get(position, ()) for a in one}
                if any(_is_divided(result.isnan(), a) for a in of_others - own):
                    yield position, axis
                    break


def _is_divided(is_nan: Tensor, axis: int) -> bool:
    """Whether some indices along a dim hold NaN, and others none."""
    rows = is_nan.movedim(axis, 0).reshape(is_nan.shape[axis], -1).any(1)
    return bool(rows.any() and not rows.all())


def _joined(units: Units, output: Value, operands: Iterable[Iterable[Sides]], reason: str) -> Sides:
    """Return the units of an output: those from several dims of one operand cross, those of several operands merge."""
    found: Sides = {}
    for reached in operands:
        own: Sides = {}
        for sides in reached:
            for axis, some in sides.items():
                own[axis] = _crossed(units, own[axis], some) if axis in own else some
        for axis, some in own.items():
            before = found.get(axis, some)
            units.merge_all(before, some)
            found[axis] = torch.where(before == ABSENT, some, before)
    for axis, some in found.items():
        missing = some == ABSENT
        if missing.any():
            some[missing] = units.pinned(int(missing.sum()), f"{reason}: elements of its own stand there")
        if not in_periods(output.type.shape[axis], units.roots(some)):
            units.fix_all(some, f"{reason}: the length of side {axis} depends on the input")
    return found


def _crossed(units: Units, some: Tensor, others: Tensor) -> Tensor:
    pairs = zip(some.tolist(), others.tolist(), strict=True)
    return torch.tensor([units.cross([u for u in pair if u != ABSENT]) if max(pair) >= 0 else ABSENT for pair in pairs])
