"""The graph that trains a quantized module: its simulation, with gradients for the parameters of the module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.accuracy import COMPOSE
from clika_ref.core.deferred_constants import DeferredConstant
from clika_ref.core.errors import ModelError
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph, Node, Use, Value, walk_graphs, walk_values
from clika_ref.core.operators import Operator, operator
from clika_ref.core.rewriter import erase_dead
from clika_ref.core.traits import KEEP_FLOAT
from clika_ref.core.types import TensorType
from clika_ref.quantization.qat.fake_quantization import (
    apply_log_scale,
    apply_log_scales,
    fake_quantize,
    fake_quantize_bias,
    fake_quantize_rows,
    fake_quantize_weight,
    follow_norm_multiplier,
)
from clika_ref.quantization.qat.learned_scales import WEIGHT_LOG_SCALE_PREFIX, log_scale_name
from clika_ref.quantization.qat.live_norms import (
    batch_counter_of,
    find_frozen_norms,
    insert_live_norm,
    normalize_by_batch,
    replace_output,
    unfold_and_normalize,
)
from clika_ref.quantization.qdq.folded_norms import FoldedNorm, find_folded_norm
from clika_ref.quantization.qdq.insertion import (
    Plan,
    find_joined_constants,
    find_quantized_uses,
    find_quantized_values,
    has_int32_bias,
    redirect_use,
    scale_axis_of,
)
from clika_ref.quantization.qdq.layer_weights import bias_of, reshape_along_dim, weight_position_of
from clika_ref.quantization.qdq.norm_folding import fold_weight
from clika_ref.quantization.qdq.packed_weights import has_output_rows
from clika_ref.quantization.qdq.qparams import QParams

SINGLE_SCALE_TYPE = TensorType(torch.float32, (1,))

CONSTANT_NAME = "training"
"""Name of constants that are no parameters."""


@operator()
def add_along_dim(x: Tensor, correction: Tensor, *, dim: int) -> Tensor:
    """Add a value for each index along a dim to ``x``."""
    return x + reshape_along_dim(correction, dim, x.ndim)


@operator()
def stop_gradient(x: Tensor) -> Tensor:
    """Detach ``x`` from its gradient history."""
    return x.detach()


def make_trainable(
    graph: Graph, stored: Graph, plan: Plan, logs: Mapping[str, Tensor], *, has_live_norms: bool
) -> dict[str, Tensor]:
    """Insert fake quantization into a lowered graph after SmoothQuant, and replace deferred constants by calls.

    Args:
        graph: changed in place; its constants are then those of the stored graph, log scales, and others that do not
            change.
        stored: the graph of the module before lowering.
        plan: the quantization.
        logs: the parameters of learned log scales, in the shapes of `initial_log_scales`.
        has_live_norms: whether batch norms normalize by the batch.

    Returns:
        Multipliers of live norms by layer, as of when the scales of the plan were chosen, or the current ones if the
        plan has none.

    Raises:
        ModelError: a pass changed a parameter, or a norm that should be live, without declaring the change.
    """
    names = {value.name for value in walk_values(graph)} | graph.constants.keys()
    lacking = sorted((plan.activations.keys() | plan.weights.keys() | plan.packed_weights.keys()) - names)
    if lacking:
        raise ModelError(
            f"the training graph has no activation {lacking[0]!r}, but the plan quantizes it. Quantize the module "
            "again."
        )
    live = {node.inputs[3].name: node for node in find_frozen_norms(stored)} if has_live_norms else {}
    norms: dict[str, Tensor] = {}
    for part in list(walk_graphs(graph)):
        making = _TrainingGraphBuilder(part, stored, plan, logs, live if part is graph else {})
        making.run()
        norms |= making.norms
    graph.drop_unused_constants()
    _reject_untrained(graph, stored)
    _reject_frozen_norms(graph, live)
    return norms


def _reject_untrained(graph: Graph, stored: Graph) -> None:
    """Reject parameters that would not be trained.

    Raises:
        ModelError: a pass does not declare how it changed them.
    """
    trained = [n for n, v in stored.constants.items() if v.uses and v.data is not None and v.data.requires_grad]
    lost = [name for name in trained if name not in graph.constants]
    if lost:
        raise ModelError(
            f"{', '.join(map(repr, lost))} would not be trained: a pass computes with it without a "
            "clika_ref.core.deferred_constants.DeferredConstant, which its author can add. To continue, freeze it "
            "with requires_grad_(False)."
        )


def _reject_frozen_norms(graph: Graph, live: Mapping[str, Node]) -> None:
    """Reject norms that cannot be live.

    Raises:
        ModelError: a pass changed the layer that one is folded into.
    """
    found = {unfold_and_normalize: 6, normalize_by_batch: 3}
    means = {n.inputs[found[n.op]].name for n in graph.nodes if n.op in found}
    frozen = [norm for mean, norm in live.items() if mean not in means]
    if frozen:
        shown = ", ".join(f"{norm.name} in {norm.origin}" for norm in frozen)
        raise ModelError(
            f"the batch norms {shown} cannot be live: a pass replaced the layers that they are folded into. Compile "
            "with batch_norm='frozen'."
        )


@dataclass
class _TrainingGraphBuilder:
    graph: Graph
    stored: Graph
    plan: Plan
    logs: Mapping[str, Tensor]
    live: Mapping[str, Node]
    """Live batch norms, by the names of their running means."""
    norms: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Multipliers of the norms when scales were chosen, by the layers that they are folded into."""
    made: dict[Value, Value] = field(default_factory=dict[Value, Value])
    """Computed values of the constants that are no parameters."""
    scales: dict[str, Value] = field(default_factory=dict[str, Value])
    """Scales of values, by the names of their log scales."""

    def run(self) -> None:
        nodes = list(self.graph.nodes)
        layers = {node for node in nodes if node.name in self.plan.weights}
        front = Builder(self.graph, {}, nodes[0] if nodes else None)
        own = {v.name for v in (*self.graph.inputs, *(v for node in nodes for v in node.outputs))}
        for value, scale in self.plan.activations.items():
            if value in own:
                self._add_scale(value, scale, front)
        for node, following in zip(nodes, [*nodes[1:], None], strict=True):
            if node.op_type == "batch_norm" and isinstance(node.inputs[3], Value) and node.inputs[3].name in self.live:
                insert_live_norm(self.graph, node, self.stored.constants)  # not folded into a layer
            elif node.op.trait.weight is not None:
                self._train_layer(node, following)
            elif node.name in self.plan.dynamic:  # a recurrent layer
                self._train_recurrent_layer(node)
        placed = list(self.graph.nodes)
        after = dict(zip(placed, [*placed[1:], None], strict=True))
        joined = find_joined_constants(nodes, self.plan)
        for value, scale in find_quantized_values(self.graph, self.plan):
            before = front.before if value.producer is None else after[value.producer]
            self._insert_fake_quantize(value, find_quantized_uses(value, self.plan, layers), value.name, scale, before)
        for node, value, scale in joined:
            readers = [use for use in value.uses if use.user is node]
            self._insert_fake_quantize(value, readers, node.output.name, scale, node)
        for node in list(self.graph.nodes):
            for position, operand in enumerate(node.inputs):
                if isinstance(operand, Value) and operand.is_constant:
                    self.graph.set_input(node, position, self._compute(operand, node))
        erase_dead(self.graph, *nodes)

    def _add_scale(self, value: str, scale: QParams, build: Builder) -> None:
        """Compute a scale at the start of the graph, once for all values that share it."""
        name = log_scale_name(self.plan, value)
        if name not in self.scales:
            self.scales[name] = build(
                apply_log_scale, self._log_scale_parameter(name), planned=scale.scale, types=(SINGLE_SCALE_TYPE,)
            )

    def _log_scale_parameter(self, name: str) -> Value:
        data = self.logs[name]
        known = Value(TensorType(data.dtype, tuple(data.shape)), name, data=data)
        return self.graph.constants.setdefault(name, known)

    def _insert_fake_quantize(
        self, value: Value, readers: Sequence[Use], scaled_as: str, scale: QParams, before: Node | None
    ) -> None:
        """Insert fake quantization between a value and its readers, with the scale of the value ``scaled_as``."""
        kind, own = self.plan.scheme.activations, self.scales[log_scale_name(self.plan, scaled_as)]
        limits = {"zero_point": scale.zero_point, "low": kind.low, "high": kind.high}
        packed = Builder(self.graph, {}, before)(fake_quantize, value, own, types=(value.type,), **limits)
        for use in readers:
            redirect_use(self.graph, use, packed)

    def _train_layer(self, node: Node, following: Node | None) -> None:
        """Quantize the weight of a layer as the plan specifies, and unfold its norm if that is live."""
        build, weight, kind = (
            Builder(self.graph, {}, node, node.origin),
            node.inputs[weight_position_of(node)],
            self.plan.scheme,
        )
        norm = find_folded_norm(node)
        is_live = norm is not None and norm.mean.name in self.live
        norm = norm if is_live or node.name in self.plan.norms else None  # scales keep following a norm that was live
        multiplier = norm and Value(TensorType(torch.float64, norm.var.type.shape), "norm", data=norm.scale)
        packed, planned = self.plan.packed_weights.get(node.name), self.plan.weights.get(node.name)
        scales = None if planned is packed is None else self._scales_of(node, norm, multiplier, build)
        if planned is not None:
            steps = self._constant(self.plan.offsets.get(node.name))
            limits = {"axis": scale_axis_of(node, planned), "low": kind.weights.low, "high": kind.weights.high}
            weight = build(fake_quantize_weight, weight, scales, steps, types=(weight.type,), **limits)
        elif packed is not None:
            limits = {
                "has_rows": has_output_rows(node),
                "low": packed.quantized_type.low,
                "high": packed.quantized_type.high,
            }
            steps = self._constant(packed.offsets)
            weight = build(fake_quantize_rows, weight, scales, steps, types=(weight.type,), **limits)
        self.graph.set_input(node, weight_position_of(node), weight)
        if norm is not None and multiplier is not None and is_live:
            self._unfold_norm(node, norm, multiplier, following)
        elif planned is not None and node.op.trait.bias is not None:
            self.graph.set_input(node, node.op.trait.bias, self._bias_of(node, scales, build))

    def _train_recurrent_layer(self, node: Node) -> None:
        """Quantize the matrices of a recurrent layer; inputs that the target rounds at run time stay in float."""
        build = Builder(self.graph, {}, node, node.origin)
        for position, matrix in enumerate(node.inputs):
            packed = self.plan.packed_weights.get(matrix.name) if isinstance(matrix, Value) else None
            if packed is not None and matrix.is_constant:
                limits = {"has_rows": True, "low": packed.quantized_type.low, "high": packed.quantized_type.high}
                planned, steps = self._constant(packed.scales), self._constant(packed.offsets)
                assert planned is not None
                logarithms = self._log_scale_parameter(WEIGHT_LOG_SCALE_PREFIX + matrix.name)
                scales = build(apply_log_scales, logarithms, planned, types=(planned.type,))
                rounded = build(fake_quantize_rows, matrix, scales, steps, types=(matrix.type,), **limits)
                self.graph.set_input(node, position, rounded)

    def _scales_of(self, node: Node, norm: FoldedNorm | None, multiplier: Value | None, build: Builder) -> Value:
        packed = self.plan.packed_weights.get(node.name)
        planned = self._constant(self.plan.weights[node.name] if packed is None else packed.scales)
        assert planned is not None
        scales = build(
            apply_log_scales,
            self._log_scale_parameter(WEIGHT_LOG_SCALE_PREFIX + node.name),
            planned,
            types=(planned.type,),
        )
        if norm is None:
            return scales
        self.norms[node.name] = self.plan.norms.get(node.name, norm.scale())
        then = self._constant(self.norms[node.name])
        return build(follow_norm_multiplier, scales, multiplier, then, types=(scales.type,))

    def _constant(self, data: Tensor | None) -> Value | None:
        return None if data is None else self.graph.add_constant(data, CONSTANT_NAME)

    def _bias_of(self, node: Node, scales: Any, build: Builder) -> Any:
        """Return the bias of a layer, corrected and rounded as in the export."""
        bias = bias_of(node)
        if isinstance(bias, Value) and not bias.is_constant:
            return bias
        correction = self._constant(self.plan.corrections.get(node.name))
        if correction is not None:
            bias = correction if bias is None else build(add_along_dim, bias, correction, types=(bias.type,), dim=0)
        if bias is None or not has_int32_bias(node, self.plan):
            return bias
        read = self.scales[log_scale_name(self.plan, node.inputs[0].name)]
        return build(fake_quantize_bias, bias, read, scales, types=(bias.type,))

    def _unfold_norm(self, node: Node, norm: FoldedNorm, multiplier: Value, following: Node | None) -> None:
        """Unfold the norm of a layer and normalize by the batch after it; the bias correction comes last."""
        self.graph.set_input(node, node.op.trait.bias or 0, None)
        build, readers = Builder(self.graph, {}, following, node.origin), node.output.uses
        counter = batch_counter_of(norm.mean, self.stored.constants)
        operands = (multiplier, norm.factor, norm.bias, norm.gamma, norm.beta, norm.mean, norm.var, counter)
        attrs = {"momentum": self.live[norm.mean.name].attrs["momentum"], "eps": norm.eps}
        result = build(unfold_and_normalize, node.output, *operands, types=(node.output.type,), **attrs)
        correction = self._constant(self.plan.corrections.get(node.name))
        if correction is not None:
            result = build(add_along_dim, result, correction, types=(result.type,), dim=1)
        replace_output(self.graph, node, readers, result)

    def _compute(self, constant: Value, before: Node) -> Value:
        """Return the call that computes a deferred constant, made at its first read; other constants as they are."""
        is_stored = constant.name in self.stored.constants or self.graph.constants.get(constant.name) is constant
        if is_stored and not isinstance(constant.deferred_data, DeferredConstant):
            return self.graph.constants.setdefault(constant.name, constant)
        if constant not in self.made:
            self.made[constant] = self._call_function(constant, before)
        return self.made[constant]

    def _call_function(self, constant: Value, before: Node) -> Value:
        deferred = constant.deferred_data
        if not isinstance(deferred, DeferredConstant):
            assert constant.data is not None
            return self.graph.add_constant(constant.data, CONSTANT_NAME)
        operands = [self._compute(s, before) if isinstance(s, Value) else s for s in deferred.sources]
        if self.live and deferred.function is fold_weight and operands[1] is not None:
            build = Builder(self.graph, {}, before)  # the norm after it cancels this gradient, which costs time
            operands[1] = build(stop_gradient, operands[1], types=(operands[1].type,))
        node = Node(_as_operator(deferred.function), operands, dict(deferred.arguments))
        types = [constant.type] * (deferred.index + 1)
        return self.graph.insert(node, types, before).outputs[deferred.index]


def _as_operator(function: Any) -> Operator:
    known = isinstance(function, Operator)
    return function if known else Operator(function, (), KEEP_FLOAT, COMPOSE, random=False)
