"""Tensors: fake ones, the modes that see each call, and attributes of tensors."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import torch
from torch._C import DisableTorchFunction as DisableTorchFunction
from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch_wrapped_tensor
from torch._guards import detect_fake_mode as detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import disable_fake_tensor_cache as disable_fake_tensor_cache
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def get_version(tensor: torch.Tensor) -> int:
    """Return the number of writes to a tensor and its views."""
    return tensor._version


def get_storage_id(tensor: torch.Tensor) -> int:
    """Return the identity of the storage that a tensor and its views share."""
    return tensor.untyped_storage()._cdata


def is_any_autocast_enabled() -> bool:
    """Whether autocast is enabled for any device."""
    return torch._C._is_any_autocast_enabled()
