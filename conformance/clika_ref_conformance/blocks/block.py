"""Description of a block: its module, its inputs for a batch size, and whether its result selects classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

MakeInputs = Callable[[int, torch.Generator], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class BlockSpec:
    """Named block. ``inputs`` creates the inputs of one call; their first dim is the batch."""

    name: str
    module: Callable[[], nn.Module]
    inputs: MakeInputs
    chooses: bool = False
    """Whether the last dim of its first result holds scores of classes, or of experts."""

    def build(self) -> nn.Module:
        """Return the module in evaluation mode, with the same weights every time and non-trivial batch norms."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
            module = self.module().eval()
            for part in module.modules():
                if isinstance(part, nn.BatchNorm2d) and part.running_mean is not None and part.running_var is not None:
                    nn.init.normal_(part.running_mean, std=0.2)
                    nn.init.uniform_(part.running_var, 0.5, 2.0)
                    nn.init.uniform_(part.weight, 0.5, 1.5)
                    nn.init.normal_(part.bias, std=0.2)
        return module


def make_normal_inputs(*shape: int) -> MakeInputs:
    """Return a function that creates one input of normally distributed elements, ``[batch, *shape]``."""
    return lambda batch, generator: (torch.randn(batch, *shape, generator=generator),)
