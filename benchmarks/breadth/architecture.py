"""An entry of the list: a model with random weights, its inputs, and the sizes that are dynamic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Sizes = tuple[int, ...]

Arguments = Mapping[str, Any] | tuple[Any, ...]
"""Keyword or positional arguments of a call."""

MakeInputs = Callable[..., Arguments]
"""Makes the arguments of a call for given sizes."""

TEXT_LENGTHS = ((1, 8), (2, 17)), (3, 11)
BATCHES = ((1,), (2,)), (3,)
IMAGES = ((1, 64, 64), (2, 96, 128)), (3, 128, 96)
LARGE_IMAGES = ((1, 96, 128), (2, 128, 160)), (3, 160, 96)
SEQUENCE_PAIRS = ((1, 8, 5), (2, 17, 9)), (3, 11, 7)
SOUNDS = ((1, 800), (2, 1200)), (3, 1010)
"""The sizes of two inputs to trace, and sizes that were never traced. All sizes that differ are dynamic."""


@dataclass(frozen=True)
class Architecture:
    """A model with random weights, and what must be dynamic."""

    build: Callable[[], nn.Module]
    """Makes the model."""
    inputs: MakeInputs
    """Makes inputs of given sizes."""
    sizes: tuple[tuple[Any, Any], Any]
    """The sizes of two inputs to trace, and sizes that were never traced."""
    dynamic: str
    """The sizes that are dynamic, in words."""


@torch.no_grad()
def set_statistics(norms: Iterable[Any], run: Callable[[], object]) -> None:
    """Set the running statistics of batch norms to those of their inputs in a run, one after the other."""

    def take_input(norm: Any, args: tuple[Tensor]) -> None:
        var, mean = torch.var_mean(args[0], [d for d in range(args[0].ndim) if d != 1])
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(var.nan_to_num(1))

    hooks = [norm.register_forward_pre_hook(take_input) for norm in norms]
    run()
    for hook in hooks:
        hook.remove()


def make_images(batch: int, height: int = 64, width: int = 64) -> dict[str, Tensor]:
    """Return images as the argument ``x``."""
    return {"x": torch.randn(batch, 3, height, width)}


def make_tokens(batch: int, length: int) -> Tensor:
    """Return token ids that are no special token."""
    return torch.randint(3, 90, (batch, length))


def make_text(batch: int, length: int) -> dict[str, Tensor]:
    """Return text with padding at the end of the first row."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, length // 2 + 1 :] = 0
    return {"input_ids": make_tokens(batch, length), "attention_mask": mask}
