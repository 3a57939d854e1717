"""Quantize each subject on every road, judge the files side by side, and print the tables and the figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measuring import Names, median_ratio, run_in_fresh_process
from benchmarks.ptq.runtimes import CLIKA_REF_LATENCY_METHOD, CLIKA_REF_METHOD, RUNTIMES, peers_of
from clika_ref.reporting.tables import print_table

DIGITS = tuple(f"digits-{kind}-{seed}" for kind in ("conv", "depthwise") for seed in range(3))
VISION = ("resnet18", "mobilenet_v3_large", "vit_b_16")
ENCODER = "encoder"
SENSITIVITY_SUBJECTS = ("resnet18", ENCODER)
"""Of which each layer is also quantized alone, in ONNX Runtime."""
TIMED = (*DIGITS, "mobilenet_v3_large")
"""Which are quantized for latency, too: where `optimize_for="size"` may leave a file slower than float."""
NAMES = {"onnxruntime": (*VISION, ENCODER, *DIGITS), "openvino": (*VISION, "swin_t", ENCODER, *DIGITS)}

EXPORT_COLUMNS = ("road", "seconds", "/floor", "peak", "file")
LATENCY_COLUMNS = (
    "road",
    "latency",
    "times faster than fp32",
    "centred SQNR",
    "top-1 agreement",
    "cosine",
    "neighbours",
    "errors",
)


@dataclass(frozen=True)
class Found:
    """What was measured of one subject, by road."""

    runtime: str
    seconds: Mapping[str, Sequence[float]]
    peak: Mapping[str, int]
    bytes: Mapping[str, int]
    latency: Mapping[str, Sequence[float]]
    judged: Mapping[str, Mapping[str, float]]
    sensitivities: Mapping[str, Any] | None
    """How far sensitivities hold, of the subjects for which that is asked."""
    explained: Mapping[str, float]
    """What the runtime makes of ours."""

    @property
    def peers(self) -> list[str]:
        """The peers that made a file that runs."""
        return [name for name in peers_of(self.runtime) if name in self.judged]

    def median(self, method: str) -> float:
        """Return the seconds from module to file."""
        return statistics.median(self.seconds[method])

    def faster(self, method: str) -> float:
        """Return how many times faster than fp32 a file is."""
        return 1 / median_ratio(self.latency[method], self.latency["fp32"])


def run(names: Names = None, rounds: int = 3, calls: int = 40, runtime: str = "onnxruntime") -> None:
    """Quantization against onnxruntime's and NNCF's: time, memory, latency, size and accuracy; not part of all.

    In onnxruntime, or with --runtime openvino in OpenVINO.
    """
    every: dict[str, Found] = {}
    for name in names or NAMES[runtime]:
        every[name] = found = _measure(name, rounds, calls, runtime)
        print_table(
            EXPORT_COLUMNS, _making_rows(found), title=f"{name}: module to file, in turn, each in a fresh process"
        )
        print_table(
            LATENCY_COLUMNS, _running_rows(found), title=f"{name}: in {runtime}, one thread, one sample, in turn"
        )
    _print_figures(every)


def _measure(name: str, rounds: int, calls: int, runtime: str) -> Found:
    with TemporaryDirectory() as folder:
        run_in_fresh_process("benchmarks.ptq.subjects", name, folder)
        made: dict[str, list[Any]] = {}
        methods = [
            method for method in RUNTIMES[runtime].methods if method != CLIKA_REF_LATENCY_METHOD or name in TIMED
        ]
        for _ in range(rounds):
            for method in methods:
                if method not in made or made[method]:
                    made.setdefault(method, []).extend(_export_model(name, runtime, method, folder))
        whole = [method for method in made if made[method] and method != "floor"]
        judged = run_in_fresh_process("benchmarks.ptq.judging", runtime, folder, str(calls), *whole)
        has_sensitivities = name in SENSITIVITY_SUBJECTS and runtime == "onnxruntime"
        sensitivities = run_in_fresh_process("benchmarks.ptq.sensitivities", folder) if has_sensitivities else None
    return Found(
        runtime,
        {method: [m["seconds"] for m in made[method]] for method in made if made[method]},
        {method: min(m["peak"] for m in made[method]) for method in made if made[method]},
        {method: made[method][0]["bytes"] for method in whole},
        judged["latency"],
        judged["judged"],
        sensitivities,
        judged["explained"],
    )


def _export_model(name: str, runtime: str, method: str, folder: str) -> list[Any]:
    """Return what one walk down a road took; nothing where a peer fails, which is said."""
    try:
        return [run_in_fresh_process("benchmarks.ptq.making", runtime, method, folder, on_one_thread=False)]
    except RuntimeError as error:
        if method not in peers_of(runtime):
            raise
        print(f"{name}: {method} makes no file: {str(error).splitlines()[-1]}")
        return []


def _making_rows(found: Found) -> list[tuple[Any, ...]]:
    floor = found.median("floor")
    return [
        (
            method,
            f"{found.median(method):.2f} s",
            f"{found.median(method) / floor:.2f}",
            f"{found.peak[method] / 1e6:,.0f} MB",
            f"{found.bytes[method] / 1e6:.1f} MB" if method in found.bytes else "",
        )
        for method in found.seconds
    ]


def _running_rows(found: Found) -> list[tuple[Any, ...]]:
    return [
        (
            method,
            f"{statistics.median(found.latency[method]) * 1e3:.2f} ms",
            f"{found.faster(method):.2f}",
            f"{judged['sqnr']:.1f} dB",
            f"{judged['agreement']:.1%}",
            f"{judged['cosine']:.4f}, least {judged['least cosine']:.4f}",
            f"{judged['neighbours']:.1%}",
            judged.get("errors", ""),
        )
        for method, judged in found.judged.items()
    ]


def _print_figures(every: Mapping[str, Found]) -> None:
    for name in (*VISION, "swin_t"):
        if name in every:
            _print_making(name, every[name])
            best = max(every[name].judged[peer]["sqnr"] for peer in every[name].peers)
            _print(f"{name}: dB above the best peer", every[name].judged["ours"]["sqnr"] - best, 3)
    for name, found in every.items():
        for method in (r for r in (CLIKA_REF_METHOD, CLIKA_REF_LATENCY_METHOD) if r in found.latency):
            slowest = _upper(found, "fp32", method)
            label = f"{name}: latency of {method} to that of fp32, upper end of the 95 % interval"
            _print(label, slowest, 1.05, is_limit_above=True)
        fastest = min(found.peers, key=lambda peer: -found.faster(peer))
        compared = _upper(found, fastest)
        limit = RUNTIMES[found.runtime].max_peer_ratio
        _print(f"{name}: latency to that of the fastest peer, {fastest}", compared, limit, is_limit_above=True)
    for name in ("resnet18", ENCODER):
        if name in every and every[name].runtime == "onnxruntime":
            _print(f"{name}: times faster than fp32", every[name].faster("ours"), 3)
    if ENCODER in every:
        _print(f"{ENCODER}: mean cosine", every[ENCODER].judged["ours"]["cosine"], 0.998)
        _print(f"{ENCODER}: agreement of nearest neighbours", every[ENCODER].judged["ours"]["neighbours"], 0.95)
    for name, found in every.items():
        if found.sensitivities is not None:
            _print_sensitivities(name, found.sensitivities)
        if name not in DIGITS:
            planned, run = found.explained["planned"], found.explained["in integers"]
            _print(f"{name}: share of all products planned in integers", planned, 0.95)
            _print(f"{name}: share of what is planned that runs in integers", run, 1)
    for kind in ("conv", "depthwise"):
        nets = [found.judged for name, found in every.items() if name.startswith(f"digits-{kind}")]
        if nets:
            more = statistics.mean(judged["ours"]["errors"] - judged["fp32"]["errors"] for judged in nets)
            _print(
                f"digits, {kind} net: more errors than in fp32, mean of {len(nets)} seeds", more, 1, is_limit_above=True
            )


def _print_making(name: str, found: Found) -> None:
    clika_ref = found.median("ours")
    _print(
        f"{name}: seconds to those of the fastest peer",
        clika_ref / min(map(found.median, found.peers)),
        0.7,
        is_limit_above=True,
    )
    _print(
        f"{name}: seconds to those of tracing and running", clika_ref / found.median("floor"), 2.3, is_limit_above=True
    )
    if name == "vit_b_16":
        lowest = min(found.peak[peer] for peer in found.peers)
        _print(f"{name}: peak memory to the lowest of a peer", found.peak["ours"] / lowest, 0.6, is_limit_above=True)


def _print_sensitivities(name: str, sensitivities: Mapping[str, Any]) -> None:
    _print(f"{name}: rank correlation of sensitivities with runs of one layer", sensitivities["spearman"], 0.9)
    for layers, predicted, measured in sensitivities["predictions"]:
        print(f"{name}: with {layers} layers in integers {predicted:.1f} dB are predicted, {measured:.1f} measured")
    furthest = max(abs(predicted - measured) for _, predicted, measured in sensitivities["predictions"])
    _print(f"{name}: dB between predicted and measured", furthest, 1, is_limit_above=True)


def _upper(found: Found, other: str, method: str = CLIKA_REF_METHOD) -> float:
    """Return up to where the median of the ratios to another road's latencies lies, with 95 %: an order statistic."""
    ratios = sorted(a / b for a, b in zip(found.latency[method], found.latency[other], strict=True))
    folder = round((len(ratios) - 1) / 2 + 0.98 * math.sqrt(len(ratios)))
    return ratios[min(folder, len(ratios) - 1)]


def _print(label: str, value: float, limit: float, *, is_limit_above: bool = False) -> None:
    is_reached = value <= limit if is_limit_above else value >= limit
    value_text, verdict = "most" if is_limit_above else "least", "reached" if is_reached else "MISSED"
    print(f"{label}: {value:.3f} of at {value_text} {limit:g}: {verdict}")
