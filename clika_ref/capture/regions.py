"""Autocast regions as explicit casts: which dtype autocast would cast the operands of a call to."""

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
"""Device type, dtype, and whether autocast keeps what it casts."""

CASTS = (torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype)

OPAQUE: dict[torch._ops.OpOverload, str] = {
    **dict.fromkeys(SHAPES, "a recurrent network"),
    torch.ops.aten.bilinear.default: "a bilinear layer",
    torch.ops.aten._trilinear.default: "a trilinear product",
}
"""Calls that a graph keeps whole, and inside which autocast casts: at each position, or for products of matrices."""

UNKNOWN = 8
"""What stands in for a size that depends on data."""


class _Reached(Exception):  # noqa: N818 - no error
    """Ends a call whose operands are cast."""


class _Casts(TorchDispatchMode):
    """Notes the dtypes that a call casts to: of whatever it computes, or of its operands, and ends it there."""

    def __init__(self, *, of_operands: bool) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype | None] = []
        self.of_operands = of_operands

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in CASTS:
            self.dtypes.append((kwargs or {}).get("dtype"))
        elif self.of_operands and func is not torch.ops.prim.device.default:  # fake tensors are asked before each call
            raise _Reached
        return func(*args, **(kwargs or {}))


def region_casts(target: torch._ops.OpOverload, node: fx.Node, region: Region) -> torch.dtype | None:
    """Return the dtype that autocast casts the float operands of a call to, None where it leaves them.

    Autocast itself is asked, on fake tensors: its lists of operators are not public.

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
    """Whether autocast, which does nothing for a call, casts for calls that it is made of."""
    if target in OPAQUE or _is_listed(target, region) or not target.has_kernel_for_dispatch_key(COMPOSITE):
        return False
    inside = _casts(target, node, region)
    return bool(inside) and inside != _casts(target, node, None)  # the others are the call's own


def device_kind(device: torch.device | None) -> str:
    """Return the kind of device whose autocast regions reach a graph; others change nothing there."""
    return device.type if device is not None else "cpu"


def region_around(device: torch.device | None) -> Region | None:
    """Return the autocast region that this thread is in; None where there is none for a device."""
    kind = device_kind(device)
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


def autocast(region: Region) -> torch.autocast:
    """Return the context that a region is."""
    device, dtype, _ = region
    return torch.autocast(device, dtype=dtype)


def _is_listed(target: torch._ops.OpOverload, region: Region) -> bool:
    """Whether autocast stands before the call itself, not only before calls that it is made of."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), f"Autocast{region[0].upper()}")


def _casts(
    target: torch._ops.OpOverload, node: fx.Node, region: Region | None, *, of_operands: bool = False
) -> list[torch.dtype | None] | None:
    """Return the dtypes of the casts of a call, or None where it fails, as for operands that only autocast makes alike.

    It is made on stand-ins, whose environment is their own: nothing asked of their sizes guards the trace.
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
    """Keep fake tensors from printing why a call fails."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _stand_in(fake: Any) -> Any:
    """Return a tensor or number of the sizes that were traced, none of which is a symbol."""
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
