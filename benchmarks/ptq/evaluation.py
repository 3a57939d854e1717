"""Measure the files of one subject in their runtime: latency in turn, and the error of the outputs."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring import run_in_turn
from benchmarks.ptq.quantizers import compile_quantized
from benchmarks.ptq.runtimes import RUNTIMES, Run
from benchmarks.ptq.subjects import PreparedSubject, load_subject

# isort: split
import torch

CALLS_PER_ROUND = 5


def measure_latencies(runs: dict[str, Run], feed: dict[str, Any], rounds: int) -> Any:
    """Return the mean seconds of a call for each round and file."""

    def time_calls(run: Run) -> float:
        start = time.perf_counter()
        for _ in range(CALLS_PER_ROUND):
            run(feed)
        return (time.perf_counter() - start) / CALLS_PER_ROUND

    calls = {name: partial(time_calls, run) for name, run in runs.items()}
    run_in_turn(calls, 1)  # warm up
    return run_in_turn(calls, rounds)


def compute_outputs(run: Run, batches: Sequence[dict[str, torch.Tensor]]) -> np.ndarray:
    """Return the first output for all samples: ``float32[samples, ...]``."""
    feeds = ({name: tensor.numpy() for name, tensor in batch.items()} for batch in batches)
    return np.concatenate([np.asarray(run(feed)) for feed in feeds])


def compare_outputs(actual: np.ndarray, exact: np.ndarray, prepared: PreparedSubject) -> dict[str, float]:
    """Return the similarity of outputs to those in float, and the number of wrong classes if there are labels."""
    noise, signal = actual.astype(float) - exact, exact - exact.mean(0, dtype=float)
    found = {
        "sqnr": 10 * math.log10(float((signal**2).sum()) / max(float((noise**2).sum()), 1e-300)),
        "agreement": float((actual.argmax(1) == exact.argmax(1)).mean()),
    }
    if prepared.labels is not None:
        found["errors"] = int((actual.argmax(1) != prepared.labels.numpy()).sum())
    norms = np.linalg.norm(actual, axis=1) * np.linalg.norm(exact, axis=1)
    cosines = (actual * exact).sum(1) / norms
    found |= {"cosine": float(cosines.mean()), "min cosine": float(cosines.min())}
    found["neighbours"] = float((_find_nearest(actual) == _find_nearest(exact)).mean())
    return found


def _find_nearest(embeddings: np.ndarray) -> np.ndarray:
    """Return the index of the nearest other sample for each sample."""
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    similarities = unit @ unit.T
    np.fill_diagonal(similarities, -np.inf)
    return similarities.argmax(1)


def measure_precision(runtime: str, prepared: PreparedSubject) -> dict[str, float]:
    """Return the share of MACs that clika-ref plans in INT8, and the share of these layers that run in INT8."""
    explained = compile_quantized(prepared.model, prepared.calibration, runtime).clika_explain()
    planned = [node for node in explained.nodes if node.macs and node.planned != "float"]
    not_quantized = sum(node in explained.not_quantized for node in planned)
    return {
        "planned": explained.share(planned=True),
        "in INT8": 1 - not_quantized / len(planned) if planned else 0.0,
    }


def main(runtime: str, path: str, rounds: str, *names: str) -> dict[str, Any]:
    """Measure the files of one folder, by name."""
    folder, spec = Path(path), RUNTIMES[runtime]
    prepared = load_subject(folder)
    runs = {name: spec.open(folder / f"{name}{spec.suffix}") for name in names}
    feed = {name: tensor[:1].numpy() for name, tensor in prepared.test[0].items()}
    seconds = measure_latencies(runs, feed, int(rounds))
    with torch.no_grad():
        exact = np.concatenate([prepared.model(**batch).numpy() for batch in prepared.test])
    accuracy = {
        name: compare_outputs(compute_outputs(run, prepared.test), exact, prepared) for name, run in runs.items()
    }
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    return {"latency": seconds, "accuracy": accuracy, "precision": measure_precision(runtime, prepared)}
