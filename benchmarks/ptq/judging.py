"""Judge the files of one subject in their runtime: latency in turn, and how near the outputs are to those in float."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring import run_in_turn
from benchmarks.ptq.quantizers import compile_quantized
from benchmarks.ptq.runtimes import RUNTIMES, Run
from benchmarks.ptq.subjects import Prepared, read

# isort: split
import torch

CALLS = 5
"""In a row, for one figure of latency."""


def latencies(runs: dict[str, Run], feed: dict[str, Any], rounds: int) -> Any:
    """Return the seconds of one call of each, round by round."""

    def timed(run: Run) -> float:
        start = time.perf_counter()
        for _ in range(CALLS):
            run(feed)
        return (time.perf_counter() - start) / CALLS

    for run in runs.values():
        timed(run)
    return run_in_turn({name: lambda run=run: timed(run) for name, run in runs.items()}, rounds)


def outputs(run: Run, batches: Sequence[dict[str, torch.Tensor]]) -> np.ndarray:
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
    """Return which other sample is nearest to each."""
    unit = embedded / np.linalg.norm(embedded, axis=1, keepdims=True)
    is_same = unit @ unit.T
    np.fill_diagonal(is_same, -np.inf)
    return is_same.argmax(1)


def explain(runtime: str, prepared: Prepared) -> dict[str, float]:
    """Return which share of products is planned in integers, and of the layers that are, which share runs so."""
    explained = compile_quantized(prepared.model, prepared.calibration, runtime).clika_explain()
    planned = [node for node in explained.nodes if node.macs and node.planned != "float"]
    missed = sum(node in explained.not_quantized for node in planned)
    return {
        "planned": explained.share(planned=True),
        "in integers": 1 - missed / len(planned) if planned else 0.0,
    }


def main(runtime: str, path: str, rounds: str, *names: str) -> dict[str, Any]:
    """Judge the files of one folder, by name."""
    folder, chosen = Path(path), RUNTIMES[runtime]
    prepared = read(folder)
    runs = {name: chosen.open(folder / f"{name}{chosen.suffix}") for name in names}
    feed = {name: tensor[:1].numpy() for name, tensor in prepared.test[0].items()}
    seconds = latencies(runs, feed, int(rounds))
    with torch.no_grad():
        exact = np.concatenate([prepared.model(**batch).numpy() for batch in prepared.test])
    found = {name: compare_outputs(outputs(run, prepared.test), exact, prepared) for name, run in runs.items()}
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    return {"latency": seconds, "judged": found, "explained": explain(runtime, prepared)}
