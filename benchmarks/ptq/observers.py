"""Compare the default observer with each single one: on calibrated, varying, and twice as large inputs."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.measuring import Names, run_in_fresh_process
from benchmarks.ptq.evaluation import compare_outputs
from benchmarks.ptq.subjects import SUBJECTS, Batch, PreparedSubject, Subject
from clika_ref import ClikaCompileOptions, DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, stages
from clika_ref.core.ir import Graph
from clika_ref.quantization.calibration.observers import OBSERVERS
from clika_ref.quantization.graph_runs import run_graph
from clika_ref.quantization.qdq.insertion import quantize_graph
from clika_ref.reporting.tables import print_table

# isort: split
import torch
from torch import nn

MAX_LOSS = 2.0
"""Limit of the decibels that the default loses to the best single observer (issue 39)."""

MIN_LOUDNESS, MAX_LOUDNESS = 0.5, 2.0
"""Range of the factors of samples of varying loudness or contrast."""

LARGE_FACTOR = 2.0
"""Factor of inputs outside of the calibrated range."""

MAX_TEST_SAMPLES = 96

CONDITIONS = ("as calibrated", "varying", "twice as large")

METRICS = {"median sqnr": "median over samples", "sqnr": "over all samples"}
"""Keys of `compare_outputs`, and their names in the table."""


def _make_contrast_subject(seed: int, batch_size: int) -> Subject:
    """A random convolutional network on images of different contrast."""

    def draw(count: int, first_seed: int, batch: int) -> list[Batch]:
        torch.manual_seed(first_seed + seed)
        images = torch.randn(count, 3, 24, 24) * _draw_loudness(count, 4)
        return [{"input": part} for part in images.split(batch)]

    def make() -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(
            *(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 7)),
        ).eval()

    return Subject(make, lambda: draw(32 * batch_size, 100, batch_size), lambda: draw(256, 200, 64))


def _make_loudness_subject(seed: int) -> Subject:
    """A random convolutional network on noisy tones of different loudness, two in each batch."""

    def draw(count: int, first_seed: int, batch: int) -> list[Batch]:
        torch.manual_seed(first_seed + seed)
        time, pitch = torch.linspace(0, 1, 1024), torch.empty(count, 1, 1).uniform_(20, 200)
        tones = torch.sin(6.2832 * pitch * time) + 0.1 * torch.randn(count, 1, 1024)
        return [{"input": part} for part in (tones * _draw_loudness(count, 3)).split(batch)]

    def make() -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(
            *(nn.Conv1d(1, 16, 16, 4), nn.GELU(), nn.Conv1d(16, 32, 8, 4), nn.GELU(), nn.Conv1d(32, 32, 4, 2)),
            *(nn.GELU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 10)),
        ).eval()

    return Subject(make, lambda: draw(64, 100, 2), lambda: draw(256, 200, 64))


def _draw_loudness(count: int, rank: int) -> torch.Tensor:
    return torch.empty(count, *[1] * (rank - 1)).uniform_(MIN_LOUDNESS, MAX_LOUDNESS)


VARYING_SUBJECTS: Mapping[str, Callable[[], Subject]] = {
    **{
        f"contrast-{seed}, batch {size}": functools.partial(_make_contrast_subject, seed, size)
        for seed in range(4)
        for size in (1, 8)
    },
    **{f"loudness-{seed}": functools.partial(_make_loudness_subject, seed) for seed in range(2)},
}
"""Subjects whose own data varies in loudness or contrast."""

FAST_SUBJECTS = (*VARYING_SUBJECTS, "digits-conv-0", "digits-depthwise-0", "o-net", "crepe, tiny", "speakers")

DEFAULT_SUBJECTS = (*FAST_SUBJECTS, "lite0", "encoder", "conformer, 50 frames")


def scale_batches(batches: Sequence[Batch], seed: int | None) -> list[Batch]:
    """Return batches with each sample at a random loudness, or all at `LARGE_FACTOR` without a seed."""
    if seed is not None:
        torch.manual_seed(seed)
    found: list[Batch] = []
    for batch in batches:
        count = len(next(iter(batch.values())))
        loudness = torch.full((count,), LARGE_FACTOR) if seed is None else _draw_loudness(count, 1)
        found.append(
            {
                name: x * loudness.reshape(-1, *[1] * (x.ndim - 1)) if x.is_floating_point() else x
                for name, x in batch.items()
            }
        )
    return found


def _take_samples(batches: Sequence[Batch], count: int) -> list[Batch]:
    """Return batches with this many samples, at equal distances: data is often sorted by its source."""
    kept = max(count // len(next(iter(batches[0].values()))), 1)
    return list(batches[:: max(len(batches) // kept, 1)][:kept])


def _calibrate(model: nn.Module, batches: Sequence[Batch]) -> stages.QuantizationPipeline:
    """Return the pipeline of a calibrated model, with the defaults for ONNX Runtime."""
    registry, log, callee = stages.load_registry(), stages.CompilationLog(), stages.make_callable(model)
    first = batches[0]
    single, double = ({n: f(x) for n, x in first.items()} for f in (lambda x: x[:1], lambda x: torch.cat([x, x])))
    calls = stages.make_calls(callee, [single, double, batches[1]])  # other sizes make dims dynamic
    graph = stages.capture(callee, calls, registry, fallback=stages.torchlib_operator).graph
    stages.clean_graph(graph, registry)
    target = stages.target_for(DeploymentSettings_ONNXRuntime_ONNX(), registry)
    request = stages.QuantizationRequest(target, QuantizationSettings())
    calibration = stages.prepare_calibration(graph, request, registry)
    inputs = [[batch[value.name] for value in graph.inputs] for batch in batches]
    return stages.calibrate_graph(calibration, inputs, request, registry, log, model=graph)


def _quantize(pipeline: stages.QuantizationPipeline, observer: str) -> Graph:
    """Return the lowered graph, quantized with an observer; all other options are the defaults."""
    found = replace(pipeline, options=ClikaCompileOptions(observer=observer)).decide()
    twin = pipeline.calibration.graph.clone()
    quantize_graph(twin, found.plan, pipeline.operators)
    return twin


@torch.no_grad()
def _run(graph: Graph, batches: Sequence[Batch]) -> list[np.ndarray]:
    """Return each output for all samples."""
    found = [run_graph(graph, [batch[value.name] for value in graph.inputs]) for batch in batches]
    return [torch.cat(parts).numpy() for parts in zip(*found, strict=True)]


def main(name: str, *observers: str) -> dict[str, dict[str, dict[str, float]]]:
    """Return the decibels of each observer and condition for one subject, in this process."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    subject = {**SUBJECTS, **VARYING_SUBJECTS}[name]()
    model, calibration = subject.make(), subject.calibration()
    test = subject.test() if name in VARYING_SUBJECTS else _take_samples(subject.test(), MAX_TEST_SAMPLES)
    prepared = PreparedSubject(model, calibration, test, decisions=subject.decisions)
    given = [(calibration, {"as calibrated": test})]
    if all(x.is_floating_point() for x in test[0].values()):
        given[0][1]["twice as large"] = scale_batches(test, None)
        if name not in VARYING_SUBJECTS:
            given.append((scale_batches(calibration, 1), {"varying": scale_batches(test, 2)}))
    found: dict[str, dict[str, dict[str, float]]] = {}
    for batches, tests in given:
        pipeline = _calibrate(model, batches)
        exact = {condition: _run(pipeline.calibration.graph, data) for condition, data in tests.items()}
        for observer in observers or ("auto", *OBSERVERS):
            quantized = _quantize(pipeline, observer)
            for condition, data in tests.items():
                compared = compare_outputs(_run(quantized, data), exact[condition], prepared)
                found.setdefault(condition, {})[observer] = compared
    return found


def run(names: Names = None) -> None:
    """Compare the default observer with every single one: median and overall decibels, and the loss to the best."""
    rows: list[tuple[object, ...]] = []
    worst = dict.fromkeys(METRICS, 0.0)
    for name in names or DEFAULT_SUBJECTS:
        for condition, by_observer in run_in_fresh_process("benchmarks.ptq.observers", name).items():
            for metric, label in METRICS.items():
                default, *single = (by_observer[observer][metric] for observer in ("auto", *OBSERVERS))
                loss = max(single) - default
                worst[metric] = max(worst[metric], loss)
                figures = (f"{x:.1f}" for x in (default, *single))
                rows.append((name, condition, label, *figures, f"{loss:.1f}", "" if loss <= MAX_LOSS else "NOT MET"))
    columns = ("network", "data", "dB", "auto", *OBSERVERS, "loss", f"limit {MAX_LOSS:g}")
    print_table(columns, rows, title="Decibels of the default observer and of every single one")
    for metric, label in METRICS.items():
        print(f"largest loss, {label}: {worst[metric]:.1f} dB, limit {MAX_LOSS:g}")
