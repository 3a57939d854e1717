"""Select the layers of a graph that get an adapter, by paths, path suffixes, or wildcards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.lora.adapters import adaptable_weight, has_columns
from clika_ref.quantization.layer_settings import WILDCARDS, suggest_names
from clika_ref.quantization.qdq.layer_weights import groups_of
from clika_ref.settings.lora import LoraSettings

TARGET_LAYERS_ARGUMENT = "target_layers"


def select_layers(graph: Graph, settings: LoraSettings) -> dict[Value, list[Node]]:
    """Return the layers that get an adapter, by weight; layers that share a weight share the adapter.

    A name selects the node of that name, all layers in the module of that path, and all in modules with a path that
    ends with it. A layer is skipped if its weight has no more elements than an adapter would have.

    Raises:
        ModelError: a name matches no layer with a weight of its own, similar names are listed; or all of its layers are
            skipped.
    """
    layers: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        weight = adaptable_weight(graph, node)
        if weight is not None:
            layers.setdefault(weight, []).append(node)
    layers = {w: nodes for w, nodes in layers.items() if len({has_columns(node) for node in nodes}) == 1}
    found: dict[Value, list[Node]] = {}
    for key in settings.target_layers:
        named = {w: nodes for w, nodes in layers.items() if any(_is_named(node, key) for node in nodes)}
        if not named:
            raise _no_layer_error(graph, key, [node for nodes in layers.values() for node in nodes])
        small = {
            w: nodes for w, nodes in named.items() if _adapter_size(nodes[0], w, settings.rank) < w.type.element_count
        }
        if not small:
            raise _rank_error(key, named, settings.rank)
        found |= small
    return {weight: nodes for weight, nodes in layers.items() if weight in found}


def _adapter_size(node: Node, weight: Value, rank: int) -> int:
    """Return the number of elements of an adapter of a given rank."""
    outputs, *rest = map(int, weight.type.shape)
    return rank * (groups_of(node) * math.prod(rest) + outputs)


def _is_named(node: Node, key: str) -> bool:
    names = (node.name, *node.origin.scopes)
    if not WILDCARDS.isdisjoint(key):
        return any(fnmatchcase(name, key) for name in names)
    return any(name == key or name.endswith(f".{key}") for name in names)


def _no_layer_error(graph: Graph, key: str, layers: Sequence[Node]) -> ModelError:
    """Return the error for a name that matches no layer."""
    if not layers:
        return ModelError(
            f"{TARGET_LAYERS_ARGUMENT}: {graph.name} has no linear layer or convolution with a weight of its own, so "
            "no adapter can be attached"
        )
    known = dict.fromkeys(_layer_names(layers))
    if any(_is_named(node, key) for node in graph.nodes):
        problem = "is not a linear layer or convolution with a weight of its own"
    else:
        problem = f"is not a layer of {graph.name}: no node, module or path suffix has this name"
    return ModelError(f"{TARGET_LAYERS_ARGUMENT}: {key!r} {problem}. {suggest_names(key, known)}")


def _layer_names(layers: Iterable[Node]) -> Iterator[str]:
    """Yield the paths of layers, the last part of each, and the names of nodes."""
    for node in layers:
        if node.origin.scope:
            yield node.origin.scope
            yield node.origin.scope.rpartition(".")[2]
        yield node.name


def _rank_error(key: str, named: Mapping[Value, Sequence[Node]], rank: int) -> ModelError:
    weight, nodes = next(iter(named.items()))
    shape = "x".join(map(str, weight.type.shape))
    return ModelError(
        f"{TARGET_LAYERS_ARGUMENT}: {key!r}: {rank=} is too large: an adapter of {weight.name!r} ({shape}) would have "
        f"{_adapter_size(nodes[0], weight, rank):,} elements, but the weight has {weight.type.element_count:,}. Choose "
        "a smaller rank, or train the weight itself."
    )
