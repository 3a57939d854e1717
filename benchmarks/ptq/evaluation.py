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
from benchmarks.ptq.decisions import DECISIONS, Outputs
from benchmarks.ptq.prepared_subjects import PreparedSubject, load_subject
from benchmarks.ptq.quantizers import compile_quantized
from benchmarks.ptq.runtimes import RUNTIMES, Run

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


def compute_outputs(run: Run, batches: Sequence[dict[str, torch.Tensor]]) -> list[np.ndarray]:
    """Return each output for all samples, ``float32[samples, ...]``."""
    feeds = ({name: tensor.numpy() for name, tensor in batch.items()} for batch in batches)
    return [np.concatenate(parts) for parts in zip(*(run(feed) for feed in feeds), strict=True)]


def run_model(prepared: PreparedSubject) -> list[np.ndarray]:
    """Return each output of the model in float for all test samples."""

    def run(batch: dict[str, torch.Tensor]) -> list[np.ndarray]:
        found = prepared.model(**batch)
        return [tensor.numpy() for tensor in (found if isinstance(found, tuple) else (found,))]

    with torch.no_grad():
        return [np.concatenate(parts) for parts in zip(*map(run, prepared.test), strict=True)]


def compare_outputs(actual: Outputs, exact: Outputs, prepared: PreparedSubject) -> dict[str, float]:
    """Return the similarity of outputs to those in float, and the number of wrong classes if there are labels.

    SQNR is centred: the signal is the difference to the mean over all samples. It is given for the sums over all
    samples, and as the median over samples.
    """
    got, ref = (np.concatenate([o.reshape(len(o), -1) for o in outputs], 1, dtype=float) for outputs in (actual, exact))
    noise, signal = ((got - ref) ** 2).sum(1), ((ref - ref.mean(0)) ** 2).sum(1)
    found = {
        "sqnr": _in_decibels(signal.sum() / max(noise.sum(), 1e-300)),
        "median sqnr": _in_decibels(np.median(signal / noise.clip(1e-300))),
        "decisions": DECISIONS[prepared.decisions](actual, exact),
    }
    if prepared.labels is not None:
        found["errors"] = int((actual[0].argmax(1) != prepared.labels.numpy()).sum())
    norms = np.linalg.norm(got, axis=1) * np.linalg.norm(ref, axis=1)
    cosines = (got * ref).sum(1) / norms
    return found | {"cosine": float(cosines.mean()), "min cosine": float(cosines.min())}


def _in_decibels(ratio: Any) -> float:
    return 10 * math.log10(float(ratio))


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
    feed = {name: tensor[:1].numpy() for name, tensor in prepared.test[0].items()}
    seconds: dict[str, Any] = {}
    for label, threads in (("threaded latency", None), ("latency", 1)):
        runs = {name: spec.open(folder / f"{name}{spec.suffix}", threads) for name in names}
        seconds[label] = measure_latencies(runs, feed, int(rounds))
    exact = run_model(prepared)
    accuracy = {
        name: compare_outputs(compute_outputs(run, prepared.test), exact, prepared) for name, run in runs.items()
    }
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    precision = measure_precision(runtime, prepared)
    return {**seconds, "accuracy": accuracy, "precision": precision, "decisions": prepared.decisions}
