"""A tensor as it was: where its elements lie, its shape and dtype, its elements, and whether it requires gradients."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a model, and what it was when it was saved."""

    name: str
    """What the model calls it."""
    tensor: torch.Tensor
    is_state: bool
    """Whether it is a parameter or a buffer, or lies in the memory of one, as opposed to a plain tensor."""
    data: torch.Tensor
    """The same elements in the same memory: what is written there is seen, what else the tensor is made to be not."""
    requires_grad: bool
    elements: torch.Tensor | None
    """A copy of those that memory holds; None where somebody else undoes what is written."""

    def is_changed(self) -> bool:
        """Whether the tensor holds other elements, or others in number or kind."""
        return self.elements is not None and not same(stored(self.tensor), self.elements)

    def restore(self) -> None:
        """Let the tensor be what it was: first in its own memory, so that nothing is written to that of another."""
        if not _is_bound(self.tensor, self.data):
            self.tensor.data = self.data
        if self.elements is not None and self.is_changed():
            stored(self.tensor).data.copy_(self.elements)  # ``.data`` and batch norm write without raising the version
        if self.tensor.requires_grad != self.requires_grad:
            with contextlib.suppress(RuntimeError):  # a view of what has a history keeps it
                (self.tensor if self.tensor.is_leaf else self.tensor.detach_()).requires_grad_(self.requires_grad)


def saved(name: str, tensor: torch.Tensor, *, is_state: bool, copied: bool = True) -> SavedTensor:
    """Return a tensor as it is now, with a copy of its elements where it is ``copied``."""
    elements = stored(tensor).detach().clone() if copied else None
    return SavedTensor(name, tensor, is_state, tensor.detach(), tensor.requires_grad, elements)


def memory(tensor: Any) -> int:
    """Return which memory a tensor lies in, 0 where it has none, as a sparse tensor, or is none."""
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, AttributeError):
        return 0


def same(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    """Whether two tensors are alike and hold the same elements; NaN is the same as NaN."""
    if (tensor.dtype, tensor.shape, tensor.device) != (data.dtype, data.shape, data.device):
        return False
    tensor = tensor.detach()
    try:
        return torch.equal(tensor, data) or bool(((tensor == data) | (tensor.isnan() & data.isnan())).all())
    except RuntimeError:  # PyTorch compares no elements of such a type, as of four bits
        return torch.equal(_bytes(tensor), _bytes(data))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(copy.untyped_storage())


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or the part of an expanded one that memory holds: the whole cannot be written to."""
    for dim, (stride, length) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 and length > 1:
            tensor = tensor.detach().narrow(dim, 0, 1)
    return tensor


def _is_bound(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    """Whether two tensors are the same elements of the same memory."""
    if memory(tensor) != memory(data) or (tensor.dtype, tensor.shape) != (data.dtype, data.shape):
        return False
    return (tensor.stride(), tensor.storage_offset()) == (data.stride(), data.storage_offset())
