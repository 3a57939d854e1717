"""Autocast regions as explicit casts: which dtype autocast would cast the operands of a call to."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

CASTS = (torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype)


class _FirstCast(TorchDispatchMode):
    """Notes the dtype of the first cast that a call makes of a float operand."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype: torch.dtype | None = None
        self.started = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in CASTS and not self.started:
            self.dtype = self.dtype or (kwargs or {}).get("dtype")
        elif func is not torch.ops.prim.device.default:  # fake tensors ask for the device before each call
            self.started = True
        return func(*args, **(kwargs or {}))


def region_casts(target: torch._ops.OpOverload, node: fx.Node, region: tuple[Any, ...] | None) -> torch.dtype | None:
    """Return the dtype that autocast casts the float operands of a call to, None where it leaves them.

    Autocast itself is asked, on meta tensors: its lists of operators are not public.
    """
    assert region is not None
    device, dtype, _ = region
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _meta(n.meta.get("val")))
    recorder = _FirstCast()
    with torch.autocast(device, dtype=dtype), recorder, torch.no_grad():
        target(*args, **kwargs)
    return recorder.dtype


def _meta(fake: Any) -> Any:
    """Return a small stand-in on the region's device type, whose sizes are those of the trace."""
    if not isinstance(fake, torch.Tensor):
        return int(fake) if isinstance(fake, torch.SymInt) else fake
    return fake
