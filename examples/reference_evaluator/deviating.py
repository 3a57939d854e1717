"""What the evaluator computes where it deviates: the arguments of the operator, in PyTorch."""

import torch


def log_of_softmax(x: torch.Tensor, *, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return ``log(softmax(x))`` in the dtype of the result, as two functions that round one after the other."""
    return torch.log(torch.softmax(x, dim, dtype=dtype))
