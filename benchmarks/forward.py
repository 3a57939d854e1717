"""Compare the time of one call of a ClikaModule with a call of the original module."""

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

MAX_RATIO = 1.05

WARM_UP_ROUNDS = 5


def _make_resnet(batch: int) -> tuple[torch.nn.Module, torch.Tensor]:
    return MODELS["resnet18"]().make(), torch.randn(batch, 3, 224, 224)


def _make_encoder(width: int, length: int) -> tuple[torch.nn.Module, torch.Tensor]:
    return Encoder(width, 6).eval(), torch.randn(4, length, width)


CALLS: dict[str, Callable[[], tuple[torch.nn.Module, torch.Tensor]]] = {
    "resnet18 x 1": partial(_make_resnet, 1),
    "resnet18 x 8": partial(_make_resnet, 8),
    "encoder 256 x 64": partial(_make_encoder, 256, 64),
    "encoder 64 x 16": partial(_make_encoder, 64, 16),
}


def main(name: str, rounds: str) -> dict[str, list[float]]:
    """Return the seconds of each call."""
    warnings.simplefilter("ignore")
    torch.backends.mha.set_fastpath_enabled(False)  # a fused call that exports cannot represent; off for both
    eager, x = CALLS[name]()
    module = clika_compile(copy.deepcopy(eager), tracing_inputs=[x, x[: max(1, len(x) // 2)]] if len(x) > 1 else [x])
    with torch.no_grad():
        candidates = {
            "clika-ref": lambda: measure_processor_seconds(lambda: module(x)),
            "eager": lambda: measure_processor_seconds(lambda: eager(x)),
        }
        run_in_turn(candidates, WARM_UP_ROUNDS)
        return run_in_turn(candidates, int(rounds))


def run(names: Names = None, rounds: int = 60) -> None:
    """Compare the time of one call of a ClikaModule with a call of the original module."""
    rows = []
    worst = 0.0
    for name in names or CALLS:
        found = run_in_fresh_process("benchmarks.forward", name, str(rounds))
        medians = {name: statistics.median(seconds) for name, seconds in found.items()}
        ratio = medians["clika-ref"] / medians["eager"]
        worst = max(worst, ratio)
        rows.append((name, *(f"{seconds * 1e3:.2f} ms" for seconds in medians.values()), f"{ratio:.3f}"))
    title = "One call, in turn, processor time; torch.backends.mha.set_fastpath_enabled(False) for both"
    print_table(("model", "clika-ref", "eager", "ratio"), rows, title=title)
    print(f"Largest ratio: {format_verdict(worst, MAX_RATIO)}")
