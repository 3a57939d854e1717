"""From module to file: seconds and memory, against ``torch.onnx.export`` and against ``torch.export`` alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.measuring import geometric_mean, in_fresh_process, ratio, verdict
from clika_ref.reporting.tables import print_table

NAMES = (
    *("resnet18", "mobilenet_v3_large", "vit_b_16", "swin_t", "densenet121", "maxvit_t"),
    *("bert", "llama", "gpt2"),
)

TIME_LIMIT, FLOOR_LIMIT, MEMORY_LIMIT = 1 / 3, 1.5, 1.0
"""At most a third of torch.onnx.export's time, 1.5 times that of torch.export alone, and no more memory."""

COLUMNS = (
    "model",
    "ours",
    "torch.onnx",
    "floor",
    "ours/onnx",
    "ours/floor",
    "peak",
    "its peak",
    "peak ratio",
    "stages",
)


def run(names: Sequence[str] | None = None, rounds: int = 3) -> None:
    """Measure and print one row for each model, then the means."""
    rows: list[tuple[Any, ...]] = []
    ratios: list[tuple[float, float, float]] = []
    for name in names or NAMES:
        row, figures = _row(name, rounds)
        rows.append(row)
        ratios.append(figures)
        print(f"{row[0]}: {figures[0]:.2f} of torch.onnx.export, {figures[1]:.2f} of the floor", flush=True)
    print_table(COLUMNS, rows, title="Module to file, dynamic batch; one process, in turn; peaks in fresh processes")
    means = [geometric_mean(column) for column in zip(*ratios, strict=True)]
    print(f"Time against torch.onnx.export, geometric mean: {verdict(means[0], TIME_LIMIT)}")
    print(f"Time against torch.export and writing, geometric mean: {verdict(means[1], FLOOR_LIMIT)}")
    print(f"Peak memory against torch.onnx.export, geometric mean: {verdict(means[2], MEMORY_LIMIT)}")
    for label, column, limit in (
        ("torch.onnx.export", 0, TIME_LIMIT),
        ("the floor", 1, FLOOR_LIMIT),
        ("memory", 2, 1.0),
    ):
        over = [f"{n} {r[column]:.2f}" for n, r in zip(names or NAMES, ratios, strict=True) if r[column] > limit]
        print(f"Single models over the limit against {label}: {', '.join(over) or 'none'}")


def _row(name: str, rounds: int) -> tuple[tuple[Any, ...], tuple[float, float, float]]:
    found = in_fresh_process("benchmarks.roads", "time", name, str(rounds))
    peaks = {road: in_fresh_process("benchmarks.roads", "memory", name, road)["peak"] for road in ("ours", "theirs")}
    figures = (
        ratio(found["ours"], found["theirs"]),
        ratio(found["ours"], found["floor"]),
        peaks["ours"] / max(peaks["theirs"], 1),
    )
    medians = {road: statistics.median(found[road]) for road in ("ours", "theirs", "floor")}
    stages = {s: statistics.median(t[s] for t in found["stages"]) for s in found["stages"][0]}
    row = (
        name,
        *(f"{medians[road]:.2f} s" for road in ("ours", "theirs", "floor")),
        f"{figures[0]:.2f}",
        f"{figures[1]:.2f}",
        *(f"{peaks[road] / 1e6:,.0f} MB" for road in ("ours", "theirs")),
        f"{figures[2]:.2f}",
        ", ".join(f"{s} {t:.2f}" for s, t in stages.items()),
    )
    return row, figures
