"""Quantize each subject with every method, measure the files in turn, and print tables and limits."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measuring import Names, median_ratio, run_in_fresh_process
from benchmarks.ptq.runtimes import (
    CLIKA_REF,
    CLIKA_REF_FOR_LATENCY,
    FLOAT,
    RUNTIMES,
    TRACE_AND_FORWARD,
    list_peers,
)
from clika_ref.reporting.tables import print_table

DIGITS = tuple(f"digits-{network}-{seed}" for network in ("conv", "depthwise") for seed in range(3))
VISION = ("resnet18", "mobilenet_v3_large", "vit_b_16")
ENCODER = "encoder"
SENSITIVITY_SUBJECTS = ("resnet18", ENCODER)
"""Subjects with measured sensitivities, in ONNX Runtime only."""
LATENCY_SUBJECTS = (*DIGITS, "mobilenet_v3_large")
"""Subjects that are also quantized for latency: with the default, their files may be slower than float."""
NAMES = {"onnxruntime": (*VISION, ENCODER, *DIGITS), "openvino": (*VISION, "swin_t", ENCODER, *DIGITS)}

EXPORT_COLUMNS = ("method", "seconds", f"/ {TRACE_AND_FORWARD}", "whole process", "peak memory", "file")
LATENCY_COLUMNS = (
    "method",
    "latency",
    f"/ {FLOAT}",
    "default threads",
    "median SQNR",
    "SQNR of sums",
    "same decisions",
    "cosine",
    "errors",
)


@dataclass(frozen=True)
class SubjectMeasurements:
    """The measurements of one subject, by method."""

    runtime: str
    seconds: Mapping[str, Sequence[float]]
    """From module to file, for each round."""
    process_seconds: Mapping[str, Sequence[float]]
    """Of the whole process, which also imports torch and loads the model, for each round."""
    peak: Mapping[str, int]
    bytes: Mapping[str, int]
    latency: Mapping[str, Sequence[float]]
    """Of one sample on one thread, for each round."""
    threaded_latency: Mapping[str, Sequence[float]]
    """Of one sample on the default number of threads, for each round."""
    accuracy: Mapping[str, Mapping[str, float]]
    sensitivities: Mapping[str, Any] | None
    """Estimates compared with measurements, for ``SENSITIVITY_SUBJECTS``."""
    precision: Mapping[str, float]
    """Planned and real precision of clika-ref's file."""
    decisions: str
    """The decisions that are compared: a name in `benchmarks.ptq.decisions.DECISIONS`."""

    @property
    def peers(self) -> list[str]:
        """The peers that wrote a file."""
        return [name for name in list_peers(self.runtime) if name in self.accuracy]

    def compute_median_seconds(self, method: str) -> float:
        """Return the median seconds from module to file."""
        return statistics.median(self.seconds[method])

    def compute_speedup(self, method: str) -> float:
        """Return the speedup of a file relative to float."""
        return 1 / self.compute_latency_ratio(method, FLOAT)

    def compute_latency_ratio(self, method: str, other: str) -> float:
        """Return the median ratio of the latencies of two files, measured in turn."""
        return median_ratio(self.latency[method], self.latency[other])

    def compute_latency_bound(self, other: str, method: str = CLIKA_REF) -> float:
        """Return the upper 95 % bound for the median ratio of two latencies, an order statistic."""
        ratios = sorted(a / b for a, b in zip(self.latency[method], self.latency[other], strict=True))
        index = round((len(ratios) - 1) / 2 + 0.98 * math.sqrt(len(ratios)))
        return ratios[min(index, len(ratios) - 1)]


def run(names: Names = None, rounds: int = 3, calls: int = 40, runtime: str = "onnxruntime") -> None:
    """Compare quantization with ONNX Runtime and NNCF: time, memory, latency, size and accuracy.

    Files run in onnxruntime, or with --runtime openvino in OpenVINO.
    """
    _print_limits(compare_methods(list(names or NAMES[runtime]), rounds, calls, runtime))


def compare_methods(names: Sequence[str], rounds: int, calls: int, runtime: str) -> dict[str, SubjectMeasurements]:
    """Measure all methods for each subject, and print two tables for each."""
    results: dict[str, SubjectMeasurements] = {}
    for name in names:
        results[name] = found = _measure_subject(name, rounds, calls, runtime)
        export_title = f"{name}: module to file, in turn, each in a fresh process"
        print_table(EXPORT_COLUMNS, _make_export_rows(found), title=export_title)
        latency_title = f"{name}: in {runtime}, one sample, one thread, in turn; decisions: {found.decisions}"
        print_table(LATENCY_COLUMNS, _make_latency_rows(found), title=latency_title)
    return results


def _measure_subject(name: str, rounds: int, calls: int, runtime: str) -> SubjectMeasurements:
    with TemporaryDirectory() as folder:
        run_in_fresh_process("benchmarks.ptq.subjects", name, folder)
        exports: dict[str, list[Any]] = {}
        methods = [
            method
            for method in RUNTIMES[runtime].methods
            if method != CLIKA_REF_FOR_LATENCY or name in LATENCY_SUBJECTS
        ]
        for _ in range(rounds):
            for method in methods:
                if method not in exports or exports[method]:
                    exports.setdefault(method, []).extend(_measure_export(name, runtime, method, folder))
        exports = {method: measured for method, measured in exports.items() if measured}
        files = [method for method in exports if method != TRACE_AND_FORWARD]
        evaluated = run_in_fresh_process("benchmarks.ptq.evaluation", runtime, folder, str(calls), *files)
        has_sensitivities = name in SENSITIVITY_SUBJECTS and runtime == "onnxruntime"
        sensitivities = run_in_fresh_process("benchmarks.ptq.sensitivities", folder) if has_sensitivities else None
    return SubjectMeasurements(
        runtime,
        {method: [m["seconds"] for m in measured] for method, measured in exports.items()},
        {method: [m["process"] for m in measured] for method, measured in exports.items()},
        {method: min(m["peak"] for m in measured) for method, measured in exports.items()},
        {method: exports[method][0]["bytes"] for method in files},
        evaluated["latency"],
        evaluated["threaded latency"],
        evaluated["accuracy"],
        sensitivities,
        evaluated["precision"],
        evaluated["decisions"],
    )


def _measure_export(name: str, runtime: str, method: str, folder: str) -> list[Any]:
    """Return the measurement of one export. If a peer fails, print its error and return nothing."""
    try:
        arguments, start = (runtime, method, folder), time.perf_counter()
        found = run_in_fresh_process("benchmarks.ptq.export_measurement", *arguments, on_one_thread=False)
        return [{**found, "process": time.perf_counter() - start}]
    except RuntimeError as error:
        if method not in list_peers(runtime):
            raise
        print(f"{name}: {method} failed: {str(error).splitlines()[-1]}")
        return []


def _make_export_rows(found: SubjectMeasurements) -> list[tuple[Any, ...]]:
    lower_bound = found.compute_median_seconds(TRACE_AND_FORWARD)
    return [
        (
            method,
            f"{found.compute_median_seconds(method):.2f} s",
            f"{found.compute_median_seconds(method) / lower_bound:.2f}",
            f"{statistics.median(found.process_seconds[method]):.2f} s",
            f"{found.peak[method] / 1e6:,.0f} MB",
            f"{found.bytes[method] / 1e6:.1f} MB" if method in found.bytes else "",
        )
        for method in found.seconds
    ]


def _make_latency_rows(found: SubjectMeasurements) -> list[tuple[Any, ...]]:
    return [
        (
            method,
            f"{statistics.median(found.latency[method]) * 1e3:.2f} ms",
            f"{found.compute_latency_ratio(method, FLOAT):.2f}",
            f"{statistics.median(found.threaded_latency[method]) * 1e3:.2f} ms",
            f"{accuracy['median sqnr']:.1f} dB",
            f"{accuracy['sqnr']:.1f} dB",
            f"{accuracy['decisions']:.1%}",
            f"{accuracy['cosine']:.4f}, min {accuracy['min cosine']:.4f}",
            accuracy.get("errors", ""),
        )
        for method, accuracy in found.accuracy.items()
    ]


def _print_limits(results: Mapping[str, SubjectMeasurements]) -> None:
    for name in (*VISION, "swin_t"):
        if name in results and results[name].peers:
            _print_export_limits(name, results[name])
    for name, found in results.items():
        _print_latency_limits(name, found)
    for name in ("resnet18", ENCODER):
        if name in results and results[name].runtime == "onnxruntime":
            print_limit(f"{name}: speedup", results[name].compute_speedup(CLIKA_REF), 3)
    if ENCODER in results:
        accuracy = results[ENCODER].accuracy[CLIKA_REF]
        print_limit(f"{ENCODER}: mean cosine", accuracy["cosine"], 0.998)
        print_limit(f"{ENCODER}: share with the same nearest neighbour", accuracy["decisions"], 0.95)
    for name, found in results.items():
        if found.sensitivities is not None:
            _print_sensitivity_limits(name, found.sensitivities)
        if name not in DIGITS:
            print_limit(f"{name}: share of MACs planned in INT8", found.precision["planned"], 0.95)
            print_limit(f"{name}: share of planned layers that run in INT8", found.precision["in INT8"], 1)
    _print_digits_limits(results)


def _print_latency_limits(name: str, found: SubjectMeasurements) -> None:
    for method in (CLIKA_REF, CLIKA_REF_FOR_LATENCY):
        if method in found.latency:
            label = f"{name}: latency of {method} to {FLOAT}, upper 95 % bound"
            print_limit(label, found.compute_latency_bound(FLOAT, method), 1.05, is_upper_limit=True)
    if not found.peers:  # none is installed; `_measure_export` printed the errors
        return
    fastest = max(found.peers, key=found.compute_speedup)
    label = f"{name}: latency to the fastest peer, {fastest}, upper 95 % bound"
    limit = RUNTIMES[found.runtime].max_peer_ratio
    print_limit(label, found.compute_latency_bound(fastest), limit, is_upper_limit=True)


def _print_export_limits(name: str, found: SubjectMeasurements) -> None:
    seconds = found.compute_median_seconds(CLIKA_REF)
    peer_ratio = seconds / min(map(found.compute_median_seconds, found.peers))
    trace_ratio = seconds / found.compute_median_seconds(TRACE_AND_FORWARD)
    print_limit(f"{name}: seconds to the fastest peer", peer_ratio, 1, is_upper_limit=True)
    print_limit(f"{name}: seconds to {TRACE_AND_FORWARD}", trace_ratio, 3, is_upper_limit=True)
    memory_ratio = found.peak[CLIKA_REF] / min(found.peak[peer] for peer in found.peers)
    print_limit(f"{name}: peak memory to the lowest of a peer", memory_ratio, 1.03, is_upper_limit=True)
    best = max(found.accuracy[peer]["sqnr"] for peer in found.peers)
    print_limit(f"{name}: dB above the best peer", found.accuracy[CLIKA_REF]["sqnr"] - best, 3)


def _print_sensitivity_limits(name: str, sensitivities: Mapping[str, Any]) -> None:
    print_limit(f"{name}: rank correlation of estimated and measured sensitivities", sensitivities["spearman"], 0.9)
    for layers, predicted, measured in sensitivities["predictions"]:
        print(f"{name}: SQNR with {layers} quantized layers: {predicted:.1f} dB predicted, {measured:.1f} dB measured")
    largest = max(abs(predicted - measured) for _, predicted, measured in sensitivities["predictions"])
    print_limit(f"{name}: dB between predicted and measured SQNR", largest, 1, is_upper_limit=True)


def _print_digits_limits(results: Mapping[str, SubjectMeasurements]) -> None:
    for network in ("conv", "depthwise"):
        seeds = [found.accuracy for name, found in results.items() if name.startswith(f"digits-{network}")]
        if seeds:
            more_errors = statistics.mean(by[CLIKA_REF]["errors"] - by[FLOAT]["errors"] for by in seeds)
            label = f"digits-{network}: additional errors to {FLOAT}, mean of {len(seeds)} seeds"
            print_limit(label, more_errors, 1, is_upper_limit=True)


def print_limit(label: str, value: float, limit: float, *, is_upper_limit: bool = False) -> None:
    """Print a figure with its limit, and whether it is met."""
    is_met = value <= limit if is_upper_limit else value >= limit
    print(
        f"{label}: {value:.3f}, at {'most' if is_upper_limit else 'least'} {limit:g}: {'met' if is_met else 'NOT MET'}"
    )
