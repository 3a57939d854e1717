"""Save and restore a tensor: its storage, shape, dtype, elements, and whether it requires gradients."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from clika_ref.torch_internals.tensors import get_storage_id, is_functorch_wrapped_tensor


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a model, and its saved properties."""

    name: str
    """Its name in the model."""
    tensor: torch.Tensor
    is_state: bool
    """Whether it is a parameter or buffer, or shares the memory of one, as opposed to a plain tensor."""
    data: torch.Tensor
    """An alias of the same memory: it sees writes there, but keeps the original shape and storage."""
    requires_grad: bool
    elements: torch.Tensor | None
    """A copy of the stored elements; None if another mechanism undoes writes."""

    def is_changed(self) -> bool:
        """Whether the tensor has other elements, another shape or another dtype."""
        return self.elements is not None and not is_same(narrow_to_stored(self.tensor), self.elements)

    def has_new_elements(self) -> bool:
        """Whether only elements of the tensor changed, each of which has a place of its own in memory."""
        own = narrow_to_stored(self.tensor) is self.tensor
        return own and _is_same_view(self.tensor, self.data) and self.is_changed()

    def restore(self) -> None:
        """Restore the tensor: first its own memory, so that the elements are not written to another tensor's memory."""
        if not _is_same_view(self.tensor, self.data):
            self.tensor.data = self.data
        if self.elements is not None and self.is_changed():
            narrow_to_stored(self.tensor).data.copy_(self.elements)  # ``.data`` and batch norm do not count as writes
        if self.tensor.requires_grad != self.requires_grad:
            with contextlib.suppress(RuntimeError):  # a view of a tensor with a history keeps it
                (self.tensor if self.tensor.is_leaf else self.tensor.detach_()).requires_grad_(self.requires_grad)


def save_tensor(name: str, tensor: torch.Tensor, *, is_state: bool, copied: bool = True) -> SavedTensor:
    """Return a snapshot of a tensor, with a copy of its elements if ``copied``."""
    elements = narrow_to_stored(tensor).detach().clone() if copied else None
    return SavedTensor(name, tensor, is_state, tensor.detach(), tensor.requires_grad, elements)


def storage_id(tensor: Any) -> int:
    """Return the identity of a tensor's storage.

    It is 0 for what has none: no tensor, sparse tensors, and wrapper tensors of ``torch.func``.
    """
    try:
        return 0 if is_functorch_wrapped_tensor(tensor) else get_storage_id(tensor)
    except (AttributeError, RuntimeError, TypeError):
        return 0


def is_same(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    """Whether two tensors have equal shapes, dtypes, devices and elements; NaN equals NaN."""
    if (tensor.dtype, tensor.shape, tensor.device) != (data.dtype, data.shape, data.device):
        return False
    tensor = tensor.detach()
    try:
        return torch.equal(tensor, data) or bool(((tensor == data) | (tensor.isnan() & data.isnan())).all())
    except RuntimeError:  # PyTorch cannot compare some dtypes, such as 4-bit ones
        return torch.equal(_to_bytes(tensor), _to_bytes(data))


def _to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(copy.untyped_storage())


def narrow_to_stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or the stored part of an expanded one: the whole cannot be written to."""
    for dim, (stride, length) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 and length > 1:
            tensor = tensor.detach().narrow(dim, 0, 1)
    return tensor


def _is_same_view(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    """Whether two tensors view the same elements of the same memory."""
    if storage_id(tensor) != storage_id(data) or (tensor.dtype, tensor.shape) != (data.dtype, data.shape):
        return False
    return (tensor.stride(), tensor.storage_offset()) == (data.stride(), data.storage_offset())
