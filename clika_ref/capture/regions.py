"""Convert autocast regions to explicit casts: find the dtype that autocast casts the operands of a call to."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, optimization_hint
from torch.utils._python_dispatch import TorchDispatchMode

from clika_ref.capture.composites import COMPOSITE, FORMS, SHAPES
from clika_ref.core.errors import ModelError

Region = tuple[Any, ...]
"""Device type, dtype, and whether autocast caches its casts."""

CASTS = (torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype)

OPAQUE: dict[torch._ops.OpOverload, str] = {
    **dict.fromkeys(SHAPES, "a recurrent network"),
    torch.ops.aten.bilinear.default: "a bilinear layer",
    torch.ops.aten._trilinear.default: "a trilinear product",
}
"""Calls that a graph does not split, although autocast casts inside them: at each step, or for matrix products."""

UNKNOWN = 8
"""The size assumed for data-dependent dims."""


class _Reached(Exception):  # noqa: N818 - no error
    """Ends a call at its first operation that is not a cast."""


class _Casts(TorchDispatchMode):
    """Records the dtypes that a call casts to: all, or only those of its operands, ending the call after them."""

    def __init__(self, *, of_operands: bool) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype | None] = []
        self.of_operands = of_operands

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in CASTS:
            self.dtypes.append((kwargs or {}).get("dtype"))
        elif self.of_operands and func is not torch.ops.prim.device.default:  # fake tensors call it before each call
            raise _Reached
        return func(*args, **(kwargs or {}))


def region_casts(target: torch._ops.OpOverload, node: fx.Node, region: Region) -> torch.dtype | None:
    """Return the dtype that autocast casts the float operands of a call to, or None if it does not cast them.

    Autocast itself runs on fake tensors, because its lists of operators are not public.

    Raises:
        ModelError: the call is one of `OPAQUE`.
    """
    if target in OPAQUE:
        msg = (
            f"{OPAQUE[target]} inside torch.autocast is not supported; "
            f"call it with x.float() inside torch.autocast({region[0]!r}, enabled=False)"
        )
        raise ModelError(msg)
    if not _is_listed(target, region):
        return None
    found = _casts(target, node, region, of_operands=True)
    return found[0] if found else None


def casts_within(target: torch._ops.OpOverload, node: fx.Node, region: Region) -> bool:
    """Whether autocast leaves a call alone, but casts the operands of its inner calls."""
    if target in OPAQUE or _is_listed(target, region) or not target.has_kernel_for_dispatch_key(COMPOSITE):
        return False
    inside = _casts(target, node, region)
    return bool(inside) and inside != _casts(target, node, None)  # the others are the call's own


def device_kind(device: torch.device | None) -> str:
    """Return the device type whose autocast regions affect a graph; other regions have no effect on it."""
    return device.type if device is not None else "cpu"


def region_around(device: torch.device | None) -> Region | None:
    """Return the active autocast region of this thread for a device, or None."""
    kind = device_kind(device)
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


def autocast(region: Region) -> torch.autocast:
    """Return the autocast context of a region."""
    device, dtype, _ = region
    return torch.autocast(device, dtype=dtype)


def _is_listed(target: torch._ops.OpOverload, region: Region) -> bool:
    """Whether autocast has a kernel for the call itself, not only for its inner calls."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), f"Autocast{region[0].upper()}")


def _casts(
    target: torch._ops.OpOverload, node: fx.Node, region: Region | None, *, of_operands: bool = False
) -> list[torch.dtype | None] | None:
    """Return the dtypes of the casts in a call, or None if it fails: some operands match only after autocast's casts.

    The operands are fake tensors in their own environment, so no condition on their sizes becomes a guard of the trace.
    """
    recorder = _Casts(of_operands=of_operands)
    with FakeTensorMode(shape_env=ShapeEnv()), torch.no_grad(), _silenced():
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _stand_in(n.meta.get("val")))
        try:
            with autocast(region) if region else nullcontext(), recorder, suppress(_Reached):
                FORMS.get(target, target)(*args, **kwargs)
        except Exception:  # noqa: BLE001 - kernels may raise anything
            return None
    return recorder.dtypes


@contextmanager
def _silenced() -> Iterator[None]:
    """Suppress the log messages of fake tensors about failed calls."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _stand_in(fake: Any) -> Any:
    """Return a tensor or number with the traced sizes, and a hint in place of each symbol."""
    if isinstance(fake, torch.SymInt):
        return optimization_hint(fake, UNKNOWN)
    if isinstance(fake, torch.SymFloat | torch.SymBool):
        return fake.node.pytype(fake.node.hint or 0)
    if isinstance(fake, list | tuple):
        return type(fake)(map(_stand_in, fake))
    if not isinstance(fake, torch.Tensor):
        return fake
    sizes, strides = ([optimization_hint(n, UNKNOWN) for n in found] for found in (fake.shape, fake.stride()))
    return torch.empty_strided(sizes, strides, dtype=fake.dtype, device=fake.device)
