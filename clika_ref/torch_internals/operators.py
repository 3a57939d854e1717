"""Overloads of ATen's operators: their classes, schemas, kernels and decompositions."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey
from torch._decomp import core_aten_decompositions as core_aten_decompositions
from torch._decomp import decomposition_table as decomposition_table
from torch._higher_order_ops.cond import cond_op as cond_op
from torch._higher_order_ops.scan import scan_op as scan_op
from torch._higher_order_ops.while_loop import while_loop as while_loop
from torch._higher_order_ops.while_loop import while_loop_op as while_loop_op
from torch._library.custom_ops import _maybe_get_opdef
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._prims_common import is_contiguous_or_false as is_contiguous_or_false

set_grad_enabled = torch._C._set_grad_enabled
"""The function that regions with and without gradients call."""

compute_weight_norm: Callable[..., torch.Tensor] = torch._weight_norm  # type: ignore[attr-defined]
"""``weight_norm(v, g, dim)``, as the parametrization of that name computes it."""


def get_schema(overload: OpOverload) -> torch.FunctionSchema:
    """Return the schema of an overload: its arguments, its results, whether it writes."""
    return overload._schema


def get_overload_name(overload: OpOverload) -> str:
    """Return the name of an overload among those of its operator, for example ``Tensor``."""
    return overload._overloadname


def find_schema(packet: OpOverloadPacket, name: str) -> torch.FunctionSchema:
    """Return the schema of the overload of that name; loads no overload."""
    return torch._C._get_schema(packet._qualified_op_name, "" if name == "default" else name)


def has_kernel(overload: OpOverload, key: str | None = None) -> bool:
    """Whether an overload has any kernel, or one for a dispatch key, for example ``CompositeImplicitAutograd``."""
    if key is None:
        return torch._C._dispatch_has_kernel(overload.name())
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), key)


def is_composite(overload: OpOverload) -> bool:
    """Whether an overload is computed by calls of others, in C++ or by a kernel of `set_composite_kernel`."""
    return overload.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)


def find_python_kernel(overload: OpOverload) -> Callable[..., Any] | None:
    """Return the function of an operator that ``torch.library.custom_op`` made, unless it has a backward."""
    made: Any = _maybe_get_opdef(overload)
    return None if made is None or made._backward_fn is not None else made._init_fn


ASSOCIATIVE_SCAN_MODULE = importlib.import_module("torch._higher_order_ops.associative_scan")
"""The module; an attribute of its package has the same name."""

INDUCTOR_DECOMPOSITIONS = "torch._inductor.decomposition"
"""The module that reads the composite kernels of all operators when it is imported."""


def set_composite_kernel(overload: OpOverload, kernel: Callable[..., Any] | None) -> None:
    """Set the Python kernel that calls an overload through other operators; None removes it."""
    key = DispatchKey.CompositeImplicitAutograd
    if kernel is None:
        overload.py_kernels.pop(key, None)
    else:
        overload.py_kernels[key] = kernel
    overload._dispatch_cache.clear()


def find_composite_kernel(overload: OpOverload) -> Callable[..., Any] | None:
    """Return the Python kernel that `set_composite_kernel` sets."""
    return overload.py_kernels.get(DispatchKey.CompositeImplicitAutograd)
