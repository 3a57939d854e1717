"""Padding and cropping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clika_ref.core.accuracy import EXACT
from clika_ref.core.operators import operator
from clika_ref.core.traits import OWN_QPARAMS
from clika_ref.core.types import Dim, TensorType
from clika_ref_aten.size_arithmetic import OPEN_END, clamp_to_zero, is_nonnegative, normalize_size
from clika_ref_aten.slicing import slice_dim
from clika_ref_aten.spatial import pad_all_dims

aten = torch.ops.aten

ONNX_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}
SAMPLE_DTYPES = (torch.float32, torch.float16, torch.int64, torch.int16, torch.uint8)


@operator(aten.pad.default, quant=OWN_QPARAMS, error=EXACT)
def pad_(x: Tensor, *, pad: tuple[int, ...], mode: str = "constant", value: float | None = None) -> Tensor:
    """Pad the last dim by ``pad[0]`` before and ``pad[1]`` after, the dim before it by the next two, and so on.

    Negative padding removes elements. ``mode``: ``constant`` adds ``value`` (0 if None), ``reflect`` mirrors at the
    outermost elements, ``replicate`` repeats them, ``circular`` continues from the other end.

    Raises:
        ValueError: ``circular`` padding exceeds the remaining size, where eager returns uninitialized memory.
    """
    if mode == "constant":
        return torch.constant_pad_nd(x, pad, 0 if value is None else value)
    if mode == "circular":
        _check_circular(x.shape, pad)
    return F.pad(x, pad, mode)


@pad_.onnx
def _(op, x, *, pad, mode, value):
    if mode == "circular":
        return _pad_circular(op, x, pad)
    rank, dtype = op.rank(x), op.dtype(x)
    added = _pads_per_dim(rank, [clamp_to_zero(n) for n in pad])
    if any(n != 0 for ends in added for n in ends):
        kernel = torch.int32 if dtype == torch.int16 else dtype  # ONNX Runtime cannot pad int16
        filling = op.scalar(value, kernel) if value and mode == "constant" else None
        before, after = zip(*added, strict=True)
        x = op.cast(pad_all_dims(op, op.cast(x, kernel), before, after, filling, ONNX_MODES[mode]), dtype)
    return _crop(op, x, _pads_per_dim(rank, pad), op.result.shape)


@pad_.types
def _(x, *, pad, mode, value):
    if mode == "circular":
        _check_circular(x.shape, pad)
    sizes = (
        normalize_size(n + before + after)
        for n, (before, after) in zip(x.shape, _pads_per_dim(x.rank, pad), strict=True)
    )
    return TensorType(x.dtype, tuple(sizes))


@pad_.samples
def _(draw, s):
    mode = draw(s.choice("constant", "constant", "reflect", "replicate", "circular"))
    if mode == "constant":
        x = draw(s.tensor(rank=(1, 5), size=(2, 5), dtype=(*SAMPLE_DTYPES, torch.bool)))
        pads = tuple(draw(s.choice(0, 1, 3, -1)) for _ in range(2 * draw(s.integers(1, x.rank))))
        values = (None, 0, 2.5, float("-inf")) if x.dtype.is_floating_point else (None, 1)
        return s.call(x, pad=pads, value=draw(s.choice(*values)))
    spatial = draw(s.integers(1, 3))
    x = draw(s.tensor(rank=(spatial + 1, spatial + 2), size=(3, 5), dtype=SAMPLE_DTYPES[:3]))
    return s.call(x, pad=tuple(draw(s.choice(0, 1, 2, -1)) for _ in range(2 * spatial)), mode=mode)


@pad_.from_torch(aten.constant_pad_nd.default)
def _(x, pad, value=0):
    return pad_.call(x, pad=tuple(pad), value=value)


@pad_.from_torch(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default)
def _(x, padding):
    return pad_.call(x, pad=tuple(padding), mode="reflect")


@pad_.from_torch(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default)
def _(x, padding):
    return pad_.call(x, pad=tuple(padding), mode="replicate")


@pad_.from_torch(aten._pad_circular.default)  # noqa: SLF001 - a name of ATen's
def _(x, pad):
    return pad_.call(x, pad=tuple(pad), mode="circular")


def _pads_per_dim(rank: int, pad: Any) -> list[tuple[Dim, Dim]]:
    """Return the padding before and after each dim, from the first dim on."""
    pairs: list[tuple[Dim, Dim]] = list(zip(pad[::2], pad[1::2], strict=True))
    return [*((0, 0) for _ in range(rank - len(pairs))), *pairs[::-1]]


def _crop(op: Any, x: Any, ends: list[tuple[Dim, Dim]], shape: tuple[Dim, ...]) -> Any:
    """Remove the elements of negative paddings from ``x``; ``shape`` is the remaining shape."""
    for dim, (before, after) in enumerate(ends):
        start, taken = clamp_to_zero(-before), clamp_to_zero(-after)
        if start != 0 or taken != 0:
            x = slice_dim(op, x, dim, start=start, end=OPEN_END if taken == 0 else normalize_size(start + shape[dim]))
    return x


def _pad_circular(op: Any, x: Any, pad: Any) -> Any:
    """Pad ``x`` circularly, after removing the elements of negative paddings."""
    ends = _pads_per_dim(op.rank(x), pad)
    kept = _shape_after_crop(op.shape(x), ends)
    x = _crop(op, x, ends, kept)
    for dim, pair in enumerate(ends):
        before, after = map(clamp_to_zero, pair)
        head = [] if before == 0 else [slice_dim(op, x, dim, start=normalize_size(kept[dim] - before))]
        tail = [] if after == 0 else [slice_dim(op, x, dim, end=after)]
        x = op.Concat(*head, x, *tail, axis=dim) if head or tail else x
    return x


def _shape_after_crop(shape: Sequence[Dim], ends: list[tuple[Dim, Dim]]) -> tuple[Dim, ...]:
    """Return the shape that negative paddings leave."""
    return tuple(
        normalize_size(n - clamp_to_zero(-a) - clamp_to_zero(-b)) for n, (a, b) in zip(shape, ends, strict=True)
    )


def _check_circular(shape: Sequence[Dim], pad: Any) -> None:
    """Reject circular padding that exceeds the remaining size for all symbol values."""
    ends = _pads_per_dim(len(shape), pad)
    for dim, (kept, pair) in enumerate(zip(_shape_after_crop(shape, ends), ends, strict=True)):
        for n in pair:
            if is_nonnegative(n - kept - 1):
                raise ValueError(
                    f"circular padding of dim {dim} by {n}: it needs as many elements, but {kept} are left"
                )
