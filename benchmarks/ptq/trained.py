"""The comparison for networks with trained weights, and for a detector with random ones, in both runtimes."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from benchmarks.measuring import Names
from benchmarks.ptq import run as comparison
from benchmarks.ptq.run import SubjectMeasurements
from benchmarks.ptq.runtimes import CLIKA_REF, FLOAT, TRACE_AND_FORWARD

VISION = ("lite0", "o-net", "yolo-like")
TRAINED = (*VISION, "encoder", "crepe", "conformer", "speakers")

VARIANTS = ("lite0, 192 x 192", "crepe, tiny", "conformer, 50 frames", "yolo-like, wider")
"""Other widths and sizes of the same networks: nothing is tuned to one shape."""

MAX_LATENCY_RATIO = 1.03
"""Limit of the latency to float, and to the fastest peer that is not much less accurate."""

MAX_PEER_LOSS = 6.0
"""A peer with this many dB less than clika-ref, or more, is no rival in latency."""

MAX_FLOAT_RATIOS: Mapping[tuple[str, str], float] = {
    ("lite0", "onnxruntime"): 0.55,
    ("lite0", "openvino"): 0.7,
    **{("conformer", runtime): 0.35 for runtime in ("onnxruntime", "openvino")},
    **{("yolo-like", runtime): 0.85 for runtime in ("onnxruntime", "openvino")},
}
"""Limit of the latency to float, by subject and runtime."""

MIN_DECISIONS: Mapping[str, float] = {"lite0": 0.938, "conformer": 0.982, "encoder": 0.953, "yolo-like": 0.95}
"""Share of decisions equal to float, by subject."""

MAX_PEER_SECONDS, MAX_TRACE_SECONDS, MAX_PEER_MEMORY = 1.0, 3.0, 1.03
"""Limits of the export's seconds and memory."""

MIN_DECIBELS_AHEAD = 3.0
"""Required dB above the best peer, for vision."""


def run(names: Names = None, rounds: int = 3, calls: int = 40, runtime: str = "") -> None:
    """Compare INT8 for trained networks with ONNX Runtime's quantizer and NNCF: time, size, latency, decisions."""
    for one in (runtime,) if runtime else ("onnxruntime", "openvino"):
        for name, found in comparison.compare_methods(list(names or (*TRAINED, *VARIANTS)), rounds, calls, one).items():
            _print_limits(f"{name} in {one}", name, found)


def _print_limits(label: str, name: str, found: SubjectMeasurements) -> None:
    print_upper = functools.partial(comparison.print_limit, is_upper_limit=True)
    print_upper(f"{label}: latency to float", found.compute_latency_ratio(CLIKA_REF, FLOAT), MAX_LATENCY_RATIO)
    if (name, found.runtime) in MAX_FLOAT_RATIOS:
        ratio = found.compute_latency_ratio(CLIKA_REF, FLOAT)
        print_upper(f"{label}: latency to float, of this network", ratio, MAX_FLOAT_RATIOS[name, found.runtime])
    own = found.accuracy[CLIKA_REF]
    if name in MIN_DECISIONS:
        comparison.print_limit(f"{label}: {found.decisions}", own["decisions"], MIN_DECISIONS[name])
    seconds = found.compute_median_seconds(CLIKA_REF)
    forward = found.compute_median_seconds(TRACE_AND_FORWARD)
    print_upper(f"{label}: seconds to {TRACE_AND_FORWARD}", seconds / forward, MAX_TRACE_SECONDS)
    if not found.peers:  # none is installed; their errors are printed above
        return
    peers = {peer: found.accuracy[peer] for peer in found.peers}
    best = max(accuracy["median sqnr"] for accuracy in peers.values())
    ahead = own["median sqnr"] - best
    comparison.print_limit(f"{label}: dB above the best peer", ahead, MIN_DECIBELS_AHEAD if name in VISION else 0)
    decisions = max(accuracy["decisions"] for accuracy in peers.values())
    comparison.print_limit(f"{label}: decisions to the best peer", own["decisions"] / max(decisions, 1e-9), 1)
    rivals = [peer for peer in peers if peers[peer]["median sqnr"] > own["median sqnr"] - MAX_PEER_LOSS]
    if rivals:
        fastest = max(rivals, key=found.compute_speedup)
        ratio = found.compute_latency_ratio(CLIKA_REF, fastest)
        print_upper(f"{label}: latency to the fastest comparable peer, {fastest}", ratio, MAX_LATENCY_RATIO)
    fastest_export = min(map(found.compute_median_seconds, found.peers))
    print_upper(f"{label}: seconds to the fastest peer", seconds / fastest_export, MAX_PEER_SECONDS)
    memory = found.peak[CLIKA_REF] / max(min(found.peak[peer] for peer in found.peers), 1)
    print_upper(f"{label}: peak memory to the lowest of a peer", memory, MAX_PEER_MEMORY)
