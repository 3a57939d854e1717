"""Measure the operators between INT8 layers in INT8 and in float, for the tables of the target plugins."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import clika_ref_onnxruntime.target
import clika_ref_openvino.scheme
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clika_ref import clika_compile
from clika_ref.compiled.latency import time_in_turns
from clika_ref.compiled.lowering import lower
from clika_ref.core.artifacts import Artifact
from clika_ref.core.registry import Registry, load_registry
from clika_ref.core.targets import Target
from clika_ref.export.speed import use_threads
from clika_ref.quantization.calibration.calibrator import Calibration
from clika_ref.quantization.qdq.insertion import quantize_graph
from clika_ref.quantization.qdq.placement import choose_placement
from clika_ref.quantization.qdq.planning import Planner
from clika_ref.reporting.tables import print_table
from clika_ref.targets import cpu
from clika_ref.targets.island_table import write_measurement

SHAPES = ((64, 112), (16, 80), (64, 40), (128, 20))
"""Channels, and height and width, of the values between the layers."""

DEPTH = 3
"""Number of islands in a chain: the ends of the chain matter less."""

REPETITIONS = 3

TABLES: Mapping[str, str] = {
    "onnxruntime": "plugins/onnxruntime/clika_ref_onnxruntime/islands.toml",
    "openvino": "plugins/openvino/clika_ref_openvino/islands.toml",
}
"""Tables by target."""

ISLAND_CHOICES: Mapping[str, Callable[[Any, frozenset[str]], Target]] = {
    "onnxruntime": clika_ref_onnxruntime.target.keep_islands_in_float,
    "openvino": lambda target, in_float: replace(
        target, scheme=clika_ref_openvino.scheme.keep_islands_in_float(in_float)
    ),
}
"""Functions that leave operators in float, by target."""

ROOT = Path(__file__).parent.parent

Island = Callable[[Tensor, Tensor], Tensor]

ISLANDS: Mapping[str, Island] = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "cat": lambda x, y: torch.cat([x, y], 1),
    "sigmoid": lambda x, _: torch.sigmoid(x),
    "leaky_relu": lambda x, _: F.leaky_relu(x, 0.1),
    "avg_pool2d": lambda x, _: F.avg_pool2d(x, 2),
    "avg_pool2d, overlapping": lambda x, _: F.avg_pool2d(x, 3, 1, 1),
    "adaptive_avg_pool2d": lambda x, _: F.adaptive_avg_pool2d(x, 1),
    "max_pool2d": lambda x, _: F.max_pool2d(x, 3, 2, 1),
    "upsample_nearest2d": lambda x, _: F.interpolate(x, scale_factor=2.0)[..., ::2, ::2],
}
"""Functions of the results of two layers, by the operator that they contain, and its variant."""


class IslandChain(nn.Module):
    """Convolutions with an operator between them."""

    def __init__(self, island: Island, channels: int, *, joins: bool) -> None:
        super().__init__()
        self.firsts, self.seconds = (self._make_layers(channels, channels) for _ in range(2))
        self.lasts = self._make_layers(channels * (1 + joins), channels)
        self.island = island

    @staticmethod
    def _make_layers(channels: int, out: int) -> nn.ModuleList:
        return nn.ModuleList(nn.Conv2d(channels, out, 1) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of all layers."""
        for first, second, last in zip(self.firsts, self.seconds, self.lasts, strict=True):
            x = last(self.island(first(x), second(x)))
        return x


def run(write: bool = False) -> None:  # noqa: FBT001, FBT002 - typer makes a flag of it
    """Time each operator between INT8 layers, in INT8 and in float; --write stores the ratios in the plugins."""
    registry = load_registry()
    for name, path in TABLES.items():
        target = registry.targets[name]
        operators = dict.fromkeys(name.partition(",")[0] for name in ISLANDS)
        ratios = {op: ratio for op in operators if (ratio := measure_operator(op, target, registry)) is not None}
        measured = version(target.runtime)
        print_table(
            ("operator", "INT8 / float"),
            [(op, f"{ratio:.2f}x") for op, ratio in ratios.items()],
            title=f"{name} {measured} on {cpu.cpu_class()}, {cpu.cpu_name()}",
        )
        if write:
            write_measurement(ROOT / path, measured, cpu.cpu_class(), ratios)


def measure_operator(op: str, target: Target, registry: Registry) -> float | None:
    """Return the time with an operator in INT8, divided by that in float; None if there is no choice."""
    choose = ISLAND_CHOICES[target.name]
    in_int8, in_float = choose(target, frozenset()), choose(target, frozenset({op}))
    if in_int8.scheme == in_float.scheme:
        return None
    found = [
        _measure_shape(island, shape, in_int8, in_float, registry)
        for name, island in ISLANDS.items()
        if name.partition(",")[0] == op
        for shape in SHAPES
    ]
    print(op, ", ".join(f"{ratio:.2f}" for ratio in found))
    return math.exp(statistics.fmean(map(math.log, found)))


def _measure_shape(
    island: Island, shape: tuple[int, int], in_int8: Target, in_float: Target, registry: Registry
) -> float:
    channels, size = shape
    torch.manual_seed(0)
    joins = island is ISLANDS["cat"]
    module, x = IslandChain(island, channels, joins=joins).eval(), torch.randn(1, channels, size, size)
    with TemporaryDirectory() as folder, use_threads(1):
        runners = [
            target.load(_compile(module, x, target, registry, Path(folder) / f"{number}.onnx"))
            for number, target in enumerate((in_int8, in_float))
        ]
        ratios: list[float] = []
        for _ in range(REPETITIONS):
            pairs = time_in_turns(runners[0], [x], runners[1], [x])
            ratios.append(min(own for own, _ in pairs) / min(other for _, other in pairs))
    return statistics.median(ratios)


def _compile(module: nn.Module, x: Tensor, target: Target, registry: Registry, path: Path) -> Artifact:
    scheme = target.scheme
    assert scheme is not None
    graph = clika_compile(module, tracing_inputs=[x]).graph.clone()
    lower(graph, registry, target)
    calibration = Calibration(graph)
    calibration.add([x])
    placement = choose_placement(graph, scheme, calibration.table.has_range, {})
    quantize_graph(graph, Planner(calibration.table, scheme).plan(placement, "min-max"), registry.operators)
    graph.drop_unused_constants()
    return target.compile(graph, path)
