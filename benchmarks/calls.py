"""Calls of one compiled model and of its original in turn: ``python -m benchmarks.calls "resnet18 x 1" 60``."""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.measuring import measure_processor_seconds, run_in_turn
from benchmarks.models import MODELS
from clika_ref import clika_compile

WARM_UP = 5


class _Encoder(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)


def _resnet(batch: int) -> tuple[torch.nn.Module, torch.Tensor]:
    return MODELS["resnet18"]().make(), torch.randn(batch, 3, 224, 224)


def _encoder(width: int, length: int) -> tuple[torch.nn.Module, torch.Tensor]:
    return _Encoder(width).eval(), torch.randn(4, length, width)


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
    module = clika_compile(copy.deepcopy(eager), tracing_inputs=[x, x[: max(1, len(x) // 2)]] if len(x) > 1 else [x])
    with torch.no_grad():
        candidates = {
            "clika-ref": lambda: measure_processor_seconds(lambda: module(x)),
            "eager": lambda: measure_processor_seconds(lambda: eager(x)),
        }
        run_in_turn(candidates, WARM_UP)
        return run_in_turn(candidates, int(rounds))


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
