"""Resolve the pruning settings of each layer from those of the model and the overrides of the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph, Node
from clika_ref.pruning.channel_dims import find_channel_dims
from clika_ref.quantization.layer_settings import find_nodes, specificity
from clika_ref.settings.pruning import (
    UNSTRUCTURED,
    UNSTRUCTURED_ALIAS,
    LayerPruningSettings,
    PruningSettings,
    parse_pattern,
)

LAYER_SETTINGS_ARGUMENT = "layer_pruning_settings"


@dataclass(frozen=True, slots=True)
class PruningChoice:
    """The settings of one node."""

    mask_type: str
    threshold: float | None
    """None for no limit."""
    sparsity: float | None
    skipped: str = ""
    """The setting that excludes the node; empty if it may be pruned."""
    user_key: str = ""
    """The user's key for the node, if the key selects a single weight, however often it is used."""


def resolve_settings(
    graph: Graph, settings: PruningSettings, layers: Mapping[str, LayerPruningSettings]
) -> dict[Node, PruningChoice]:
    """Return the settings of each node.

    A key of ``layers`` is a node name, a module path, which selects all nodes within, or either with wildcards. More
    specific keys take precedence, as for quantization. A layer with a sparsity or an N:M mask of its own does not
    inherit the threshold of the model.

    Raises:
        ModelError: a key matches no layer with weights; similar names are listed.
    """
    whole = PruningChoice(
        _normalize_mask_type(settings.mask_type), settings.pruning_sensitivity_threshold, settings.sparsity
    )
    found = dict.fromkeys(graph.nodes, whole)
    for key in sorted(layers, key=lambda key: specificity(graph, key)):
        layer, nodes = layers[key], find_nodes(graph, key, LAYER_SETTINGS_ARGUMENT)
        if not layer.skip_pruning and all(node.op.trait.weight is None for node in nodes):
            raise ModelError(
                f"{LAYER_SETTINGS_ARGUMENT}: {key!r} is not a layer with weights to prune. Name a convolution or a "
                "linear layer."
            )
        weights = {dims.weight for node in nodes if (dims := find_channel_dims(node)) is not None}
        for node in nodes:
            found[node] = _apply_override(found[node], key, layer, is_one=len(weights) == 1)
    for node, choice in found.items():
        _require_limit(node, choice)
    return found


def _normalize_mask_type(mask_type: str) -> str:
    return UNSTRUCTURED if mask_type == UNSTRUCTURED_ALIAS else mask_type


def _apply_override(before: PruningChoice, key: str, layer: LayerPruningSettings, *, is_one: bool) -> PruningChoice:
    if layer.skip_pruning:
        return replace(before, skipped=f"skip_pruning of {key!r}", user_key="")
    mask_type = _normalize_mask_type(layer.mask_type) if layer.mask_type is not None else before.mask_type
    pattern = parse_pattern(mask_type)
    is_own = layer.sparsity is not None or (layer.mask_type is not None and pattern is not None)
    threshold = layer.pruning_sensitivity_threshold
    return PruningChoice(
        mask_type,
        threshold if threshold is not None or is_own else before.threshold,
        None if pattern else layer.sparsity if layer.sparsity is not None else before.sparsity,
        user_key=key if is_one else "",
    )


def _require_limit(node: Node, choice: PruningChoice) -> None:
    """Reject a combination of layer and model settings that sets no limit, so that all would be removed."""
    if (
        not choice.skipped
        and not parse_pattern(choice.mask_type)
        and choice.sparsity is None
        and choice.threshold is None
    ):
        raise ModelError(
            f"{LAYER_SETTINGS_ARGUMENT}: {node.name!r} has mask_type={choice.mask_type!r} but no limit. Set sparsity "
            "or pruning_sensitivity_threshold."
        )
