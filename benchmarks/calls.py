"""Calls of one compiled model and of its original in turn."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.measuring import in_turn, processor_seconds
from benchmarks.models import MODELS, Encoder
from clika_ref import clika_compile

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
            "ours": lambda: processor_seconds(lambda: ours(x)),
            "eager": lambda: processor_seconds(lambda: eager(x)),
        }
        in_turn(candidates, WARM_UP)
        return in_turn(candidates, int(rounds))
