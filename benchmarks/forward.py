"""One call of a ClikaModule against one call of the original module."""

from __future__ import annotations

import statistics

from benchmarks.measuring import Names, in_fresh_process, verdict
from clika_ref.reporting.tables import print_table

LIMIT = 1.05

NAMES = ("resnet18 x 1", "resnet18 x 8", "encoder 256 x 64", "encoder 64 x 16")


def run(names: Names = None, rounds: int = 60) -> None:
    """Time of one call of a ClikaModule, against the original module."""
    rows = []
    worst = 0.0
    for name in names or NAMES:
        found = in_fresh_process("benchmarks.calls", name, str(rounds))
        medians = {who: statistics.median(found[who]) for who in ("ours", "eager")}
        figure = medians["ours"] / medians["eager"]
        worst = max(worst, figure)
        own = [f"{medians[who] * 1e3:.2f} ms" for who in ("ours", "eager")]
        rows.append((name, *own, f"{figure:.3f}"))
    title = "One call, in turn; torch.backends.mha.set_fastpath_enabled(False) for both"
    print_table(("model", "ClikaModule", "eager", "ratio"), rows, title=title)
    print(f"Worst ratio: {verdict(worst, LIMIT)}")
