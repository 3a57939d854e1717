"""Modules: their dictionaries of parameters, buffers and submodules, hooks, and base classes of layers."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

BATCH_NORM = _BatchNorm
"""The base class of batch norms of every rank."""

DROPOUT = _DropoutNd
"""The base class of dropouts of every rank."""

TORCHSCRIPT_TYPES = (torch.jit.ScriptModule, torch.jit.ScriptFunction, torch._C.ScriptMethod)
"""The classes of modules and functions that ``torch.jit`` compiled."""


def get_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dictionary of a module's own parameters, by attribute name."""
    return module._parameters


def get_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the dictionary of a module's own buffers, by attribute name."""
    return module._buffers


def get_submodules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dictionary of a module's own submodules, by attribute name."""
    return module._modules


def get_unsaved_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that are not in its state dict."""
    return module._non_persistent_buffers_set


def get_buffer_registration_hooks() -> MutableMapping[int, Any]:
    """Return the hooks that are called when any module registers a buffer."""
    return torch_module._global_buffer_registration_hooks


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a module has a hook for its backward pass."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether a parameter has a hook for its gradient."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))
