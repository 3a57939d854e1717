"""Apply a plan to a graph: ``quantize`` and ``dequantize`` around values, and quantized weights."""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph, Node, Use, Value, walk_graphs
from clika_ref.core.operators import Operator
from clika_ref.core.quantization_scheme import QuantizationScheme, QuantizedType, is_int32_bias_supported
from clika_ref.core.traits import LOOKUP, SHARED_QPARAMS
from clika_ref.core.types import TensorType
from clika_ref.quantization.qdq.folded_norms import current_weight_scales
from clika_ref.quantization.qdq.layer_weights import bias_of, data_of, weight_of, weight_position_of
from clika_ref.quantization.qdq.packed_weights import (
    PackedWeight,
    StoredOrder,
    choose_stored_order,
    pack_dynamic_layer,
    pack_layer_weight,
    pack_table,
    weight_rows,
)
from clika_ref.quantization.qdq.placement import COMPUTE_TRAIT, FLOAT_LAYER_TRAIT
from clika_ref.quantization.qdq.qparams import QParams, quantize_bias
from clika_ref.quantization.qdq.recurrent_layers import quantize_recurrent_layer

QDQ_OPERATORS = ("quantize", "dequantize")
"""The operators at the borders of quantized regions; their second operand is a scale."""


@dataclass
class Plan:
    """The scales of a quantized graph, by value and node name."""

    scheme: QuantizationScheme
    """Quantized types and rules of the target."""
    activations: dict[str, QParams] = field(default_factory=dict[str, QParams])
    """Scale of each quantized value."""
    weights: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Weight scales of each layer, ``float32[channels]``."""
    offsets: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Offset of a layer's quantized weight from the nearest integers, ``int8`` of its shape; 0 if missing."""
    corrections: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Bias correction of a layer, ``float32[channels]``; creates a bias if it has none."""
    smoothing: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Factors that values are divided by before quantization, ``float32[channels]``: see ``smooth_quant.py``."""
    packed_weights: dict[str, PackedWeight] = field(default_factory=dict[str, PackedWeight])
    """Low-bit weights of layers that compute in float, and by their own names, those of recurrent layers."""
    dynamic: dict[str, bool] = field(default_factory=dict[str, bool])
    """Whether layers round their inputs to 8 bits at run time; False for recurrent ones with low-bit weights only."""
    rounded_inputs: dict[str, int] = field(default_factory=dict[str, int])
    """Layers with low-bit weights whose inputs the runtime rounds on request, and the number of elements per scale."""
    floats: dict[str, str] = field(default_factory=dict[str, str])
    """Layers that stay in float, with the reason."""
    scale_sources: dict[str, str] = field(default_factory=dict[str, str])
    """Values that must have the scale of another one, since their quantized data is moved or joined unchanged."""
    norms: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Multiplier of the batch norm in a layer's weight when its scales were chosen, ``float64[channels]``.

    If norms are live, the scales follow the current multiplier.
    """

    @property
    def lookups(self) -> Mapping[str, bool]:
        """See `WeightOnlyScheme`."""
        return {} if self.scheme.weights_only is None else self.scheme.weights_only.lookups

    @property
    def is_empty(self) -> bool:
        """Whether nothing is quantized."""
        return not (self.activations or self.weights or self.packed_weights or self.dynamic)

    def merge(self, other: Plan) -> Plan:
        """Return the plan with that of another part of the graph: a body, whose names are its own."""
        kinds = [f.name for f in fields(self) if f.name != "scheme"]
        merged: dict[str, Any] = {kind: {**getattr(self, kind), **getattr(other, kind)} for kind in kinds}
        return replace(self, **merged)

    def to_device(self, device: torch.device) -> Plan:
        """Return the plan with its tensors on a device; itself if they are there already."""
        every = {kind: getattr(self, kind) for kind in ("weights", "offsets", "corrections", "smoothing", "norms")}
        packed = [t for tensors in every.values() for t in tensors.values()]
        if all(t.device == device for t in (*packed, *(c.scales for c in self.packed_weights.values()))):
            return self
        compressed = {name: packed.to_device(device) for name, packed in self.packed_weights.items()}
        offsets: Any = {kind: {n: t.to(device) for n, t in tensors.items()} for kind, tensors in every.items()}
        return replace(self, packed_weights=compressed, **offsets)


def quantize_graph(graph: Graph, plan: Plan, operators: Mapping[str, Operator]) -> None:
    """Apply a plan to a graph and its bodies; float weights that become unused stay in it.

    No pair of ``quantize`` and ``dequantize`` spans the border of a body. ``operators`` are those of the registry,
    including `quantize` and `dequantize`.

    Source: Jacob et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference
    (2018), section 2.1.
    """
    for part in list(walk_graphs(graph)):
        _quantize_part(part, plan, operators)


def _quantize_part(graph: Graph, plan: Plan, operators: Mapping[str, Operator]) -> None:
    nodes = list(graph.nodes)
    layers = {node for node in nodes if node.name in plan.weights}
    after = dict(itertools.pairwise([*nodes, None]))
    lookups = [node for node in nodes if node.op.trait is LOOKUP and node.name in plan.packed_weights]
    stored = _quantize_weights(graph, layers, lookups, plan, operators)
    for value, scale in find_quantized_values(graph, plan):
        before = next(iter(nodes), None) if value.producer is None else after[value.producer]
        readers = find_quantized_uses(value, plan, layers)
        _insert_qdq(graph, value, readers, scale, plan.scheme.activations, Builder(graph, operators, before))
    for node, value, scale in find_joined_constants(nodes, plan):
        readers = [use for use in value.uses if use.user is node]
        _insert_qdq(graph, value, readers, scale, plan.scheme.activations, Builder(graph, operators, node))
    for node in [node for node in nodes if node.name in plan.dynamic and node.op.trait.matrices is not None]:
        quantize_recurrent_layer(graph, node, plan.packed_weights, operators, is_dynamic=plan.dynamic[node.name])
    for node in lookups:
        table, packed, is_fused = weight_of(node), plan.packed_weights[node.name], plan.lookups.get(node.op_type, False)
        stored[table] = pack_table(graph, node, packed, operators, stored.get(table), is_fused=is_fused)


def _quantize_weights(
    graph: Graph, layers: Container[Node], lookups: Sequence[Node], plan: Plan, operators: Mapping[str, Operator]
) -> dict[Value, Value]:
    """Quantize the weights of all layers; return the quantized form of those that lookups read in the same form."""
    tables = {weight_of(node): plan.packed_weights[node.name] for node in lookups}
    orders = {
        weight_of(node): choose_stored_order(
            plan.packed_weights[node.name].bits, is_fused=plan.lookups.get(node.op_type, False)
        )
        for node in lookups
    }
    found: dict[Value, Value] = {}
    for node in [node for node in graph.nodes if node not in lookups]:
        if node in layers:
            weight = weight_of(node)
            is_table = weight in tables and tables[weight].is_equal(weight_as_table(node, plan))
            stored = quantize_layer(graph, node, plan, operators)
        elif node.name in plan.packed_weights:
            weight, packed = weight_of(node), plan.packed_weights[node.name]
            if node.name in plan.dynamic:
                pack_dynamic_layer(graph, node, packed, operators)
                continue
            is_table = (
                weight in tables and tables[weight].is_equal(packed) and orders[weight] is not StoredOrder.COLUMNS
            )
            scales = current_weight_scales(packed.scales, node, plan.norms.get(node.name))
            order = orders[weight] if is_table else StoredOrder.COLUMNS
            stored = pack_layer_weight(graph, node, replace(packed, scales=scales), operators, order)
        else:
            continue
        if is_table:
            found[weight] = stored
    return found


def find_joined_constants(nodes: Sequence[Node], plan: Plan) -> list[tuple[Node, Value, QParams]]:
    """Return the constants joined with quantized values, each with the joining node and the common scale."""
    joins = [
        node for node in nodes if node.op_type in plan.scheme.shared_qparams and node.output.name in plan.activations
    ]
    return [
        (node, value, plan.activations[node.output.name])
        for node in joins
        for value in dict.fromkeys(v for v in node.inputs if isinstance(v, Value) and v.is_constant)
    ]


def find_quantized_values(graph: Graph, plan: Plan) -> list[tuple[Value, QParams]]:
    """Return the quantized values of a graph, with their scales."""
    values = [*graph.inputs, *(v for node in graph.nodes for v in node.outputs)]
    return [(v, plan.activations[v.name]) for v in values if v.name in plan.activations]


def find_quantized_uses(value: Value, plan: Plan, layers: Container[Node]) -> list[Use]:
    """Return the uses that read the quantized form of a value, given the quantized layers; others may read floats."""
    return [
        use for use in value.uses if not (plan.scheme.is_all_or_none_quantized and _is_float_use(use, plan, layers))
    ]


def _is_float_use(use: Use, plan: Plan, layers: Container[Node]) -> bool:
    """Return whether a float layer or a float join reads a value, directly or after moves."""
    node = use.user
    if not isinstance(node, Node):
        return False
    if node.op.trait is SHARED_QPARAMS:
        return use.position == 0 and any(_is_float_use(u, plan, layers) for v in node.outputs for u in v.uses)
    if node.op_type in plan.scheme.shared_qparams:
        return node.output.name not in plan.activations
    return node.op.trait.kind in (COMPUTE_TRAIT, FLOAT_LAYER_TRAIT) and node not in layers


def _insert_qdq(  # noqa: PLR0917 - these arguments describe one pair
    graph: Graph, value: Value, readers: Sequence[Use], scale: QParams, kind: QuantizedType, build: Builder
) -> None:
    """Insert a ``quantize``/``dequantize`` pair between a value and its readers."""
    quantized = build("quantize", value, scale.scale, scale.zero_point, **quantize_attributes(kind))
    packed = build("dequantize", quantized, scale.scale, scale.zero_point)
    for use in readers:
        redirect_use(graph, use, packed)


def redirect_use(graph: Graph, use: Use, value: Value) -> None:
    """Redirect a use to another value, which may have another type."""
    if isinstance(use.user, Node):
        graph.set_input(use.user, int(use.position), value)
    elif isinstance(use.position, int):
        graph.set_output(use.position, value)
    else:
        graph.set_state(use.position, value)


def weight_as_table(node: Node, plan: Plan) -> PackedWeight:
    """Return the INT8 weight ``[outputs, inputs]`` of a layer as rows with a scale each, as a lookup reads it."""
    scales = plan.weights[node.name]
    rows = scales.reshape(-1, 1).expand(len(data_of(weight_of(node))), 1)
    kind = plan.scheme.weights
    return PackedWeight(kind.bits, 0, rows, plan.offsets.get(node.name), kind.is_narrow)


def quantize_layer(graph: Graph, node: Node, plan: Plan, operators: Mapping[str, Operator]) -> Value:
    """Quantize the weight of a layer, and its bias if the target adds it to the accumulator.

    Returns:
        The integers of the weight, in its shape.
    """
    build = Builder(graph, operators, node, node.origin)
    scales = current_weight_scales(plan.weights[node.name], node, plan.norms.get(node.name))
    weight, axis = weight_of(node), scale_axis_of(node, scales)
    offsets = plan.offsets.get(node.name)
    made = partial(quantize_weight, weight, scales, axis, plan.scheme.weights, operators["quantize"], offsets)
    quantized = build.constant(made, f"{weight.name}_integers", TensorType(torch.int8, weight.type.shape))
    scale = build.constant(scales, f"{weight.name}_scale")
    graph.set_input(node, weight_position_of(node), build("dequantize", quantized, scale, axis=axis))
    if node.op.trait.bias is not None:
        bias = _correct_bias(bias_of(node), plan.corrections.get(node.name), build, f"{weight.name}_bias")
        graph.set_input(node, node.op.trait.bias, _insert_int32_bias(bias, node, scales, plan, build))
    return quantized


def quantize_layer_weight(node: Node, plan: Plan, operators: Mapping[str, Operator]) -> tuple[Tensor, Tensor]:
    """Return the quantized weight of a layer in a plan, ``int8``, and its current scales.

    Weights of layers that compute in float are ``[outputs, inputs]``, others have the shape of the weight.
    """
    weight, norms, packed = weight_of(node), plan.norms.get(node.name), plan.packed_weights.get(node.name)
    if packed is not None:
        packed = replace(packed, scales=current_weight_scales(packed.scales, node, norms))
        return packed.steps(weight_rows(node, data_of(weight))), packed.scales
    scales = current_weight_scales(plan.weights[node.name], node, norms)
    axis, offsets = scale_axis_of(node, scales), plan.offsets.get(node.name)
    return quantize_weight(weight, scales, axis, plan.scheme.weights, operators["quantize"], offsets), scales


def _correct_bias(bias: Value | None, correction: Tensor | None, build: Builder, name: str) -> Value | None:
    """Return the bias of a layer with its correction added; creates a bias if there is none."""
    if correction is None or (bias is not None and bias.data is None):
        return bias
    if bias is None or bias.data is None:
        return build.constant(correction, name)
    return build.constant(bias.data.detach() + correction, f"{bias.name}_corrected")


def _insert_int32_bias(bias: Value | None, node: Node, scales: Tensor, plan: Plan, build: Builder) -> Value | None:
    """Return a bias in INT32, dequantized, if the target adds it to the accumulator; otherwise the bias itself."""
    if not has_int32_bias(node, plan) or bias is None or bias.data is None:
        return bias
    steps, own = quantize_bias(bias.data, plan.activations[node.inputs[0].name].scale, scales)
    whole = build.constant(steps, f"{bias.name}_integers")
    return build("dequantize", whole, build.constant(own, f"{bias.name}_scale"), axis=0 if own.ndim else None)


def has_int32_bias(node: Node, plan: Plan) -> bool:
    """Return whether the target adds the bias of a layer to the accumulator."""
    read = node.inputs[0]
    return is_int32_bias_supported(plan.scheme, node.op_type, read.type) and read.name in plan.activations


def scale_axis_of(node: Node, scales: Tensor) -> int | None:
    """Return the dim of a layer's weight with a scale for each index, None if it has a single scale."""
    return (node.op.trait.axis or 0) % weight_of(node).type.rank if scales.ndim else None


def quantize_weight(  # noqa: PLR0917 - these arguments describe one weight
    weight: Value,
    scales: Tensor,
    axis: int | None,
    kind: QuantizedType,
    quantize: Operator,
    offsets: Tensor | None = None,
) -> Tensor:
    """Quantize a weight to ``int8`` of its shape: the nearest integers, plus offsets if given."""
    zeros = torch.zeros_like(scales, dtype=torch.int8)
    with torch.no_grad():
        nearest = quantize(data_of(weight), scales, zeros, axis=axis, **quantize_attributes(kind))
    return nearest if offsets is None else (nearest.to(torch.int16) + offsets).clamp(kind.low, kind.high).to(torch.int8)


def quantize_attributes(kind: QuantizedType) -> dict[str, Any]:
    """Return the attributes of ``quantize`` for a quantized type."""
    dtype = torch.int8 if kind.is_signed else torch.uint8
    limits = torch.iinfo(dtype)
    low, high = (None if end == own else end for end, own in ((kind.low, limits.min), (kind.high, limits.max)))
    return {"dtype": dtype, "quant_min": low, "quant_max": high}
