"""The adapters of a graph: their nodes, their names, and the merged weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.ir import Graph, Node, Value
from clika_ref.pruning.masks import split_mask
from clika_ref.quantization.qdq.layer_weights import groups_of, is_unchanged_constant, weight_position_of

ADAPTER_SCOPE = "clika.adapters"
"""The scope of adapters among the parameters of a module."""

ADAPTER_PREFIX = f"{ADAPTER_SCOPE}."
DOWN_SUFFIX, UP_SUFFIX = ".lora_A.weight", ".lora_B.weight"
"""Suffixes of the names of the two matrices after the path of a layer, as in ``peft``."""

ADDMM_OPERATOR = "addmm"
"""``bias + x @ weight``, a linear layer with one weight column per output, as in GPT-2."""

ADAPTER_OPERATORS = {
    **dict.fromkeys(("linear", ADDMM_OPERATOR), "lora_linear"),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), "lora_convolution"),
}
"""The operator of an adapter, by the operator of its layer."""


@dataclass(frozen=True)
class Adapter:
    """Two low-rank matrices for the layers that read one weight."""

    path: str
    """Path of the module that owns the weight."""
    weight: Value
    """The parameter; layers may read it through a mask."""
    down: Value
    up: Value
    nodes: tuple[Node, ...]
    """One node for each layer."""

    @property
    def rank(self) -> int:
        """The inner dim of the two matrices, per group."""
        return int(self.up.type.shape[1])

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes that all nodes of an adapter share."""
        return {name: self.nodes[0].attrs[name] for name in ("alpha", "dropout_rate", "merging")}

    @property
    def layers(self) -> list[Node]:
        """The layers that read the weight."""
        return [layer_of(node) for node in self.nodes]

    @property
    def is_masked(self) -> bool:
        """Whether a layer reads the weight through a mask, which merging would undo."""
        return any(weight_of(layer) is not self.weight for layer in self.layers)

    @property
    def has_columns(self) -> bool:
        """Whether the weight has one column per output, instead of one row."""
        return has_columns(self.layers[0])


def adapters_of(graph: Graph) -> list[Adapter]:
    """Return the adapters of a graph, in order."""
    found: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.op_type in ADAPTER_OPERATORS.values():
            found.setdefault(node.inputs[2].name, []).append(node)
    return [
        Adapter(
            name.removeprefix(ADAPTER_PREFIX).removesuffix(DOWN_SUFFIX),
            split_mask(weight_of(layer_of(nodes[0])))[0],
            nodes[0].inputs[2],
            nodes[0].inputs[3],
            tuple(nodes),
        )
        for name, nodes in found.items()
    ]


def layer_of(node: Node) -> Node:
    """Return the layer that an adapter node belongs to."""
    producer = node.inputs[0].producer
    assert producer is not None
    return producer


def input_of(layer: Node) -> Value:
    """Return the input of a layer, which is also that of its adapter."""
    x = layer.inputs[1 if has_columns(layer) else 0]
    assert isinstance(x, Value)
    return x


def weight_position(layer: Node) -> int:
    """Return the position of the weight among the operands of a layer."""
    return 2 if has_columns(layer) else weight_position_of(layer)


def weight_of(layer: Node) -> Value:
    """Return the weight of a layer."""
    weight = layer.inputs[weight_position(layer)]
    assert isinstance(weight, Value)
    return weight


def has_columns(layer: Node) -> bool:
    """Whether the weight of a layer has one column per output, instead of one row."""
    return layer.op_type == ADDMM_OPERATOR


def is_adapter(name: str) -> bool:
    """Whether a parameter is a matrix of an adapter."""
    return name.startswith(ADAPTER_PREFIX)


def adaptable_weight(graph: Graph, node: Node) -> Value | None:
    """Return the parameter of a layer that an adapter can be attached to; None for any other node."""
    if node.op_type not in ADAPTER_OPERATORS or (node.op_type == ADDMM_OPERATOR and node.attrs["alpha"] != 1):
        return None
    parameter, _ = split_mask(weight_of(node))
    is_float = parameter.type.dtype.is_floating_point and parameter.type.rank > 1
    return parameter if is_float and is_unchanged_constant(graph, parameter) else None


def merge_weight(weight: Tensor, down: Tensor, up: Tensor, *, alpha: float, groups: int, has_columns: bool) -> Tensor:
    """Return ``weight + alpha / r * up @ down``, for each group separately.

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models (2021), section 4.

    Args:
        weight: ``[outputs, inputs / groups, ...]``, or ``[inputs, outputs]``.
        down: ``[groups * r, inputs / groups, ...]``.
        up: ``[outputs, r]``, with trailing dims of size 1.
        alpha: the scaling of the adapter.
        groups: the groups of the layer.
        has_columns: whether the weight has one column per output.
    """
    rank = up.shape[1]
    product = (up.reshape(groups, -1, rank) @ down.reshape(groups, rank, -1)) * (alpha / rank)
    return weight + (product[0].T if has_columns else product.reshape(weight.shape))


def merge_arguments(adapter: Adapter, layer: Node) -> dict[str, Any]:
    """Return the non-tensor arguments of `merge_weight`."""
    return {"alpha": adapter.attributes["alpha"], "groups": groups_of(layer), "has_columns": has_columns(layer)}


def clone_with_dropout(graph: Graph) -> Graph:
    """Return a clone with dropout active in its adapters; the graph itself if no adapter has dropout."""
    if not any(node.attrs.get("dropout_rate") for node in graph.nodes if node.op_type in ADAPTER_OPERATORS.values()):
        return graph
    clone = graph.clone()
    enable_dropout(clone)
    return clone


def enable_dropout(graph: Graph) -> None:
    """Activate dropout in the adapters of a graph."""
    for node in graph.nodes:
        if node.op_type in ADAPTER_OPERATORS.values():
            node.attrs = {**node.attrs, "training": True}


def freeze_base(module: torch.nn.Module) -> None:
    """Freeze all parameters of a module except its adapters."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(is_adapter(name))
