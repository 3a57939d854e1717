"""The comparison for networks with trained weights, and for a detector with random ones, in both runtimes."""

from __future__ import annotations

from benchmarks.measuring import Names
from benchmarks.ptq import run as comparison

TRAINED = ("lite0", "encoder", "o-net", "crepe", "conformer", "speakers", "yolo-like")

VARIANTS = ("lite0, 192 x 192", "crepe, tiny", "conformer, 50 frames", "yolo-like, wider")
"""Other widths and sizes of the same networks: nothing is tuned to one shape."""


def run(names: Names = None, rounds: int = 3, calls: int = 40, runtime: str = "") -> None:
    """Compare INT8 for trained networks with ONNX Runtime's quantizer and NNCF: time, size, latency, decisions."""
    for one in (runtime,) if runtime else ("onnxruntime", "openvino"):
        comparison.run(list(names or (*TRAINED, *VARIANTS)), rounds, calls, one)
