"""Random tensors that depend on their seed only, not on earlier draws of a test."""

import torch


def randn(*shape, seed=0):
    """Return normal numbers in a shape, drawn with a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def draw_batches(count, *shape, seed=0):
    """Return batches of normal numbers in a shape, drawn in turn from one generator."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(count)]
