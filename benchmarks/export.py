"""From module to file: seconds and memory, against ``torch.onnx.export`` and against ``torch.export`` alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.measuring import format_verdict, geometric_mean, median_ratio, run_in_fresh_process
from clika_ref.reporting.tables import print_table

NAMES = (
    *("resnet18", "mobilenet_v3_large", "vit_b_16", "swin_t", "densenet121", "maxvit_t"),
    *("bert", "llama", "gpt2"),
)

TIME_LIMIT, FLOOR_LIMIT, MEMORY_LIMIT = 1 / 3, 1.5, 1.0
"""At most a third of torch.onnx.export's time, 1.5 times that of torch.export alone, and no more memory."""

FIGURES = {
    "time against torch.onnx.export": TIME_LIMIT,
    "processor time against torch.onnx.export": TIME_LIMIT,
    "time against torch.export and writing": FLOOR_LIMIT,
    "processor time against torch.export and writing": FLOOR_LIMIT,
    "peak memory against torch.onnx.export": MEMORY_LIMIT,
}
"""On a busy machine the processor's time is the one to trust; waiting for the disk is not in it."""

COLUMNS = ("model", "clika-ref", "torch.onnx", "floor", "/onnx", "cpu /onnx", "/floor", "cpu /floor")
COLUMNS += ("peak", "its peak", "peak ratio", "our stages")


def run(names: Sequence[str] | None = None, rounds: int = 3) -> None:
    """Measure and print one row for each model, then the means."""
    rows: list[tuple[Any, ...]] = []
    ratios: list[tuple[float, ...]] = []
    for name in names or NAMES:
        row, figures = _row(name, rounds)
        rows.append(row)
        ratios.append(figures)
        print(" | ".join(map(str, row)), flush=True)
    print_table(COLUMNS, rows, title="Module to file, dynamic batch; one process, in turn; peaks in fresh processes")
    for (label, limit), column in zip(FIGURES.items(), zip(*ratios, strict=True), strict=True):
        over = [f"{name} {figure:.2f}" for name, figure in zip(names or NAMES, column, strict=True) if figure > limit]
        verdict = format_verdict(geometric_mean(column), limit)
        print(f"Geometric mean of {label}: {verdict}; over it: {', '.join(over) or 'none'}")


def _row(name: str, rounds: int) -> tuple[tuple[Any, ...], tuple[float, ...]]:
    found = run_in_fresh_process("benchmarks.export_methods", "time", name, str(rounds))
    peaks = {
        method: run_in_fresh_process("benchmarks.export_methods", "memory", name, method)["peak"]
        for method in ("clika-ref", "torch.onnx")
    }
    against = {
        other: [median_ratio(found[kind]["clika-ref"], found[kind][other]) for kind in ("clock", "processor")]
        for other in ("torch.onnx", "floor")
    }
    memory = peaks["clika-ref"] / max(peaks["torch.onnx"], 1)
    stages = {s: statistics.median(t[s] for t in found["stages"]) for s in found["stages"][0]}
    row = (
        name,
        *(f"{statistics.median(found['clock'][method]):.2f} s" for method in ("clika-ref", "torch.onnx", "floor")),
        *(f"{figure:.2f}" for figure in (*against["torch.onnx"], *against["floor"])),
        *(f"{peaks[method] / 1e6:,.0f} MB" for method in ("clika-ref", "torch.onnx")),
        f"{memory:.2f}",
        ", ".join(f"{s} {t:.2f}" for s, t in stages.items()),
    )
    return row, (*against["torch.onnx"], *against["floor"], memory)
