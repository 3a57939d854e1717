"""Resolve one pruning setting for layers with coupled channels or a shared weight: the most conservative one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Node
from clika_ref.pruning.channel_dims import ChannelDims
from clika_ref.pruning.groups import UnitGroup
from clika_ref.pruning.layer_settings import LAYER_SETTINGS_ARGUMENT, PruningChoice
from clika_ref.pruning.masks import split_mask
from clika_ref.settings.pruning import STRUCTURED, parse_pattern


def resolve_group(group: UnitGroup, chosen: Mapping[Node, PruningChoice]) -> PruningChoice:
    """Return the settings of a group; ``skipped`` is the reason if nothing may be removed.

    The smallest threshold and sparsity apply. If one layer is skipped or masked, the whole group is kept.

    Raises:
        ModelError: the user requests channels of a layer by name that are coupled with those of a skipped layer.
    """
    choices = [chosen[node] for node in group.producers]
    named = next((c.user_key for c in choices if c.user_key and c.mask_type == STRUCTURED), "")
    for node, choice in zip(group.producers, choices, strict=True):
        if choice.skipped or choice.mask_type != STRUCTURED:
            kept = choice.skipped or f"mask_type={choice.mask_type!r}"
            reason = f"is pruned together with that of {_describe_node(node)}, which has {kept}"
            if named:
                raise ModelError(
                    f"{LAYER_SETTINGS_ARGUMENT}: {named!r}: its output {reason}. Use the same settings for both."
                )
            return replace(choice, skipped=choice.skipped or reason)
    return PruningChoice(
        STRUCTURED, _minimum(c.threshold for c in choices), _minimum(c.sparsity for c in choices), user_key=named
    )


def resolve_mask(layers: Mapping[Node, ChannelDims], chosen: Mapping[Node, PruningChoice]) -> PruningChoice:
    """Return the settings for a weight that layers share; ``skipped`` is the reason if it may not be masked.

    Raises:
        ModelError: the user requests by name a mask that the weight cannot have.
    """
    choices = [chosen[node] for node in layers]
    skipped = next((c for c in choices if c.skipped), None)
    if skipped is not None:
        return skipped
    reason, named = _mask_problem(layers, chosen), next((c.user_key for c in choices if c.user_key), "")
    if reason and named:
        node = next(iter(layers))
        raise ModelError(
            f"{LAYER_SETTINGS_ARGUMENT}: {named!r}: {reason}. Choose another mask for {node!r} in {node.origin}, or "
            "skip_pruning."
        )
    threshold, sparsity = _minimum(c.threshold for c in choices), _minimum(c.sparsity for c in choices)
    return PruningChoice(choices[0].mask_type, threshold, sparsity, skipped=reason, user_key=named)


def _mask_problem(layers: Mapping[Node, ChannelDims], chosen: Mapping[Node, PruningChoice]) -> str:
    """Return why the weight of layers cannot have the chosen mask, empty if it can."""
    (first, layer), *_ = layers.items()
    mask_type = chosen[first].mask_type
    other = next((node for node in layers if chosen[node].mask_type != mask_type), None)
    if other is not None:
        return f"it shares its weight with {_describe_node(other)}, which has mask_type={chosen[other].mask_type!r}"
    if not split_mask(layer.weight)[0].is_constant:
        return "its weight is computed from other weights"
    reader = _other_reader(layers)
    if reader:
        return f"its weight is also {reader}, which a mask would change"
    kept = parse_pattern(mask_type)
    if kept and len({dims.inner for dims in layers.values()}) > 1:
        return f"mask_type={mask_type!r} applies along the inputs of each output, but the weight has two dims of inputs"
    if kept and layer.in_channels_per_output % kept[1]:
        return (
            f"mask_type={mask_type!r} needs a multiple of {kept[1]} inputs for each output, but the layer has "
            f"{layer.in_channels_per_output}"
        )
    return ""


def _other_reader(layers: Mapping[Node, ChannelDims]) -> str:
    """Describe another reader of the layers' weight, which sensitivities do not cover; empty if there is none."""
    weight = next(iter(layers.values())).weight
    parameter, mask = split_mask(weight)
    uses = [*weight.uses, *(use for use in parameter.uses if mask is not None and use.user is not weight.producer)]
    for use in uses:
        if not isinstance(use.user, Node):
            return "returned by the model"
        if use.user not in layers or use.position != use.user.op.trait.weight:
            return f"read by {_describe_node(use.user)}"
    return ""


def _describe_node(node: Node) -> str:
    return f"{node.name!r} in {node.origin.scope or '<root>'}"


def _minimum(numbers: Iterable[float | None]) -> float | None:
    return min((n for n in numbers if n is not None), default=None)
