"""Which settings hold for which node: those of the model, and those of layers that the user names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.quantization_settings import LayerQuantizationSettings, QuantizationSettings

ARGUMENT = "layer_quantization_settings"

UNTIL = "skip_quantization_until"

WILDCARDS = frozenset("*?[")

NEAR = 5
"""Names that an error lists, at most."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What the user chose for one node."""

    weights_num_bits: tuple[int, ...]
    """Widths of which the node may take one."""
    activations_num_bits: int
    skipped: str = ""
    """Which setting leaves it float; none where it may be quantized."""


REMOVED = "; modules that do nothing in eval mode, such as Dropout, are removed"


def choices(
    graph: Graph,
    settings: QuantizationSettings,
    layers: Mapping[str, LayerQuantizationSettings],
    model: Graph | None = None,
) -> dict[Node, Choice]:
    """Return what holds for each node.

    A key of ``layers`` is the name of a node, the path of a module, which stands for all nodes within, or either with
    wildcards (``*``, ``?``, ``[...]``). Where several hold for one node, the numbers of bits are those of the most
    specific: the name of the node, then the longest path, then wildcards, of which the last wins.

    Args:
        graph: as it is going to be written.
        settings: of the whole model.
        layers: of some of it.
        model: the graph before passes folded nodes of it into others, which an error then names.

    Raises:
        ModelError: a key, or a name in ``skip_quantization_until``, is that of no layer, near ones are listed; or a
            number of bits is given for what has no weights.
    """
    found = dict.fromkeys(graph.nodes, Choice(_widths(settings.weights_num_bits), settings.activations_num_bits))
    for key in sorted(layers, key=lambda key: specificity(graph, key)):
        layer, nodes = layers[key], matching(graph, key, ARGUMENT, model)
        _refuse_idle_widths(key, layer, nodes)
        for node in nodes:
            found[node] = replace(
                found[node],
                weights_num_bits=_widths(layer.weights_num_bits) or found[node].weights_num_bits,
                activations_num_bits=layer.activations_num_bits or found[node].activations_num_bits,
            )
        for setting, skipped in _skipped(graph, key, nodes, layer, model):
            for node in skipped:
                found[node] = replace(found[node], skipped=f"{setting} of {key!r}")
    return found


def matching(graph: Graph, key: str, argument: str, model: Graph | None = None) -> list[Node]:
    """Return the nodes that a key names, in order.

    Raises:
        ModelError: there is none.
    """
    found = _matching(graph, key)
    if found:
        return found
    known = dict.fromkeys(name for node in graph.nodes for name in _names(node))
    folded = _matching(model, key) if model is not None else []
    if folded:
        before = (v.producer for node in folded for v in node.inputs if isinstance(v, Value) and v.producer is not None)
        into = [name for node in before for name in _names(node) if name in known]
        named = f": into {into[0]!r}, say" if into else ""
        msg = f"{argument}: {key!r} is folded into others where the graph is written{named}; name one of these"
        raise ModelError(msg)
    near = difflib.get_close_matches(key, known, n=NEAR) or [name for name in known if key in name][:NEAR]
    hint = f"; near it are {', '.join(map(repr, near))}" if near else f"; among them are {_some(known)}"
    msg = f"{argument}: {key!r} is the name of no layer of {graph.name}: of no node, and of no module{hint}{REMOVED}"
    raise ModelError(msg)


def _matching(graph: Graph, key: str) -> list[Node]:
    return [node for node in graph.nodes if any(_matches(name, key) for name in _names(node))]


def _refuse_idle_widths(key: str, layer: LayerQuantizationSettings, nodes: Iterable[Node]) -> None:
    """Refuse numbers of bits of what has none."""
    given = [name for name in ("weights_num_bits", "activations_num_bits") if getattr(layer, name) is not None]
    if given and all(node.op.trait.weight is None for node in nodes):
        msg = (
            f"{ARGUMENT}: {key!r} names no layer that multiplies in integers, to which {' and '.join(given)} could "
            "belong, such as a convolution or a linear layer; name one, or leave that out"
        )
        raise ModelError(msg)


def _some(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name, _ in zip(names, range(NEAR), strict=False))


def _names(node: Node) -> tuple[str, ...]:
    return node.name, *node.origin.scopes


def _matches(name: str, key: str) -> bool:
    return name == key or (not WILDCARDS.isdisjoint(key) and fnmatchcase(name, key))


def specificity(graph: Graph, key: str) -> tuple[int, int]:
    """Sort wildcards, as they were given, before paths, those of outer modules first, and these before nodes."""
    if any(node.name == key for node in graph.nodes):
        return 2, 0
    return (1, len(key)) if WILDCARDS.isdisjoint(key) else (0, 0)


def _widths(bits: int | Sequence[int] | None) -> tuple[int, ...]:
    return () if bits is None else (bits,) if isinstance(bits, int) else tuple(bits)


def _skipped(
    graph: Graph, key: str, nodes: Sequence[Node], layer: LayerQuantizationSettings, model: Graph | None
) -> Iterator[tuple[str, Iterable[Node]]]:
    """Yield the settings by which nodes stay float, with these nodes."""
    if layer.skip_quantization:
        yield "skip_quantization", nodes
    if layer.skip_quantization_downstream:
        yield "skip_quantization_downstream", _downstream(graph, nodes)
    if layer.skip_quantization_until:
        until = f"{UNTIL} of {key!r}"
        yield (
            UNTIL,
            _between(
                graph, key, nodes, {name: matching(graph, name, until, model) for name in layer.skip_quantization_until}
            ),
        )


def _between(graph: Graph, key: str, nodes: Sequence[Node], until: Mapping[str, Sequence[Node]]) -> set[Node]:
    """Return nodes and all on a way from them to those named, which themselves are not among it."""
    behind = _downstream(graph, nodes)
    found: set[Node] = set()
    for name, ends in until.items():
        between = behind & _upstream(graph, ends) - {*ends}
        if not between:
            msg = f"{UNTIL} of {key!r}: {name!r} reads nothing that {key!r} makes; name a layer behind it"
            raise ModelError(msg)
        found |= between
    return found


def _downstream(graph: Graph, nodes: Iterable[Node]) -> set[Node]:
    """Return nodes and all that reads their results, at once or by way of others."""
    found = {*nodes}
    for node in graph.nodes:
        if any(isinstance(v, Value) and v.producer in found for v in node.inputs):
            found.add(node)
    return found


def _upstream(graph: Graph, nodes: Iterable[Node]) -> set[Node]:
    """Return nodes and all whose results they read, at once or by way of others."""
    found = {*nodes}
    for node in graph.reversed_nodes():
        if any(use.user in found for v in node.outputs for use in v.uses):
            found.add(node)
    return found
