"""From module to file: seconds and memory, against ``torch.onnx.export`` and against ``torch.export`` alone."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.measuring import Names, geometric_mean, in_fresh_process, ratio, verdict
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

COLUMNS = ("model", "ours", "torch.onnx", "floor", "/onnx", "cpu /onnx", "/floor", "cpu /floor")
COLUMNS += ("peak", "its peak", "peak ratio", "our stages")


def run(names: Names = None, rounds: int = 3) -> None:
    """Time and memory from module to file, against torch.onnx.export and against torch.export alone."""
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
        print(
            f"Geometric mean of {label}: {verdict(geometric_mean(column), limit)}; over it: {', '.join(over) or 'none'}"
        )


def _row(name: str, rounds: int) -> tuple[tuple[Any, ...], tuple[float, ...]]:
    found = in_fresh_process("benchmarks.export_methods", "time", name, str(rounds))
    peaks = {
        method: in_fresh_process("benchmarks.export_methods", "memory", name, method)["peak"]
        for method in ("ours", "theirs")
    }
    against = {
        other: [ratio(found[kind]["ours"], found[kind][other]) for kind in ("clock", "processor")]
        for other in ("theirs", "floor")
    }
    memory = peaks["ours"] / max(peaks["theirs"], 1)
    stages = {s: statistics.median(t[s] for t in found["stages"]) for s in found["stages"][0]}
    row = (
        name,
        *(f"{statistics.median(found['clock'][method]):.2f} s" for method in ("ours", "theirs", "floor")),
        *(f"{figure:.2f}" for figure in (*against["theirs"], *against["floor"])),
        *(f"{peaks[method] / 1e6:,.0f} MB" for method in ("ours", "theirs")),
        f"{memory:.2f}",
        ", ".join(f"{s} {t:.2f}" for s, t in stages.items()),
    )
    return row, (*against["theirs"], *against["floor"], memory)
