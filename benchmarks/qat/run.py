"""Time steps of training on each road, and print how many times as long as in float they take."""

from __future__ import annotations

import statistics

from benchmarks.measuring import Names, in_fresh_process, ratio, verdict
from clika_ref.reporting.tables import print_table

LIMIT = 2.0
"""Of a float step (issue 6)."""

NAMES = ("resnet18", "encoder")


def run(names: Names = None, rounds: int = 9) -> None:
    """One step of training in integers, against float, NNCF's and torchao's; not part of all."""
    rows: list[tuple[str, ...]] = []
    worst, compared = 0.0, 0.0
    for name in names or NAMES:
        found = in_fresh_process("benchmarks.qat.steps", name, str(rounds))
        seconds = found["seconds"]
        for method, times in seconds.items():
            figure = ratio(times, seconds["float"])
            rows.append((name, method, f"{statistics.median(times) * 1e3:.1f} ms", f"{figure:.2f}"))
            worst = max(worst, figure) if method.startswith("ours") else worst
        rows += [(name, method, "makes none", reason) for method, reason in found["lacking"].items()]
        peers = [ratio(seconds["ours"], seconds[method]) for method in ("NNCF", "torchao") if method in seconds]
        compared = max(compared, *peers) if peers else compared
    title = "One step: forward, backward, SGD; in turn, one thread, processor time"
    print_table(("model", "road", "step", "times a float step"), rows, title=title)
    print(f"Worst ratio to float: {verdict(worst, LIMIT)}")
    print(f"Worst ratio to a peer: {verdict(compared, 1.0)}" if compared else "No peer is installed")
