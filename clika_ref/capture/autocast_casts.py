"""Convert autocast regions to explicit casts: find the dtype that autocast casts the operands of a call to."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, optimization_hint

from clika_ref.capture.forms.composites import PYTHON_FORMS, SHAPE_ONLY_FORMS
from clika_ref.core.errors import ModelError
from clika_ref.torch_internals.operators import OpOverload, has_kernel, is_composite
from clika_ref.torch_internals.tensors import FakeTensorMode, TorchDispatchMode

AutocastRegion = tuple[Any, ...]
"""Device type, dtype, and whether autocast caches its casts."""

CAST_OVERLOADS = (torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype)

OPAQUE_CALLS: dict[OpOverload, str] = {
    **dict.fromkeys(SHAPE_ONLY_FORMS, "a recurrent network"),
    torch.ops.aten.bilinear.default: "a bilinear layer",
    torch.ops.aten._trilinear.default: "a trilinear product",
}
"""Calls that a graph does not split, although autocast casts inside them: at each step, or for matrix products."""

DATA_DEPENDENT_SIZE = 8
"""The size assumed for data-dependent dims."""


class _StopCall(Exception):  # noqa: N818 - no error
    """Ends a call at its first operation that is not a cast."""


class _CastRecorder(TorchDispatchMode):
    """Records the dtypes that a call casts to: all, or only those of its operands, ending the call after them."""

    def __init__(self, *, of_operands: bool) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype | None] = []
        self.of_operands = of_operands

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in CAST_OVERLOADS:
            self.dtypes.append((kwargs or {}).get("dtype"))
        elif self.of_operands and func is not torch.ops.prim.device.default:  # fake tensors call it before each call
            raise _StopCall
        return func(*args, **(kwargs or {}))


def find_cast_dtype(target: OpOverload, node: fx.Node, region: AutocastRegion) -> torch.dtype | None:
    """Return the dtype that autocast casts the float operands of a call to, or None if it does not cast them.

    Autocast itself runs on fake tensors, because its lists of operators are not public.

    Raises:
        ModelError: the call is one of `OPAQUE_CALLS`.
    """
    if target in OPAQUE_CALLS:
        raise ModelError(
            f"{OPAQUE_CALLS[target]} inside torch.autocast is not supported. Call it with x.float() inside "
            f"torch.autocast({region[0]!r}, enabled=False)."
        )
    if not _has_autocast_kernel(target, region):
        return None
    found = _record_casts(target, node, region, of_operands=True)
    return found[0] if found else None


def has_inner_casts(target: OpOverload, node: fx.Node, region: AutocastRegion) -> bool:
    """Whether autocast leaves a call alone, but casts the operands of its inner calls."""
    if target in OPAQUE_CALLS or _has_autocast_kernel(target, region) or not is_composite(target):
        return False
    inside = _record_casts(target, node, region)
    return bool(inside) and inside != _record_casts(target, node, None)  # the others are the call's own


def autocast_device_type(device: torch.device | None) -> str:
    """Return the device type whose autocast regions affect a graph; other regions have no effect on it."""
    return device.type if device is not None else "cpu"


def active_region(device: torch.device | None) -> AutocastRegion | None:
    """Return the active autocast region of this thread for a device, or None."""
    kind = autocast_device_type(device)
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


def make_autocast(region: AutocastRegion) -> torch.autocast:
    """Return the autocast context of a region."""
    device, dtype, _ = region
    return torch.autocast(device, dtype=dtype)


def _has_autocast_kernel(target: OpOverload, region: AutocastRegion) -> bool:
    """Whether autocast has a kernel for the call itself, not only for its inner calls."""
    return has_kernel(target, f"Autocast{region[0].upper()}")


def _record_casts(
    target: OpOverload, node: fx.Node, region: AutocastRegion | None, *, of_operands: bool = False
) -> list[torch.dtype | None] | None:
    """Return the dtypes of the casts in a call, or None if it fails: some operands match only after autocast's casts.

    The operands are fake tensors in their own environment, so no condition on their sizes becomes a guard of the trace.
    """
    recorder = _CastRecorder(of_operands=of_operands)
    with FakeTensorMode(shape_env=ShapeEnv()), torch.no_grad(), _silence_fake_tensors():
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _make_concrete(n.meta.get("val")))
        try:
            with make_autocast(region) if region else nullcontext(), recorder, suppress(_StopCall):
                PYTHON_FORMS.get(target, target)(*args, **kwargs)
        except Exception:  # noqa: BLE001 - kernels may raise anything
            return None
    return recorder.dtypes


@contextmanager
def _silence_fake_tensors() -> Iterator[None]:
    """Suppress the log messages of fake tensors about failed calls."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _make_concrete(fake: Any) -> Any:
    """Return a tensor or number with the traced sizes, and a hint in place of each symbol."""
    if isinstance(fake, torch.SymInt):
        return optimization_hint(fake, DATA_DEPENDENT_SIZE)
    if isinstance(fake, torch.SymFloat | torch.SymBool):
        return fake.node.pytype(fake.node.hint or 0)
    if isinstance(fake, list | tuple):
        return type(fake)(map(_make_concrete, fake))
    if not isinstance(fake, torch.Tensor):
        return fake
    sizes, strides = (
        [optimization_hint(n, DATA_DEPENDENT_SIZE) for n in found] for found in (fake.shape, fake.stride())
    )
    return torch.empty_strided(sizes, strides, dtype=fake.dtype, device=fake.device)
