"""Measure how the processor time of each stage grows with the graph: at most 12x for 10x the nodes."""

from __future__ import annotations

import itertools
import statistics
from typing import Annotated

import typer

from benchmarks.measuring import format_verdict, run_in_fresh_process
from clika_ref.reporting.tables import print_table

SIZES = [1_000, 10_000, 100_000]

MAX_GROWTH = 12.0
"""Of the time, for 10x the nodes."""

MIN_COUNTED_S = 0.1
"""Stages with less time on the larger graph do not count: caches that fit only the smaller graph decide there."""


Sizes = Annotated[list[int] | None, typer.Argument(help="Numbers of nodes, ascending.")]


def run(sizes: Sizes = None) -> None:
    """Measure the time of each stage on graphs of 1,000, 10,000 and 100,000 nodes."""
    sizes = sizes or SIZES
    found = {size: _measure_stages(size) for size in sizes}
    pairs = list(itertools.pairwise(sizes))
    rows = []
    worst, slowest = 0.0, "none"
    for stage in found[sizes[0]]:
        seconds = [found[size][stage] for size in sizes]
        steps = zip(pairs, itertools.pairwise(seconds), strict=True)
        growth = [later / earlier * 10 * small / large for (small, large), (earlier, later) in steps]
        rows.append((stage, *(f"{s:.3f} s" for s in seconds), *(f"{g:.1f}x" for g in growth)))
        for figure, later in zip(growth, seconds[1:], strict=True):
            if later > MIN_COUNTED_S and figure > worst:
                worst, slowest = figure, stage
    columns = ("stage", *(f"{size:,}" for size in sizes), *(f"{n:,} to {m:,}" for n, m in pairs))
    print_table(columns, rows, title="Stages by number of traced calls, processor time; growth for 10x the nodes")
    print(f"Largest growth, {slowest}: {format_verdict(worst, MAX_GROWTH)}")


REPEATS = 3
"""Processes per size. The median of each stage counts, since a pass takes only milliseconds on the small graph."""


def _measure_stages(size: int) -> dict[str, float]:
    runs = [run_in_fresh_process("benchmarks.stages", str(size)) for _ in range(REPEATS)]
    return {stage: statistics.median(run[stage] for run in runs) for stage in runs[0]}
