"""Attach adapters to layers: two matrices each, the second zero, so that the outputs do not change at first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clika_ref.core.errors import ModelError, format_count
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.lora.adapters import (
    ADAPTER_OPERATORS,
    ADAPTER_PREFIX,
    DOWN_SUFFIX,
    UP_SUFFIX,
    adapters_of,
    has_columns,
    input_of,
    weight_of,
)
from clika_ref.lora.layer_selection import TARGET_LAYERS_ARGUMENT, select_layers
from clika_ref.lora.report import AdapterReport, report_adapters
from clika_ref.quantization.qdq.insertion import redirect_use
from clika_ref.quantization.qdq.layer_weights import data_of, groups_of
from clika_ref.reporting.log import CompilationLog
from clika_ref.settings.lora import LoraSettings

CONVOLUTION_ATTRIBUTES = ("stride", "padding", "dilation", "groups")
"""Attributes of a convolution that the first matrix of its adapter shares."""


def attach_adapters(
    graph: Graph, settings: LoraSettings, operators: Mapping[str, Operator], log: CompilationLog
) -> AdapterReport:
    """Attach an adapter to each selected layer; return the adapters.

    Args:
        graph: the graph of a module, changed in place.
        settings: the settings of the user.
        operators: the operators of the registry.
        log: the log to report to.

    Raises:
        ModelError: the graph has adapters already, a name matches no layer, or masked weights would be merged.
    """
    settings.check()
    with log.stage("Adapting") as stage:
        before = adapters_of(graph)
        if before:
            raise ModelError(
                f"{graph.name} already has adapters of {format_count(len(before), 'weight')}, the first of "
                f"{before[0].weight.name!r}. Merge them with clika_merge_lora() before you attach others."
            )
        chosen = select_layers(graph, settings)
        if settings.merging == "on":
            _reject_masks(chosen)
        attrs = {
            "alpha": float(settings.alpha),
            "dropout_rate": float(settings.dropout_rate),
            "merging": settings.merging,
        }
        following = dict(zip(graph.nodes, [*list(graph.nodes)[1:], None], strict=True))
        for weight, nodes in chosen.items():
            down, up = _add_matrices(graph, weight, nodes[0], settings.rank)
            for layer in nodes:
                insert_adapter(graph, layer, (down, up), attrs, operators, following[layer])
        found = report_adapters(graph)
        log.table("Adapters", found.table)
        stage.done(found.summarize())
    return found


def random_matrices(graph: Graph) -> dict[str, Tensor]:
    """Return the randomly initialized matrices of adapters, by name."""
    return {adapter.down.name: data for adapter in adapters_of(graph) if (data := adapter.down.data) is not None}


def _reject_masks(chosen: Mapping[Value, Sequence[Node]]) -> None:
    masked = [weight for weight, nodes in chosen.items() if any(weight_of(node) is not weight for node in nodes)]
    if masked:
        raise ModelError(
            f"merging='on' would overwrite the masked elements of {', '.join(repr(w.name) for w in masked)}. Use "
            f"merging='auto', or name other layers in {TARGET_LAYERS_ARGUMENT}."
        )


def _add_matrices(graph: Graph, weight: Value, layer: Node, rank: int) -> tuple[Value, Value]:
    """Return the parameters of a new adapter of a weight."""
    path = ADAPTER_PREFIX + _owner_path(graph, weight, layer)
    shape = weight.type.shape[::-1] if has_columns(layer) else weight.type.shape
    down, up = map(nn.Parameter, _init_matrices(data_of(weight), shape, rank, groups_of(layer)))
    return graph.add_constant(down, path + DOWN_SUFFIX), graph.add_constant(up, path + UP_SUFFIX)


def insert_adapter(  # noqa: PLR0917 - all of it is one node
    graph: Graph,
    layer: Node,
    matrices: tuple[Value, Value],
    attrs: Mapping[str, Any],
    operators: Mapping[str, Operator],
    following: Node | None,
) -> Node:
    """Insert the node of an adapter between a layer and its readers; return it.

    Args:
        graph: changed in place.
        layer: the layer.
        matrices: the parameters of the adapter.
        attrs: the attributes that are not copied from the layer.
        operators: the operators of the registry.
        following: the node after the layer, None if it is the last one.
    """
    operation, result = operators[ADAPTER_OPERATORS[layer.op_type]], layer.output
    own = {name: layer.attrs[name] for name in CONVOLUTION_ATTRIBUTES if name in layer.attrs}
    call = operation.call(result, input_of(layer), *matrices, **own, **attrs)
    readers = result.uses
    node = Node(operation, call.operands, call.attrs, layer.origin)
    graph.insert(node, [result.type], following, [f"{result.name}_adapted"])
    for use in readers:
        redirect_use(graph, use, node.output)
    return node


def _owner_path(graph: Graph, weight: Value, layer: Node) -> str:
    """Return the path of the module that owns a weight; for a tied weight, preferably that of the layer."""
    names = [weight.name, *(alias for alias, name in graph.aliases.items() if name == weight.name)]
    paths = [name.removesuffix(".weight") for name in names]
    return next((path for path in paths if path in layer.origin.scopes), paths[0])


@torch.inference_mode(mode=False)
def _init_matrices(weight: Tensor, shape: Sequence[Any], rank: int, groups: int) -> tuple[Tensor, Tensor]:
    """Return ``down`` with PyTorch's default initialization of such a layer, and ``up`` with zeros.

    Args:
        weight: the weight of the layer.
        shape: its dims, outputs first.
        rank: the rank of the adapter.
        groups: the groups of the layer.
    """
    outputs, *rest = map(int, shape)
    down = nn.init.kaiming_uniform_(weight.new_empty(groups * rank, *rest), a=math.sqrt(5))  # as nn.Linear does
    return down, weight.new_zeros(outputs, rank, *[1] * (len(rest) - 1))
