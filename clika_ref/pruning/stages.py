"""The steps of pruning: find coupled units, estimate their importance, remove channels, mask weights, and report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from clika_ref.core.errors import ModelError, format_count
from clika_ref.core.execution import read_sizes
from clika_ref.core.ir import Graph, Node
from clika_ref.core.operators import Operator
from clika_ref.core.symbols import resolve
from clika_ref.pruning.batches import MIN_PRUNING_SAMPLES, PruningBatches
from clika_ref.pruning.channel_dims import find_channel_dims
from clika_ref.pruning.dependency_graph import DependencyGraph
from clika_ref.pruning.dependency_tracing import build_dependency_graph
from clika_ref.pruning.groups import UnitGroup, find_fixed_reason, find_groups
from clika_ref.pruning.importance import UnitEffects, estimate_effects
from clika_ref.pruning.layer_settings import LAYER_SETTINGS_ARGUMENT, PruningChoice, resolve_settings
from clika_ref.pruning.mask_selection import MaskResult, choose_masks
from clika_ref.pruning.masks import apply_mask, has_masks
from clika_ref.pruning.node_probes import minimize_batch
from clika_ref.pruning.removal import remove_units
from clika_ref.pruning.report import LayerPruning, PruningReport, bytes_of
from clika_ref.pruning.shared_settings import resolve_group
from clika_ref.pruning.unit_selection import UnitRemoval, choose_removal
from clika_ref.quantization.algorithms.macs import count_macs
from clika_ref.reporting.log import CompilationLog
from clika_ref.settings.pruning import STRUCTURED, LayerPruningSettings, PruningSettings

FEW_SAMPLES_WARNING = (
    "Pruning estimates sensitivity on only {}, and may remove channels that other inputs need. Give "
    "calibration_inputs with at least {:,}."
)


@dataclass(frozen=True)
class PruningRequest:
    """The user's pruning request."""

    settings: PruningSettings
    """Settings of the whole model."""
    layers: Mapping[str, LayerPruningSettings]
    """Overrides for single layers, by name."""


@dataclass(frozen=True)
class _PruningState:
    """A graph that is being pruned, with the settings and data that decide how."""

    graph: Graph
    chosen: Mapping[Node, PruningChoice]
    layers: Sequence[Node]
    """The layers that multiply by weights."""
    batches: PruningBatches
    operators: Mapping[str, Operator]
    sizes: Mapping[str, int]

    def select_layers(self, *, removal: bool) -> list[Node]:
        """Return the layers to remove channels from, or those to mask."""
        return [node for node in self.layers if (self.chosen[node].mask_type == STRUCTURED) is removal]


def prune_graph(
    graph: Graph,
    request: PruningRequest,
    inputs: Sequence[Sequence[Tensor]],
    operators: Mapping[str, Operator],
    log: CompilationLog,
) -> PruningReport:
    """Prune a graph in place and return the results.

    On an error no mask is applied, but removed channels stay removed.

    Channels are removed first, since masks are patterns of the remaining weights.

    Args:
        graph: the graph of a module, float.
        request: the user's request.
        inputs: batches, at least one, with a tensor for each input of the graph; used to estimate sensitivities.
        operators: the operators of the registry.
        log: the log to report to.

    Raises:
        ModelError: the settings cannot be satisfied, or request channel removal from a graph with masked weights.
        PassError: a node returns other types than expected after removal, which is a bug.
    """
    for settings in (request.settings, *request.layers.values()):
        settings.check()
    with log.stage("Pruning") as stage:
        chosen = resolve_settings(graph, request.settings, request.layers)
        layers = [node for node in graph.nodes if find_channel_dims(node) is not None]
        if not layers:
            raise ModelError(
                f"cannot prune {graph.name}: it has no layer with weights, such as a convolution or a linear layer."
            )
        batches = PruningBatches.of(graph, inputs)
        if batches.samples < MIN_PRUNING_SAMPLES:
            log.warning(FEW_SAMPLES_WARNING.format(format_count(batches.samples, "sample"), MIN_PRUNING_SAMPLES))
        work = _PruningState(graph, chosen, layers, batches, operators, read_sizes(graph, inputs[0]))
        before, bytes_before = [_measure_layer(node, work) for node in layers], bytes_of(graph)
        results = _remove_channels(work)
        results |= _mask_weights(work)
        reports = [_report(node, size, results[node], work) for node, size in zip(layers, before, strict=True)]
        found = PruningReport(reports, bytes_before, bytes_of(graph), batches.relative_error(graph))
        log.table("Pruning", found.table)
        stage.done(found.summarize())
    return found


def _remove_channels(work: _PruningState) -> dict[Node, MaskResult]:
    """Remove channels of layers with structured pruning; return the result per layer, or why nothing was removed."""
    results = _initial_results(work)
    if all(one.decision for one in results.values()):
        return results
    if has_masks(work.graph):
        raise ModelError(
            "cannot remove channels: the weights are masked, and their patterns would break. First remove channels "
            "with mask_type='structured', then mask the remaining weights."
        )
    sizes = minimize_batch(work.graph, work.sizes)
    found = build_dependency_graph(work.graph, sizes)
    every = find_groups(found)
    effects = estimate_effects(found, every, work.operators, work.batches) if every else None
    while True:
        results, gone = _decide_removals(every, work, effects)
        _report_fixed(found, every, work.chosen, results)
        hindering = remove_units(found, gone, sizes) if gone else []
        if not hindering:
            return results
        for node in hindering:
            _fix_units(found, node, every, gone)
        every = find_groups(found)


def _initial_results(work: _PruningState) -> dict[Node, MaskResult]:
    """Return an empty result for each layer with structured pruning, with the reason if it is skipped."""
    return {node: MaskResult(None, None, work.chosen[node].skipped) for node in work.select_layers(removal=True)}


def _decide_removals(
    every: Sequence[UnitGroup], work: _PruningState, effects: UnitEffects | None
) -> tuple[dict[Node, MaskResult], frozenset[int]]:
    """Return the decision for each layer, or why nothing is removed, and the units to remove."""
    results, gone = _initial_results(work), set[int]()
    for group in every:
        taken = _group_removal(group, work.chosen, effects, gone)
        gone |= {*taken.units}
        count = f"{len(taken.units)} of {len(group.units)} {group.kind} removed"
        for node in group.producers:
            if node in results and (taken.sensitivity is not None or not results[node].decision):
                results[node] = _merge_results(
                    results[node], MaskResult(None, taken.sensitivity, taken.reason or count)
                )
    return results, frozenset(gone)


def _fix_units(found: DependencyGraph, node: Node, every: Sequence[UnitGroup], gone: frozenset[int]) -> None:
    """Fix the units of a node that prevents their removal: all units of groups that were to lose some."""
    there = {*found.free_units(node)}
    for group in every:
        own = there.intersection(group.units)
        for unit in () if gone.isdisjoint(own) else own:
            found.units.fix(unit, f"{node!r} computes a different result without the removed ones")


def _group_removal(
    group: UnitGroup, chosen: Mapping[Node, PruningChoice], effects: UnitEffects | None, gone: set[int]
) -> UnitRemoval:
    """Return the units to remove from a group, given the removals of the groups before it."""
    choice = resolve_group(group, chosen)
    if choice.skipped or effects is None:
        return UnitRemoval([], None, choice.skipped)
    if not gone.isdisjoint(group.crossed_units):
        return UnitRemoval([], None, "a crossing group is removed")
    return choose_removal(group, choice, effects)


def _merge_results(before: MaskResult, now: MaskResult) -> MaskResult:
    """Merge the results of two groups for one layer; the sensitivity is the maximum of both."""
    if not before.decision:
        return now
    effects = [one.sensitivity for one in (before, now) if one.sensitivity is not None]
    return MaskResult(None, max(effects, default=None), f"{before.decision}; {now.decision}")


def _report_fixed(
    found: DependencyGraph,
    every: Sequence[UnitGroup],
    chosen: Mapping[Node, PruningChoice],
    results: dict[Node, MaskResult],
) -> None:
    """Set the reason for layers without removable channels.

    Raises:
        ModelError: the user requested the layer by name.
    """
    may = {node for group in every for node in group.producers}
    for node in results:
        if node in may or chosen[node].skipped:
            continue
        reason = find_fixed_reason(found, node) if node in found.layers else "its weight is computed from inputs"
        if chosen[node].user_key:
            raise ModelError(
                f"{LAYER_SETTINGS_ARGUMENT}: {chosen[node].user_key!r}: no output channel of {node!r} in "
                f"{node.origin} can be removed: {reason}"
            )
        results[node] = MaskResult(None, None, reason)


def _mask_weights(work: _PruningState) -> dict[Node, MaskResult]:
    """Mask the weights of layers with unstructured or N:M pruning; return the result per layer."""
    wanting = {
        node: dims for node in work.select_layers(removal=False) if (dims := find_channel_dims(node)) is not None
    }
    results = choose_masks(work.graph, wanting, work.chosen, work.batches)
    for node, masked in results.items():
        dims = find_channel_dims(node)  # a tied weight may have been masked with another layer
        if masked.mask is not None and dims is not None:
            apply_mask(work.graph, dims.weight, masked.mask, work.operators)
    return results


def _measure_layer(node: Node, work: _PruningState) -> tuple[tuple[int, ...], int]:
    """Return the shape of the weight of a layer, and its MACs in one call."""
    layer = find_channel_dims(node)
    assert layer is not None
    return tuple(map(int, layer.weight.type.shape)), count_macs(
        node, lambda value: resolve(value.type.shape, work.sizes)
    )


def _report(node: Node, size: tuple[tuple[int, ...], int], result: MaskResult, work: _PruningState) -> LayerPruning:
    (before, macs_before), (after, macs_after) = size, _measure_layer(node, work)
    return LayerPruning(
        node.name,
        node.origin.scope,
        node.op_type,
        work.chosen[node].mask_type,
        before,
        after,
        node.inputs[node.op.trait.weight or 0].type.dtype.itemsize,
        0.0 if result.mask is None else 1 - float(result.mask.float().mean()),
        macs_before,
        macs_after,
        result.sensitivity,
        result.decision,
        is_pruned=result.mask is not None or after != before,
    )
