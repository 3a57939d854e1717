"""Compare the time of one call of a model in pieces with PyTorch's eager backend and the same graph breaks."""

from __future__ import annotations

import copy
import statistics
import warnings
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.measuring import Names, format_verdict, measure_processor_seconds, run_in_fresh_process, run_in_turn
from clika_ref import clika_compile
from clika_ref.reporting.tables import print_table

MAX_RATIO = 1.1

WARM_UP_ROUNDS = 5

CALLS_PER_SAMPLE = 5

WIDTHS = {"width 64": 64, "width 256": 256}
"""Widths of the layers, by row."""


class BrokenLayers(nn.Module):
    """Four blocks with a check of the elements after each of the first three: a graph break."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks, with a break after each of the first three."""
        x = x + self.blocks[0](x)
        if x.isnan().any():
            return x
        x = x + self.blocks[1](x)
        if x.isnan().any():
            return x
        x = x + self.blocks[2](x)
        if x.isnan().any():
            return x
        return x + self.blocks[3](x)


def main(name: str, rounds: str) -> dict[str, list[float]]:
    """Return the seconds of each call."""
    warnings.simplefilter("ignore")
    model = BrokenLayers(WIDTHS[name]).eval()
    x = torch.randn(8, 64, WIDTHS[name])
    with torch.no_grad():
        module = clika_compile(copy.deepcopy(model), tracing_inputs=[x, x[:4]], fullgraph=False)
        eager = torch.compile(model, backend="eager", dynamic=True)

        def run_calls(call: Callable[..., torch.Tensor]) -> float:
            return measure_processor_seconds(lambda: [call(x) for _ in range(CALLS_PER_SAMPLE)])

        candidates = {"clika-ref": lambda: run_calls(module), "eager backend": lambda: run_calls(eager)}
        run_in_turn(candidates, WARM_UP_ROUNDS)
        return run_in_turn(candidates, int(rounds))


def run(names: Names = None, rounds: int = 60) -> None:
    """Compare the time of one call of a model in pieces with PyTorch's eager backend and the same graph breaks."""
    rows = []
    worst = 0.0
    for name in names or WIDTHS:
        found = run_in_fresh_process("benchmarks.pieces", name, str(rounds))
        medians = {name: statistics.median(seconds) / CALLS_PER_SAMPLE for name, seconds in found.items()}
        ratio = medians["clika-ref"] / medians["eager backend"]
        worst = max(worst, ratio)
        rows.append((name, *(f"{seconds * 1e3:.2f} ms" for seconds in medians.values()), f"{ratio:.3f}"))
    title = "One call of a model with 3 graph breaks, in turn, after a warm-up; processor time"
    print_table(("model", "clika-ref", "eager backend", "ratio"), rows, title=title)
    print(f"Largest ratio: {format_verdict(worst, MAX_RATIO)}")
