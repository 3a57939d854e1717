"""The steps of pruning: find coupled units, estimate their importance, remove channels, mask weights, and report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from clika_ref.core.errors import ModelError
from clika_ref.core.execution import read_sizes
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.symbols import resolve
from clika_ref.pruning.agreeing import agreed
from clika_ref.pruning.batches import FEWEST_SAMPLES, Batches
from clika_ref.pruning.choosing import Removal, removal
from clika_ref.pruning.dependencies import Dependencies
from clika_ref.pruning.effects import Effects, effects
from clika_ref.pruning.groups import Group, groups, why_fixed
from clika_ref.pruning.layer_sides import layer_sides
from clika_ref.pruning.layers import ARGUMENT, Choice, choices
from clika_ref.pruning.masking import Masked, maskings
from clika_ref.pruning.masks import has_masks, put_mask
from clika_ref.pruning.probing import sizes_of_few
from clika_ref.pruning.removing import remove
from clika_ref.pruning.report import LayerPruning, Pruning, bytes_of, shape_of
from clika_ref.pruning.tying import dependencies
from clika_ref.pruning_settings import STRUCTURED, LayerPruningSettings, PruningSettings
from clika_ref.quantization.products import products_of
from clika_ref.reporting.log import CompilationLog

FEW = (
    "What pruning would change is weighed on {:,} samples, which are few: what other inputs need may go; give "
    "calibration_inputs with {:,} or more"
)


@dataclass(frozen=True)
class WantedPruning:
    """The user's pruning request."""

    settings: PruningSettings
    """Settings of the whole model."""
    layers: Mapping[str, LayerPruningSettings]
    """Overrides for single layers, by name."""


@dataclass(frozen=True)
class _Work:
    """A graph that is being pruned, with the settings and data that decide how."""

    graph: Graph
    chosen: Mapping[Node, Choice]
    layers: Sequence[Node]
    """The layers that multiply by weights."""
    batches: Batches
    operators: Mapping[str, Operator]
    sizes: Mapping[str, int]

    def wanting(self, *, removal: bool) -> list[Node]:
        """Return the layers to remove channels from, or those to mask."""
        return [node for node in self.layers if (self.chosen[node].mask_type == STRUCTURED) is removal]


def pruned(
    graph: Graph,
    wanted: WantedPruning,
    inputs: Sequence[Sequence[Tensor]],
    operators: Mapping[str, Operator],
    log: CompilationLog,
) -> Pruning:
    """Prune a graph in place and return the results.

    On an error no mask is applied, but removed channels stay removed.

    Channels are removed first, since masks are patterns of the remaining weights.

    Args:
        graph: the graph of a module, float.
        wanted: the user's request.
        inputs: batches, at least one, with a tensor for each input of the graph; used to estimate sensitivities.
        operators: the operators of the registry.
        log: the log to report to.

    Raises:
        ModelError: the settings cannot be satisfied, or request channel removal from a graph with masked weights.
        PassError: a node returns other types than expected after removal, which is a bug.
    """
    for settings in (wanted.settings, *wanted.layers.values()):
        settings.check()
    with log.stage("Pruning") as stage:
        chosen = choices(graph, wanted.settings, wanted.layers)
        layers = [node for node in graph.nodes if layer_sides(node) is not None]
        if not layers:
            msg = f"{graph.name} has no layer that multiplies by weights, so there is nothing to prune"
            raise ModelError(msg)
        batches = Batches.of(graph, inputs)
        if batches.samples < FEWEST_SAMPLES:
            log.warning(FEW.format(batches.samples, FEWEST_SAMPLES))
        work = _Work(graph, chosen, layers, batches, operators, read_sizes(graph, inputs[0]))
        before, bytes_before = [_size(node, work) for node in layers], bytes_of(graph)
        told = _removed(work)
        told |= _masked(work)
        reports = [_report(node, size, told[node], work) for node, size in zip(layers, before, strict=True)]
        found = Pruning(reports, bytes_before, bytes_of(graph), batches.missed(graph))
        log.table("Pruning", found.table)
        stage.done(found.in_one_line())
    return found


def _removed(work: _Work) -> dict[Node, Masked]:
    """Remove channels of layers with structured pruning; return the result per layer, or why nothing was removed."""
    told = _untold(work)
    if all(one.decision for one in told.values()):
        return told
    if has_masks(work.graph):
        msg = (
            "channels cannot be removed from weights that are masked, whose patterns would no longer hold: remove them "
            "first, with mask_type='structured', and mask what is left then"
        )
        raise ModelError(msg)
    sizes = sizes_of_few(work.graph, work.sizes)
    found = dependencies(work.graph, sizes)
    every = groups(found)
    weighed = effects(found, every, work.operators, work.batches) if every else None
    while True:
        told, gone = _decided(every, work, weighed)
        _tell_fixed(found, every, work.chosen, told)
        hindering = remove(found, gone, sizes) if gone else []
        if not hindering:
            return told
        for node in hindering:
            _fix(found, node, every, gone)
        every = groups(found)


def _untold(work: _Work) -> dict[Node, Masked]:
    """Return an empty result for each layer with structured pruning, with the reason if it is skipped."""
    return {node: Masked(None, None, work.chosen[node].skipped) for node in work.wanting(removal=True)}


def _decided(every: Sequence[Group], work: _Work, weighed: Effects | None) -> tuple[dict[Node, Masked], frozenset[int]]:
    """Return the decision for each layer, or why nothing is removed, and the units to remove."""
    told, gone = _untold(work), set[int]()
    for group in every:
        taken = _taken(group, work.chosen, weighed, gone)
        gone |= {*taken.units}
        count = f"{len(taken.units)} of {len(group.units)} {group.kind} removed"
        for node in group.producers:
            if node in told and (taken.sensitivity is not None or not told[node].decision):
                told[node] = _joined(told[node], Masked(None, taken.sensitivity, taken.reason or count))
    return told, frozenset(gone)


def _fix(found: Dependencies, node: Node, every: Sequence[Group], gone: frozenset[int]) -> None:
    """Fix the units of a node that prevents their removal: all units of groups that were to lose some."""
    values = [v for v in (*node.inputs, *node.outputs) if isinstance(v, Value)]
    there = {*found.units.free(u for v in values for some in found.of(v).values() for u in some.tolist())}
    for group in every:
        own = there.intersection(group.units)
        for unit in () if gone.isdisjoint(own) else own:
            found.units.fix(unit, f"{node!r} does not compute the same without those that were to go")


def _taken(group: Group, chosen: Mapping[Node, Choice], weighed: Effects | None, gone: set[int]) -> Removal:
    """Return the units to remove from a group, given the removals of the groups before it."""
    choice = agreed(group, chosen)
    if choice.skipped or weighed is None:
        return Removal([], None, choice.skipped)
    if not gone.isdisjoint(group.crossed):
        return Removal([], None, "what crosses it goes")
    return removal(group, choice, weighed)


def _joined(before: Masked, now: Masked) -> Masked:
    """Merge the results of two groups for one layer; the sensitivity is the maximum of both."""
    if not before.decision:
        return now
    weighed = [one.sensitivity for one in (before, now) if one.sensitivity is not None]
    return Masked(None, max(weighed, default=None), f"{before.decision}; {now.decision}")


def _tell_fixed(
    found: Dependencies, every: Sequence[Group], chosen: Mapping[Node, Choice], told: dict[Node, Masked]
) -> None:
    """Set the reason for layers without removable channels.

    Raises:
        ModelError: the user requested the layer by name.
    """
    may = {node for group in every for node in group.producers}
    for node in told:
        if node in may or chosen[node].skipped:
            continue
        reason = why_fixed(found, node) if node in found.layers else "its weight is computed from inputs"
        if chosen[node].named:
            msg = (
                f"{ARGUMENT}: {chosen[node].named!r}: no output channel of {node!r} in {node.origin} can be removed: "
                f"{reason}"
            )
            raise ModelError(msg)
        told[node] = Masked(None, None, reason)


def _masked(work: _Work) -> dict[Node, Masked]:
    """Mask the weights of layers with unstructured or N:M pruning; return the result per layer."""
    wanting = {node: side for node in work.wanting(removal=False) if (side := layer_sides(node)) is not None}
    told = maskings(work.graph, wanting, work.chosen, work.batches)
    for node, masked in told.items():
        side = layer_sides(node)  # a tied weight may have been masked with another layer
        if masked.mask is not None and side is not None:
            put_mask(work.graph, side.weight, masked.mask, work.operators)
    return told


def _size(node: Node, work: _Work) -> tuple[tuple[int, ...], int]:
    """Return the shape of the weight of a layer, and its MACs in one call."""
    layer = layer_sides(node)
    assert layer is not None
    return shape_of(layer), products_of(node, lambda value: resolve(value.type.shape, work.sizes))


def _report(node: Node, size: tuple[tuple[int, ...], int], told: Masked, work: _Work) -> LayerPruning:
    (before, macs_before), (after, macs_after) = size, _size(node, work)
    return LayerPruning(
        node.name,
        node.origin.scope,
        node.kind,
        work.chosen[node].mask_type,
        before,
        after,
        node.inputs[node.op.trait.weight or 0].type.dtype.itemsize,
        0.0 if told.mask is None else 1 - float(told.mask.float().mean()),
        macs_before,
        macs_after,
        told.sensitivity,
        told.decision,
        is_pruned=told.mask is not None or after != before,
    )
