"""Put adapters beside layers: two matrices each, of which the second is zero, so that nothing changes at first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.lora.adapters import BESIDE, DOWN, PREFIX, UP, adapters_of
from clika_ref.lora.choosing import ARGUMENT, chosen_layers
from clika_ref.lora.report import Adapted, adapted
from clika_ref.lora_settings import LoraSettings
from clika_ref.quantization.layer_weights import groups_of, weight_of
from clika_ref.quantization.quantizing import read_instead
from clika_ref.reporting.log import CompilationLog

OF_CONVOLUTIONS = ("stride", "padding", "dilation", "groups")
"""The attributes of a layer that the first product of an adapter has as well."""


def attach(graph: Graph, settings: LoraSettings, operators: Mapping[str, Operator], log: CompilationLog) -> Adapted:
    """Put an adapter beside each layer that settings name; return which there are.

    Args:
        graph: of a module, changed in place.
        settings: what the user chose.
        operators: of the registry.
        log: what it tells.

    Raises:
        ModelError: the graph has adapters already, a name is that of no layer, or masked weights are to be merged.
    """
    settings.check()
    with log.stage("Adapting") as stage:
        before = adapters_of(graph)
        if before:
            msg = (
                f"{graph.name} has adapters already, beside {len(before)} weights, the first of them "
                f"{before[0].weight.name!r}; merge these with clika_merge_lora() before others are attached"
            )
            raise ModelError(msg)
        chosen = chosen_layers(graph, settings)
        if settings.merging == "on":
            _refuse_masks(chosen)
        following = dict(zip(graph.nodes, [*list(graph.nodes)[1:], None], strict=True))
        for weight, nodes in chosen.items():
            down, up = _matrices_of(graph, weight, nodes[0], settings.rank)
            for layer in nodes:
                put_beside(graph, layer, (down, up), _attributes(settings), operators, following[layer])
        found = adapted(graph)
        log.table("Adapters", found.table)
        stage.done(found.in_one_line())
    return found


def _refuse_masks(chosen: Mapping[Value, Sequence[Node]]) -> None:
    masked = [weight for weight, nodes in chosen.items() if any(weight_of(node) is not weight for node in nodes)]
    if masked:
        msg = (
            f"merging='on' would fill what is masked of {', '.join(repr(w.name) for w in masked)}; leave the adapters "
            f"beside these layers, with merging='auto', or name others in {ARGUMENT}"
        )
        raise ModelError(msg)


def _attributes(settings: LoraSettings) -> dict[str, Any]:
    """Return what settings say of each node of an adapter."""
    alpha, dropout_rate = float(settings.alpha), float(settings.dropout_rate)
    return {"alpha": alpha, "dropout_rate": dropout_rate, "merging": settings.merging}


def _matrices_of(graph: Graph, weight: Value, layer: Node, rank: int) -> tuple[Value, Value]:
    """Return the parameters of a new adapter of a weight."""
    path = PREFIX + _path(graph, weight, layer)
    down, up = _matrices(weight, rank, groups_of(layer))
    return graph.add_constant(nn.Parameter(down), path + DOWN), graph.add_constant(nn.Parameter(up), path + UP)


def put_beside(  # noqa: PLR0917 - all of it is one node
    graph: Graph,
    layer: Node,
    matrices: tuple[Value, Value],
    attrs: Mapping[str, Any],
    operators: Mapping[str, Operator],
    following: Node | None,
) -> Node:
    """Put the node of an adapter between a layer and its readers; return it.

    Args:
        graph: changed in place.
        layer: beside which it goes.
        matrices: of the adapter.
        attrs: those that the layer does not decide.
        operators: of the registry.
        following: the node behind the layer, None where it is the last one.
    """
    operation, result = operators[BESIDE[layer.kind]], layer.output
    own = {name: layer.attrs[name] for name in OF_CONVOLUTIONS if name in layer.attrs}
    call = operation.call(result, layer.inputs[0], *matrices, **own, **attrs)
    readers = result.uses
    node = Node(operation, call.operands, call.attrs, layer.origin)
    graph.insert(node, [result.type], following, [f"{result.name}_adapted"])
    for use in readers:
        read_instead(graph, use, node.output)
    return node


def _path(graph: Graph, weight: Value, layer: Node) -> str:
    """Return the path of the module that a weight belongs to: of several, as of tied ones, that of a layer."""
    names = [weight.name, *(alias for alias, name in graph.aliases.items() if name == weight.name)]
    paths = [name.removesuffix(".weight") for name in names]
    return next((path for path in paths if path in layer.origin.scopes), paths[0])


@torch.inference_mode(mode=False)
def _matrices(weight: Value, rank: int, groups: int) -> tuple[Tensor, Tensor]:
    """Return ``down`` as PyTorch draws the weight of such a layer, and ``up`` of zeros."""
    outputs, *rest = map(int, weight.type.shape)
    assert weight.data is not None
    like = {"dtype": weight.data.dtype, "device": weight.data.device}
    down = nn.init.kaiming_uniform_(torch.empty(groups * rank, *rest, **like), a=math.sqrt(5))  # as nn.Linear does
    return down, torch.zeros(outputs, rank, *[1] * (len(rest) - 1), **like)
