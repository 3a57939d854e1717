"""Quantize each subject on every road, judge the files side by side, and print the tables and the figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measuring import in_fresh_process, ratio
from benchmarks.ptq.runtimes import OURS, OURS_FOR_LATENCY, RUNTIMES, peers_of
from clika_ref.reporting.tables import print_table

DIGITS = tuple(f"digits-{kind}-{seed}" for kind in ("conv", "depthwise") for seed in range(3))
VISION = ("resnet18", "mobilenet_v3_large", "vit_b_16")
ENCODER = "encoder"
WEIGHED = ("resnet18", ENCODER)
"""Of which each layer is also quantized alone, in ONNX Runtime."""
TIMED = (*DIGITS, "mobilenet_v3_large")
"""Which are quantized for latency, too: where `optimize_for="size"` may leave a file slower than float."""
NAMES = {"onnxruntime": (*VISION, ENCODER, *DIGITS), "openvino": (*VISION, "swin_t", ENCODER, *DIGITS)}

MAKING = ("road", "seconds", "/floor", "peak", "file")
RUNNING = (
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
    weighed: Mapping[str, Any] | None
    """How far sensitivities hold, of the subjects for which that is asked."""
    explained: Mapping[str, float]
    """What the runtime makes of ours."""

    @property
    def peers(self) -> list[str]:
        """The peers that made a file that runs."""
        return [name for name in peers_of(self.runtime) if name in self.judged]

    def median(self, road: str) -> float:
        """Return the seconds from module to file."""
        return statistics.median(self.seconds[road])

    def faster(self, road: str) -> float:
        """Return how many times faster than fp32 a file is."""
        return 1 / ratio(self.latency[road], self.latency["fp32"])


def run(names: Sequence[str] | None = None, rounds: int = 3, calls: int = 40, runtime: str = "onnxruntime") -> None:
    """Measure and print two tables for each subject, then the figures."""
    every: dict[str, Found] = {}
    for name in names or NAMES[runtime]:
        every[name] = found = _measured(name, rounds, calls, runtime)
        print_table(MAKING, _making_rows(found), title=f"{name}: module to file, in turn, each in a fresh process")
        print_table(RUNNING, _running_rows(found), title=f"{name}: in {runtime}, one thread, one sample, in turn")
    _print_figures(every)


def _measured(name: str, rounds: int, calls: int, runtime: str) -> Found:
    with TemporaryDirectory() as folder:
        in_fresh_process("benchmarks.ptq.preparing", name, folder)
        made: dict[str, list[Any]] = {}
        roads = [road for road in RUNTIMES[runtime].roads if road != OURS_FOR_LATENCY or name in TIMED]
        for _ in range(rounds):
            for road in roads:
                if road not in made or made[road]:
                    made.setdefault(road, []).extend(_made(name, runtime, road, folder))
        whole = [road for road in made if made[road] and road != "floor"]
        judged = in_fresh_process("benchmarks.ptq.judging", runtime, folder, str(calls), *whole)
        is_weighed = name in WEIGHED and runtime == "onnxruntime"
        weighed = in_fresh_process("benchmarks.ptq.weighing", folder) if is_weighed else None
        explained = in_fresh_process("benchmarks.ptq.explaining", runtime, folder)
    return Found(
        runtime,
        {road: [m["seconds"] for m in made[road]] for road in made if made[road]},
        {road: min(m["peak"] for m in made[road]) for road in made if made[road]},
        {road: made[road][0]["bytes"] for road in whole},
        judged["latency"],
        judged["judged"],
        weighed,
        explained,
    )


def _made(name: str, runtime: str, road: str, folder: str) -> list[Any]:
    """Return what one walk down a road took; nothing where a peer fails, which is said."""
    try:
        return [in_fresh_process("benchmarks.ptq.making", runtime, road, folder, on_one_thread=False)]
    except RuntimeError as error:
        if road not in peers_of(runtime):
            raise
        print(f"{name}: {road} makes no file: {str(error).splitlines()[-1]}")
        return []


def _making_rows(found: Found) -> list[tuple[Any, ...]]:
    floor = found.median("floor")
    return [
        (
            road,
            f"{found.median(road):.2f} s",
            f"{found.median(road) / floor:.2f}",
            f"{found.peak[road] / 1e6:,.0f} MB",
            f"{found.bytes[road] / 1e6:.1f} MB" if road in found.bytes else "",
        )
        for road in found.seconds
    ]


def _running_rows(found: Found) -> list[tuple[Any, ...]]:
    return [
        (
            road,
            f"{statistics.median(found.latency[road]) * 1e3:.2f} ms",
            f"{found.faster(road):.2f}",
            f"{judged['sqnr']:.1f} dB",
            f"{judged['agreement']:.1%}",
            f"{judged['cosine']:.4f}, least {judged['least cosine']:.4f}",
            f"{judged['neighbours']:.1%}",
            judged.get("errors", ""),
        )
        for road, judged in found.judged.items()
    ]


def _print_figures(every: Mapping[str, Found]) -> None:
    for name in (*VISION, "swin_t"):
        if name in every:
            _print_making(name, every[name])
            best = max(every[name].judged[peer]["sqnr"] for peer in every[name].peers)
            _print(f"{name}: dB above the best peer", every[name].judged["ours"]["sqnr"] - best, 3)
    for name, found in every.items():
        for road in (r for r in (OURS, OURS_FOR_LATENCY) if r in found.latency):
            slowest = _upper(found, "fp32", road)
            label = f"{name}: latency of {road} to that of fp32, upper end of the 95 % interval"
            _print(label, slowest, 1.05, at_most=True)
        fastest = min(found.peers, key=lambda peer: -found.faster(peer))
        beside = _upper(found, fastest)
        limit = RUNTIMES[found.runtime].most_of_peer
        _print(f"{name}: latency to that of the fastest peer, {fastest}", beside, limit, at_most=True)
    for name in ("resnet18", ENCODER):
        if name in every and every[name].runtime == "onnxruntime":
            _print(f"{name}: times faster than fp32", every[name].faster("ours"), 3)
    if ENCODER in every:
        _print(f"{ENCODER}: mean cosine", every[ENCODER].judged["ours"]["cosine"], 0.998)
        _print(f"{ENCODER}: agreement of nearest neighbours", every[ENCODER].judged["ours"]["neighbours"], 0.95)
    for name, found in every.items():
        if found.weighed is not None:
            _print_weighing(name, found.weighed)
        if name not in DIGITS:
            planned, run = found.explained["planned"], found.explained["in integers"]
            _print(f"{name}: share of all products planned in integers", planned, 0.95)
            _print(f"{name}: share of what is planned that runs in integers", run, 1)
    for kind in ("conv", "depthwise"):
        nets = [found.judged for name, found in every.items() if name.startswith(f"digits-{kind}")]
        if nets:
            more = statistics.mean(judged["ours"]["errors"] - judged["fp32"]["errors"] for judged in nets)
            _print(f"digits, {kind} net: more errors than in fp32, mean of {len(nets)} seeds", more, 1, at_most=True)


def _print_making(name: str, found: Found) -> None:
    ours = found.median("ours")
    _print(
        f"{name}: seconds to those of the fastest peer", ours / min(map(found.median, found.peers)), 0.7, at_most=True
    )
    _print(f"{name}: seconds to those of tracing and running", ours / found.median("floor"), 2.3, at_most=True)
    if name == "vit_b_16":
        least = min(found.peak[peer] for peer in found.peers)
        _print(f"{name}: peak memory to the lowest of a peer", found.peak["ours"] / least, 0.6, at_most=True)


def _print_weighing(name: str, weighed: Mapping[str, Any]) -> None:
    _print(f"{name}: rank correlation of sensitivities with runs of one layer", weighed["spearman"], 0.9)
    for layers, predicted, measured in weighed["predictions"]:
        print(f"{name}: with {layers} layers in integers {predicted:.1f} dB are predicted, {measured:.1f} measured")
    furthest = max(abs(predicted - measured) for _, predicted, measured in weighed["predictions"])
    _print(f"{name}: dB between predicted and measured", furthest, 1, at_most=True)


def _upper(found: Found, other: str, road: str = OURS) -> float:
    """Return up to where the median of the ratios to another road's latencies lies, with 95 %: an order statistic."""
    ratios = sorted(a / b for a, b in zip(found.latency[road], found.latency[other], strict=True))
    place = round((len(ratios) - 1) / 2 + 0.98 * math.sqrt(len(ratios)))
    return ratios[min(place, len(ratios) - 1)]


def _print(label: str, value: float, limit: float, *, at_most: bool = False) -> None:
    is_reached = value <= limit if at_most else value >= limit
    side, verdict = "most" if at_most else "least", "reached" if is_reached else "MISSED"
    print(f"{label}: {value:.3f} of at {side} {limit:g}: {verdict}")
