"""Quantization settings of each node, from those of the model and of the layers that the user names."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import islice

from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph, Node, Value, walk
from clika_ref.settings.quantization import LayerQuantizationSettings, QuantizationSettings

LAYER_SETTINGS_ARGUMENT = "layer_quantization_settings"

SKIP_UNTIL_SETTING = "skip_quantization_until"

WILDCARDS = frozenset("*?[")

MAX_SUGGESTIONS = 5
"""Maximum number of names that an error lists."""


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """The user's settings for one node."""

    weights_num_bits: tuple[int, ...]
    """Bit widths to choose from."""
    activations_num_bits: int
    skipped: str = ""
    """Setting that keeps it in float; empty if it may be quantized."""


REMOVED_MODULES_HINT = " Modules without an effect in eval mode, such as Dropout, are removed."


def resolve_node_settings(
    graph: Graph,
    settings: QuantizationSettings,
    layers: Mapping[str, LayerQuantizationSettings],
    model: Graph | None = None,
) -> dict[Node, NodeSettings]:
    """Return the settings of each node.

    A key of ``layers`` is the name of a node, the path of a module, which covers all nodes within, or either with
    wildcards (``*``, ``?``, ``[...]``). If several keys match a node, the most specific one sets the bit widths: the
    name of the node, then the longest path, then wildcards. The last of several wildcards wins.

    Args:
        graph: lowered.
        settings: of the model.
        layers: of single layers, by key.
        model: the graph before lowering; errors name the nodes that passes folded into others.

    Raises:
        ModelError: a key, or a name in ``skip_quantization_until``, matches no layer (similar names are listed), or a
            bit width is set where no layer has weights.
    """
    found = dict.fromkeys(
        walk(graph), NodeSettings(_as_widths(settings.weights_num_bits), settings.activations_num_bits)
    )
    for key in sorted(layers, key=lambda key: specificity(graph, key)):
        layer, nodes = layers[key], find_nodes(graph, key, LAYER_SETTINGS_ARGUMENT, model)
        _reject_unused_widths(key, layer, nodes)
        for node in nodes:
            found[node] = replace(
                found[node],
                weights_num_bits=_as_widths(layer.weights_num_bits) or found[node].weights_num_bits,
                activations_num_bits=layer.activations_num_bits or found[node].activations_num_bits,
            )
        for setting, skipped in _yield_skips(graph, key, nodes, layer, model):
            for node in skipped:
                found[node] = replace(found[node], skipped=f"{setting} of {key!r}")
    return found


def find_nodes(graph: Graph, key: str, argument: str, model: Graph | None = None) -> list[Node]:
    """Return the nodes that a key matches, in graph order.

    Raises:
        ModelError: no node matches.
    """
    found = _match_nodes(graph, key)
    if found:
        return found
    known = dict.fromkeys(name for node in walk(graph) for name in _node_names(node))
    folded = _match_nodes(model, key) if model is not None else []
    if folded:
        before = (v.producer for node in folded for v in node.inputs if isinstance(v, Value) and v.producer is not None)
        into = [name for node in before for name in _node_names(node) if name in known]
        named = f", such as {into[0]!r}" if into else ""
        raise ModelError(f"{argument}: {key!r} is folded into other layers. Name one of these instead{named}.")
    raise ModelError(
        f"{argument}: {key!r} is not a layer of {graph.name}: no node or module has this name. "
        f"{suggest_names(key, known)}{REMOVED_MODULES_HINT}"
    )


def split_layer_settings(
    graphs: Sequence[Graph], layers: Mapping[str, LayerQuantizationSettings]
) -> list[dict[str, LayerQuantizationSettings]]:
    """Return the layer settings that apply to each of several graphs, such as the pieces of a model.

    Raises:
        ModelError: a key matches no layer of any graph; similar names are listed.
    """
    for key in layers:
        if not any(_match_nodes(graph, key) for graph in graphs):
            known = dict.fromkeys(name for graph in graphs for node in walk(graph) for name in _node_names(node))
            raise ModelError(
                f"{LAYER_SETTINGS_ARGUMENT}: {key!r} is not a layer of any piece: no node or module has this name. "
                f"{suggest_names(key, known)}{REMOVED_MODULES_HINT}"
            )
    return [{key: layer for key, layer in layers.items() if _match_nodes(graph, key)} for graph in graphs]


def suggest_names(key: str, known: Collection[str]) -> str:
    """Return a sentence with the names that resemble an unknown one, or else with the first ones."""
    near = difflib.get_close_matches(key, known, n=MAX_SUGGESTIONS) or [name for name in known if key in name]
    shown = ", ".join(map(repr, islice(near or known, MAX_SUGGESTIONS)))
    return f"{'Near matches' if near else 'Available'}: {shown}."


def _match_nodes(graph: Graph, key: str) -> list[Node]:
    return [node for node in walk(graph) if any(_is_match(name, key) for name in _node_names(node))]


def _reject_unused_widths(key: str, layer: LayerQuantizationSettings, nodes: Iterable[Node]) -> None:
    """Reject bit widths if no matching node has weights."""
    given = [name for name in ("weights_num_bits", "activations_num_bits") if getattr(layer, name) is not None]
    if given and all(node.op.trait.weight is None for node in nodes):
        raise ModelError(
            f"{LAYER_SETTINGS_ARGUMENT}: {key!r} has no quantized multiplication, so {' and '.join(given)} cannot "
            "apply. Name a convolution or a linear layer, or omit the setting."
        )


def _node_names(node: Node) -> tuple[str, ...]:
    return node.name, *node.origin.scopes


def _is_match(name: str, key: str) -> bool:
    return name == key or (not WILDCARDS.isdisjoint(key) and fnmatchcase(name, key))


def specificity(graph: Graph, key: str) -> tuple[int, int]:
    """Return a sort key: wildcards in their given order, then paths with outer modules first, then node names."""
    if any(node.name == key for node in walk(graph)):
        return 2, 0
    return (1, len(key)) if WILDCARDS.isdisjoint(key) else (0, 0)


def _as_widths(bits: int | Sequence[int] | None) -> tuple[int, ...]:
    return () if bits is None else (bits,) if isinstance(bits, int) else tuple(bits)


def _yield_skips(
    graph: Graph, key: str, nodes: Sequence[Node], layer: LayerQuantizationSettings, model: Graph | None
) -> Iterator[tuple[str, Iterable[Node]]]:
    """Yield the settings that keep nodes in float, with these nodes."""
    if layer.skip_quantization:
        yield "skip_quantization", nodes
    if layer.skip_quantization_downstream:
        yield "skip_quantization_downstream", _downstream(graph, nodes)
    if layer.skip_quantization_until:
        until = f"{SKIP_UNTIL_SETTING} of {key!r}"
        last = {name: find_nodes(graph, name, until, model) for name in layer.skip_quantization_until}
        yield SKIP_UNTIL_SETTING, _nodes_between(graph, key, nodes, last)


def _nodes_between(graph: Graph, key: str, nodes: Sequence[Node], until: Mapping[str, Sequence[Node]]) -> set[Node]:
    """Return the nodes and all nodes on a path from them to the named ones; the named ones are excluded."""
    downstream = _downstream(graph, nodes)
    found: set[Node] = set()
    for name, last_layers in until.items():
        between = downstream & _upstream(graph, last_layers) - {*last_layers}
        if not between:
            raise ModelError(
                f"{SKIP_UNTIL_SETTING} of {key!r}: {name!r} does not depend on {key!r}. Name a later layer."
            )
        found |= between
    return found


def _downstream(graph: Graph, nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes and all nodes that depend on them, directly or through others."""
    found = {*nodes}
    for node in graph.nodes:
        if any(isinstance(v, Value) and v.producer in found for v in node.inputs):
            found.add(node)
    return found


def _upstream(graph: Graph, nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes and all nodes that they depend on, directly or through others."""
    found = {*nodes}
    for node in graph.nodes_backward():
        if any(use.user in found for v in node.outputs for use in v.uses):
            found.add(node)
    return found
