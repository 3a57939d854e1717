"""Time training steps of each method, and print their ratio to steps in float."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.measuring import format_verdict, median_ratio, run_in_fresh_process
from clika_ref.reporting.tables import print_table

LIMIT = 2.0
"""Of a float step (issue 6)."""

NAMES = ("resnet18", "encoder")


def run(names: Sequence[str] | None = None, rounds: int = 9) -> None:
    """Measure and print a row for each model and method."""
    rows: list[tuple[str, ...]] = []
    worst, compared = 0.0, 0.0
    for name in names or NAMES:
        found = run_in_fresh_process("benchmarks.qat.steps", name, str(rounds))
        seconds = found["seconds"]
        for method, times in seconds.items():
            figure = median_ratio(times, seconds["float"])
            rows.append((name, method, f"{statistics.median(times) * 1e3:.1f} ms", f"{figure:.2f}"))
            worst = max(worst, figure) if method.startswith("clika-ref") else worst
        rows += [(name, method, "makes none", reason) for method, reason in found["lacking"].items()]
        peers = [
            median_ratio(seconds["clika-ref"], seconds[method]) for method in ("NNCF", "torchao") if method in seconds
        ]
        compared = max(compared, *peers) if peers else compared
    title = "One step: forward, backward, SGD; in turn, one thread, processor time"
    print_table(("model", "method", "step", "times a float step"), rows, title=title)
    print(f"Worst ratio to float: {format_verdict(worst, LIMIT)}")
    print(f"Worst ratio to a peer: {format_verdict(compared, 1.0)}" if compared else "No peer is installed")
