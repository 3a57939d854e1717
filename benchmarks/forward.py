"""One call of a ClikaModule against one call of the original module."""

from __future__ import annotations

import copy
import statistics
import warnings
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.measuring import Names, format_verdict, measure_processor_seconds, run_in_fresh_process, run_in_turn
from benchmarks.models import MODELS, Encoder
from clika_ref import clika_compile
from clika_ref.reporting.tables import print_table

LIMIT = 1.05

WARM_UP = 5


def _resnet(batch: int) -> tuple[torch.nn.Module, torch.Tensor]:
    return MODELS["resnet18"]().make(), torch.randn(batch, 3, 224, 224)


def _encoder(width: int, length: int) -> tuple[torch.nn.Module, torch.Tensor]:
    return Encoder(width, 6).eval(), torch.randn(4, length, width)


CALLS: dict[str, Callable[[], tuple[torch.nn.Module, torch.Tensor]]] = {
    "resnet18 x 1": partial(_resnet, 1),
    "resnet18 x 8": partial(_resnet, 8),
    "encoder 256 x 64": partial(_encoder, 256, 64),
    "encoder 64 x 16": partial(_encoder, 64, 16),
}


def main(name: str, rounds: str) -> dict[str, list[float]]:
    """Return the seconds of each call."""
    warnings.simplefilter("ignore")
    torch.backends.mha.set_fastpath_enabled(False)  # one fused call that no export shows; off for both
    eager, x = CALLS[name]()
    ours = clika_compile(copy.deepcopy(eager), tracing_inputs=[x, x[: max(1, len(x) // 2)]] if len(x) > 1 else [x])
    with torch.no_grad():
        candidates = {
            "ours": lambda: measure_processor_seconds(lambda: ours(x)),
            "eager": lambda: measure_processor_seconds(lambda: eager(x)),
        }
        run_in_turn(candidates, WARM_UP)
        return run_in_turn(candidates, int(rounds))


def run(names: Names = None, rounds: int = 60) -> None:
    """Time of one call of a ClikaModule, against the original module."""
    rows = []
    worst = 0.0
    for name in names or CALLS:
        found = run_in_fresh_process("benchmarks.forward", name, str(rounds))
        medians = {who: statistics.median(found[who]) for who in ("ours", "eager")}
        figure = medians["ours"] / medians["eager"]
        worst = max(worst, figure)
        own = [f"{medians[who] * 1e3:.2f} ms" for who in ("ours", "eager")]
        rows.append((name, *own, f"{figure:.3f}"))
    title = "One call, in turn; torch.backends.mha.set_fastpath_enabled(False) for both"
    print_table(("model", "ClikaModule", "eager", "ratio"), rows, title=title)
    print(f"Worst ratio: {format_verdict(worst, LIMIT)}")
