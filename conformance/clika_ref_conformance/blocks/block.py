"""What a block is: a module, the inputs that it takes for a batch, and whether its result chooses classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

MakeInputs = Callable[[int, torch.Generator], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Block:
    """A block under its name; ``inputs`` makes those of one call for a batch size, whose first side is the batch."""

    name: str
    module: Callable[[], nn.Module]
    inputs: MakeInputs
    chooses: bool = False
    """Whether the last side of its first result holds the scores of classes, or of experts."""

    def build(self) -> nn.Module:
        """Return the module in evaluation mode, with the same weights every time and batch norms that do something."""
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


def normal(*shape: int) -> MakeInputs:
    """Return a maker of one input of normal elements, ``[batch, *shape]``."""
    return lambda batch, generator: (torch.randn(batch, *shape, generator=generator),)
