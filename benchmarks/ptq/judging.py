"""Measure the files of one subject in their runtime: latency in turn, and the error of the outputs.

``python -m benchmarks.ptq.judging onnxruntime FOLDER ROUNDS fp32 clika-ref ...``
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring import run_in_turn
from benchmarks.ptq.runtimes import RUNTIMES, Run
from benchmarks.ptq.subjects import Prepared, read

# isort: split
import torch

CALLS = 5
"""In a row, for one figure of latency."""


def measure_latencies(runs: dict[str, Run], feed: dict[str, Any], rounds: int) -> Any:
    """Return the seconds of one call of each file, round by round."""

    def time_call(run: Run) -> float:
        start = time.perf_counter()
        for _ in range(CALLS):
            run(feed)
        return (time.perf_counter() - start) / CALLS

    for run in runs.values():
        time_call(run)
    return run_in_turn({name: lambda run=run: time_call(run) for name, run in runs.items()}, rounds)


def compute_outputs(run: Run, batches: Sequence[dict[str, torch.Tensor]]) -> np.ndarray:
    """Return the first output for every sample: ``float32[samples, ...]``."""
    feeds = ({name: tensor.numpy() for name, tensor in batch.items()} for batch in batches)
    return np.concatenate([np.asarray(run(feed)) for feed in feeds])


def compare_outputs(actual: np.ndarray, exact: np.ndarray, prepared: Prepared) -> dict[str, float]:
    """Compare outputs with those in float, and with labels where there are any."""
    noise, varying = actual.astype(float) - exact, exact - exact.mean(0, dtype=float)
    found = {
        "sqnr": 10 * math.log10(float((varying**2).sum()) / max(float((noise**2).sum()), 1e-300)),
        "agreement": float((actual.argmax(1) == exact.argmax(1)).mean()),
    }
    if prepared.labels is not None:
        found["errors"] = int((actual.argmax(1) != prepared.labels.numpy()).sum())
    norms = np.linalg.norm(actual, axis=1) * np.linalg.norm(exact, axis=1)
    cosines = (actual * exact).sum(1) / norms
    found |= {"cosine": float(cosines.mean()), "least cosine": float(cosines.min())}
    found["neighbours"] = float((_nearest(actual) == _nearest(exact)).mean())
    return found


def _nearest(embedded: np.ndarray) -> np.ndarray:
    """Return the index of the nearest other sample of each sample."""
    unit = embedded / np.linalg.norm(embedded, axis=1, keepdims=True)
    is_same = unit @ unit.T
    np.fill_diagonal(is_same, -np.inf)
    return is_same.argmax(1)


def main(runtime: str, path: str, rounds: str, *names: str) -> dict[str, Any]:
    """Measure the files of one folder, by name."""
    folder, chosen = Path(path), RUNTIMES[runtime]
    prepared = read(folder)
    runs = {name: chosen.open(folder / f"{name}{chosen.suffix}") for name in names}
    feed = {name: tensor[:1].numpy() for name, tensor in prepared.test[0].items()}
    seconds = measure_latencies(runs, feed, int(rounds))
    with torch.no_grad():
        exact = np.concatenate([prepared.model(**batch).numpy() for batch in prepared.test])
    found = {name: compare_outputs(compute_outputs(run, prepared.test), exact, prepared) for name, run in runs.items()}
    return {"latency": seconds, "judged": found}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
