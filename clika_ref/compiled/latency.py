"""Latency in the runtime of a target: of whole files, and of layers that would be slower quantized than in float."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clika_ref.compiled.lowering import quantize_for_target
from clika_ref.compiled.runners import compile_temporarily, to_cpu
from clika_ref.core.artifacts import Runner
from clika_ref.core.errors import ModelError
from clika_ref.core.guards import check_inputs
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.quantization_scheme import QuantizationScheme, is_fused
from clika_ref.core.registry import Registry
from clika_ref.core.targets import Target
from clika_ref.core.types import TensorType
from clika_ref.quantization.graph_runs import compute_outputs
from clika_ref.quantization.qdq.insertion import Plan, quantize_attributes, quantize_layer
from clika_ref.quantization.qdq.layer_weights import data_of, weight_of, weight_scale_dim
from clika_ref.quantization.qdq.packed_weights import PackedWeight, pack_dynamic_layer, pack_layer_weight
from clika_ref.quantization.qdq.placement import COMPUTE_TRAIT
from clika_ref.quantization.qdq.qparams import QParams, compute_weight_scales
from clika_ref.targets.size_statistics import find_batch_size

TIMING_ROUNDS = 9
"""Number of rounds: each times float and quantized in turn, so that a slowdown of the machine affects both."""

SECONDS_PER_ROUND = 2e-3
"""Time for which each is called in a round, for a sufficient resolution of the clock."""

SECONDS_PER_LONG_CALL = 20 * SECONDS_PER_ROUND
"""Time of a call that fills a round, even if the next ones are much faster."""

MIN_SLOWDOWN = 1.05
"""Ratio of times above which a layer counts as slower; smaller ones are noise of the machine."""

MIN_DIFFERENCE = 0.03
"""The same for whole files, as a share: these are timed longer."""

TIMING_QPARAMS = QParams(2.0**-5, 0)
"""Scale of inputs and outputs of timed layers; kernels take the same time with any scale."""


@dataclass
class LayerTimer:
    """Times layers of a graph one by one, in float and quantized; equal layers are timed once."""

    target: Target
    """The target, whose runtime is timed."""
    scheme: QuantizationScheme
    """Its quantization scheme."""
    operators: Mapping[str, Operator]
    """The operators of the registry."""

    def find_slow_layers(
        self,
        graph: Graph,
        inputs: Sequence[Tensor],
        weights: Mapping[str, PackedWeight] | None = None,
        dynamic: Container[str] = (),
    ) -> dict[Node, str]:
        """Return the layers that quantization makes slower, with the slowdown in words.

        Args:
            graph: lowered.
            inputs: one tensor for each input of the graph; they determine the shapes of operands.
            weights: low-bit weights by layer name; None for quantized activations. Layers with another operand that is
                no constant are not timed.
            dynamic: names of layers that round their inputs at run time.
        """
        layers = [
            n for n in graph.nodes if (self._is_quantizable(n) if weights is None else _has_one_input(n, weights))
        ]
        ratios: dict[Any, float] = {}
        found: dict[Node, str] = {}
        for node, x in _record_inputs(graph, layers, inputs).items():
            weight, fused_reader = (weights or {}).get(node.name), self._find_fused_reader(node)
            widths = weight and (weight.bits, weight.block_size)
            fused = fused_reader and (fused_reader.op_type, repr(fused_reader.attrs))
            key = (node.op_type, repr(node.attrs), x.shape, widths, fused, *(_shape(v) for v in node.inputs[1:]))
            if key not in ratios:
                ratios[key] = self._measure_ratio(node, x, weight, is_dynamic=node.name in dynamic)
            if ratios[key] > MIN_SLOWDOWN:
                form = "quantized" if weight is None else f"with {weight.bits}-bit weights"
                found[node] = f"{self.target.name} runs it in {ratios[key]:.2f}x the time of float when {form}"
        return found

    def _find_fused_reader(self, node: Node) -> Node | None:
        """Return the only reader of a layer's result, if the runtime fuses it with the layer."""
        uses = [use.user for use in node.output.uses]
        (user,) = uses if len(uses) == 1 else (None,)
        return user if isinstance(user, Node) and is_fused(self.scheme, user.op_type, user.attrs) else None

    def _is_quantizable(self, node: Node) -> bool:
        if node.op.trait.kind != COMPUTE_TRAIT or node.op_type not in self.scheme.layers:
            return False
        return all(_is_weight(v) for v in node.inputs[1:] if v is not None)

    def _measure_ratio(self, node: Node, x: Tensor, weight: PackedWeight | None, *, is_dynamic: bool) -> float:
        """Return the ratio of the time of a layer, quantized or with a low-bit weight, to that in float."""
        kind = self.scheme.activations
        codes = (x / TIMING_QPARAMS.scale).round().clamp(kind.low, kind.high)
        integers = codes.to(torch.int8 if kind.is_signed else torch.uint8)
        given = integers if weight is None else x
        small, plain = self._layer_graph(node, given), self._layer_graph(node, x)
        if weight is not None:
            (layer,) = (n for n in small.nodes if n.op_type == node.op_type)
            pack = pack_dynamic_layer if is_dynamic else pack_layer_weight
            pack(small, layer, weight, self.operators)
        return _measure_ratio_of_graphs(self.target, small, [given], plain, [x])

    def _layer_graph(self, node: Node, x: Tensor) -> Graph:
        """Return a graph of one layer and its fused reader: in float, or quantized if the input ``x`` is."""
        graph, scale = Graph("layer"), (TIMING_QPARAMS.scale, TIMING_QPARAMS.zero_point)
        build = Builder(graph, self.operators)
        given, is_float = graph.add_input(TensorType(x.dtype, tuple(x.shape)), "x"), x.is_floating_point()
        read = given if is_float else build("dequantize", given, *scale)
        others = (v if v is None else build.constant(data_of(v), v.name) for v in node.inputs[1:])
        result = build(node.op, read, *others, **node.attrs)
        layer, behind = result.producer, self._find_fused_reader(node)
        if behind is not None:
            result = build(behind.op, result, *behind.inputs[1:], **behind.attrs)
        if not is_float:
            scales = compute_weight_scales(
                data_of(weight_of(node)), weight_scale_dim(node, self.scheme), self.scheme.weights
            )
            plan = Plan(self.scheme, {read.name: TIMING_QPARAMS}, {layer.name: scales})
            quantize_layer(graph, layer, plan, self.operators)
            if node.op_type in self.scheme.needs_quantized_output:
                result = build("quantize", result, *scale, **quantize_attributes(self.scheme.activations))
        graph.add_output(result)
        return graph


def _record_inputs(graph: Graph, layers: Sequence[Node], inputs: Sequence[Tensor]) -> dict[Node, Tensor]:
    """Return the input of each of some layers."""
    layer_inputs = {node.inputs[0] for node in layers}
    tensors: dict[Any, Tensor] = dict(zip(graph.inputs, inputs, strict=True))

    def observe(node: Node, results: tuple[Tensor, ...]) -> None:
        tensors.update((v, x) for v, x in zip(node.outputs, results, strict=True) if v in layer_inputs)

    compute_outputs(graph, inputs, observe)
    return {node: tensors[node.inputs[0]] for node in layers if node.inputs[0] in tensors}


def measure_ratio_to_float(
    graph: Graph, plan: Plan, target: Target, registry: Registry, inputs: Sequence[Tensor]
) -> float:
    """Return the ratio of the time of a whole graph with a plan to that in float.

    Args:
        graph: that of a module, before lowering.
        plan: the quantization plan.
        target: the target that runs both.
        registry: the operators and passes.
        inputs: one tensor for each input of the graph.

    Raises:
        ModelError: an adapter cannot follow the changes of a pass to its layer.
        TargetError: the target supports no format for the low-bit weights of the plan.
    """
    plain = quantize_for_target(graph, None, target, registry)
    small = quantize_for_target(graph, plan, target, registry)
    return _measure_ratio_of_graphs(target, small, inputs, plain, inputs)


def _measure_ratio_of_graphs(
    target: Target, one: Graph, given: Sequence[Tensor], other: Graph, given_other: Sequence[Tensor]
) -> float:
    """Return the ratio of the time of one lowered graph to that of another, by the fastest round of each.

    Other processes only add time: the least one varies less than the median, so that repeated decisions agree.
    """
    with compile_temporarily(one, target) as artifact, compile_temporarily(other, target) as artifact_of_other:
        runners = target.load(artifact), target.load(artifact_of_other)
        seconds, of_other = map(min, zip(*time_in_turns(runners[0], given, runners[1], given_other), strict=True))
        return seconds / of_other


def measure_seconds_and_ratio(
    one: Runner, given: Sequence[Tensor], other: Runner, given_other: Sequence[Tensor]
) -> tuple[float, float]:
    """Return the seconds of a call of one runner, and their ratio to those of another, by medians.

    They are called in turn, so that a slowdown of the machine affects both.

    Args:
        one: the runner to time.
        given: its inputs, one tensor for each.
        other: the runner to compare it with.
        given_other: the inputs of that one, one tensor for each.
    """
    pairs = time_in_turns(one, given, other, given_other)
    seconds, of_other = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
    return seconds, seconds / of_other


def time_in_turns(
    one: Runner, given: Sequence[Tensor], other: Runner, given_other: Sequence[Tensor], max_seconds: float = math.inf
) -> list[tuple[float, float]]:
    """Return the seconds of a call of two runners, one pair for each round.

    Args:
        one: the first runner.
        given: its inputs, one tensor for each.
        other: the second runner.
        given_other: the inputs of that one, one tensor for each.
        max_seconds: the time after which no further round starts; there is always one.
    """
    start = time.perf_counter()
    given, given_other = to_cpu(given), to_cpu(given_other)
    calls = _calls_per_round(one, given), _calls_per_round(other, given_other)
    pairs: list[tuple[float, float]] = []
    while not pairs or (len(pairs) < TIMING_ROUNDS and time.perf_counter() - start < max_seconds):
        pairs.append((_time_calls(one, given, calls[0]), _time_calls(other, given_other, calls[1])))
    return pairs


def _calls_per_round(runner: Runner, given: Sequence[Tensor]) -> int:
    """Return the number of calls that fill a round, without the first one, which allocates."""
    if _time_calls(runner, given, 1) > SECONDS_PER_LONG_CALL:
        return 1
    return max(1, round(SECONDS_PER_ROUND / max(_time_calls(runner, given, 1), 1e-6)))


def _time_calls(runner: Runner, given: Sequence[Tensor], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        runner(given)
    return (time.perf_counter() - start) / calls


def _has_one_input(node: Node, weights: Mapping[str, PackedWeight]) -> bool:
    """Return whether a layer has a low-bit weight, and its input is its only operand that is no constant."""
    return node.name in weights and all(v.is_constant for v in node.inputs[1:] if isinstance(v, Value))


def _is_weight(operand: Any) -> bool:
    return isinstance(operand, Value) and operand.is_constant and operand.type.dtype == torch.float32


def _shape(operand: Any) -> Any:
    return operand.type.shape if isinstance(operand, Value) else operand


def take_one_sample(graph: Graph, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the first sample of a batch, or the batch if its size is fixed, or the graph does not accept one."""
    first = [x[:1] if x.ndim else x for x in inputs]
    size = find_batch_size(graph.inputs)  # without a common one, an input may index another
    try:
        check_inputs(graph, first)
    except ModelError:
        return inputs
    return inputs if size is None or isinstance(size, int) else first
