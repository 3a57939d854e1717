"""Compare one call of a ClikaModule with one call of the original module."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.measuring import format_verdict, run_in_fresh_process
from clika_ref.reporting.tables import print_table

LIMIT = 1.05

NAMES = ("resnet18 x 1", "resnet18 x 8", "encoder 256 x 64", "encoder 64 x 16")


def run(names: Sequence[str] | None = None, rounds: int = 60) -> None:
    """Measure and print one row for each model."""
    rows = []
    worst = 0.0
    for name in names or NAMES:
        found = run_in_fresh_process("benchmarks.calls", name, str(rounds))
        medians = {who: statistics.median(found[who]) for who in ("clika-ref", "eager")}
        figure = medians["clika-ref"] / medians["eager"]
        worst = max(worst, figure)
        own = [f"{medians[who] * 1e3:.2f} ms" for who in ("clika-ref", "eager")]
        rows.append((name, *own, f"{figure:.3f}"))
    title = "One call, in turn; torch.backends.mha.set_fastpath_enabled(False) for both"
    print_table(("model", "ClikaModule", "eager", "ratio"), rows, title=title)
    print(f"Worst ratio: {format_verdict(worst, LIMIT)}")
