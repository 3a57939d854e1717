"""Latency in the runtime of a target: of whole files, and of layers that would be slower quantized than in float."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.execution import interpret
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.registry import Registry
from clika_ref.core.targets import Artifact, Runner, Target
from clika_ref.core.types import TensorType
from clika_ref.exporting.configuration import ExportConfiguration
from clika_ref.exporting.export import as_written
from clika_ref.exporting.running import on_cpu
from clika_ref.quantization.compressing import Compressed, compress_layer
from clika_ref.quantization.layer_weights import numbers_of, scaled_side, weight_of
from clika_ref.quantization.placement import COMPUTE
from clika_ref.quantization.quantizing import Plan, attributes_of, quantize_layer
from clika_ref.quantization.scales import Scale, weight_scales
from clika_ref.quantization_scheme import QuantizationScheme, absorbs
from clika_ref.simulation import quantized_graph

ROUNDS = 9
"""Number of rounds: each times float and quantized in turn, so that a slowdown of the machine affects both."""

ROUND_SECONDS = 2e-3
"""Time for which each is called in a round, for a sufficient resolution of the clock."""

SLOWER = 1.05
"""Ratio of medians above which a layer counts as slower; smaller ones are noise of the machine."""

ANY_SCALE = Scale(2.0**-5, 0)
"""Scale of inputs and outputs of timed layers; kernels take the same time with any scale."""


@dataclass
class LayerTimer:
    """Times layers of a graph one by one, in float and quantized; equal layers are timed once."""

    target: Target
    scheme: QuantizationScheme
    operators: Mapping[str, Operator]

    def slower(
        self, graph: Graph, inputs: Sequence[Tensor], held: Mapping[str, Compressed] | None = None
    ) -> dict[Node, str]:
        """Return the layers that quantization makes slower, with the slowdown in words.

        Args:
            graph: lowered.
            inputs: of the graph; they determine the sizes of operands.
            held: low-bit weights by layer name; None for quantized activations. Layers with another operand that is no
                constant are not timed.
        """
        layers = [n for n in graph.nodes if (self._may_be_integers(n) if held is None else _reads_one(n, held))]
        ratios: dict[Any, float] = {}
        found: dict[Node, str] = {}
        for node, x in _read(graph, layers, inputs).items():
            few, behind = (held or {}).get(node.name), self._behind(node)
            widths = few and (few.bits, few.block_size)
            after = behind and (behind.kind, repr(behind.attrs))
            key = (node.kind, repr(node.attrs), x.shape, widths, after, *(_shape(v) for v in node.inputs[1:]))
            if key not in ratios:
                ratios[key] = self._ratio(node, x, few)
            if ratios[key] > SLOWER:
                small = "in integers" if few is None else f"with weights of {few.bits} bits"
                found[node] = f"{self.target.name} takes {ratios[key]:.2f} times as long for it {small} as in float"
        return found

    def _behind(self, node: Node) -> Node | None:
        """Return the only reader of a layer's result, if the runtime fuses it with the layer."""
        uses = [use.user for use in node.output.uses]
        (user,) = uses if len(uses) == 1 else (None,)
        return user if isinstance(user, Node) and absorbs(self.scheme, user.kind, user.attrs) else None

    def _may_be_integers(self, node: Node) -> bool:
        if node.op.trait.kind != COMPUTE or node.kind not in self.scheme.layers:
            return False
        return all(_is_weight(v) for v in node.inputs[1:] if v is not None)

    def _ratio(self, node: Node, x: Tensor, held: Compressed | None) -> float:
        """Return the ratio of the time of a layer, quantized or with a low-bit weight, to that in float."""
        kind = self.scheme.activations
        codes = (x / ANY_SCALE.scale).round().clamp(kind.low, kind.high)
        integers = codes.to(torch.int8 if kind.is_signed else torch.uint8)
        plain = self._graph(node, x, None)
        with tempfile.TemporaryDirectory() as folder:
            whole = self._runner(plain, Path(folder) / "float")
            if held is not None:
                (layer,) = (n for n in plain.nodes if n.kind == node.kind)
                compress_layer(plain, layer, held, self.operators)
                return ratio_of_medians(self._runner(plain, Path(folder) / "few"), [x], whole, [x])
            small = self._runner(self._graph(node, x, integers), Path(folder) / "integers")
            return ratio_of_medians(small, [integers], whole, [x])

    def _runner(self, graph: Graph, path: Path) -> Runner:
        return self.target.load(self.target.compile(graph, path))

    def _graph(self, node: Node, x: Tensor, integers: Tensor | None) -> Graph:
        """Return a graph of one layer and its fused reader, in float or, if ``integers`` are given, quantized."""
        graph = Graph("layer")
        build = Builder(graph, self.operators)
        given = graph.add_input(TensorType(*((x.dtype, tuple(x.shape)) if integers is None else _type(integers))), "x")
        read = given if integers is None else build("dequantize", given, *_numbers())
        others = (v if v is None else build.constant(numbers_of(v), v.name) for v in node.inputs[1:])
        result = build(node.op, read, *others, **node.attrs)
        layer, behind = result.producer, self._behind(node)
        if behind is not None:
            result = build(behind.op, result, *behind.inputs[1:], **behind.attrs)
        if integers is not None:
            scales = weight_scales(numbers_of(weight_of(node)), scaled_side(node, self.scheme), self.scheme.weights)
            plan = Plan(self.scheme, {read.name: ANY_SCALE}, {layer.name: scales})
            quantize_layer(graph, layer, plan, self.operators)
            if node.kind in self.scheme.closed:
                result = build("quantize", result, *_numbers(), **attributes_of(self.scheme.activations))
        graph.add_output(result)
        return graph


def _read(graph: Graph, layers: Sequence[Node], inputs: Sequence[Tensor]) -> dict[Node, Tensor]:
    """Return the input of each of some layers."""
    wanted = {node.inputs[0] for node in layers}
    held: dict[Any, Tensor] = dict(zip(graph.inputs, inputs, strict=True))

    def observe(node: Node, results: tuple[Tensor, ...]) -> None:
        held.update((v, x) for v, x in zip(node.outputs, results, strict=True) if v in wanted)

    with torch.no_grad():
        interpret(graph, inputs, observe)
    return {node: held[node.inputs[0]] for node in layers if node.inputs[0] in held}


def profiler_of(target: Target) -> Callable[[Artifact, Sequence[Tensor]], Mapping[str, float]] | None:
    """Return the target's function that times each node of an artifact (`Target`); None if it has none."""
    return getattr(target, "profile", None)


def ratio_to_float(graph: Graph, plan: Plan, target: Target, registry: Registry, inputs: Sequence[Tensor]) -> float:
    """Return the ratio of the time of a whole graph with a plan to that in float."""
    plain = as_written(graph, None, target, registry, ExportConfiguration())
    small = quantized_graph(graph, plan, target, registry)
    with tempfile.TemporaryDirectory() as folder:
        one, other = (
            target.load(target.compile(g, Path(folder) / name)) for g, name in ((small, "integers"), (plain, "float"))
        )
        return ratio_of_medians(one, inputs, other, inputs)


def ratio_of_medians(one: Runner, given: Sequence[Tensor], other: Runner, given_other: Sequence[Tensor]) -> float:
    """Return the ratio of the time of one runner to that of another: see `seconds_and_ratio`."""
    return seconds_and_ratio(one, given, other, given_other)[1]


def seconds_and_ratio(
    one: Runner, given: Sequence[Tensor], other: Runner, given_other: Sequence[Tensor]
) -> tuple[float, float]:
    """Return the seconds of a call of one runner, and their ratio to those of another, by medians.

    Each has its own inputs, and they are called in turn.
    """
    given, given_other = on_cpu(given), on_cpu(given_other)
    calls = [_calls(one, given), _calls(other, given_other)]
    times = [[_seconds(one, given, calls[0]), _seconds(other, given_other, calls[1])] for _ in range(ROUNDS)]
    seconds, of_other = (statistics.median(t[i] for t in times) for i in (0, 1))
    return seconds, seconds / of_other


def _calls(runner: Runner, given: Sequence[Tensor]) -> int:
    """Return the number of calls that fill a round, without the first one, which allocates."""
    runner(given)
    return max(1, round(ROUND_SECONDS / max(_seconds(runner, given, 1), 1e-6)))


def _seconds(runner: Runner, given: Sequence[Tensor], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        runner(given)
    return (time.perf_counter() - start) / calls


def _numbers() -> tuple[float, int]:
    return ANY_SCALE.scale, ANY_SCALE.zero_point


def _type(x: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return x.dtype, tuple(x.shape)


def _reads_one(node: Node, held: Mapping[str, Compressed]) -> bool:
    """Return whether a layer has a low-bit weight, and its input is its only operand that is no constant."""
    return node.name in held and all(v.is_constant for v in node.inputs[1:] if isinstance(v, Value))


def _is_weight(operand: Any) -> bool:
    return isinstance(operand, Value) and operand.is_constant and operand.type.dtype == torch.float32


def _shape(operand: Any) -> Any:
    return operand.type.shape if isinstance(operand, Value) else operand
