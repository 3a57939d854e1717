"""Operators that move elements between channels and space, and between windows and columns."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from clika_ref.core.accuracy import DOT, EXACT
from clika_ref.core.operators import operator
from clika_ref.core.symbols import is_symbolic
from clika_ref.core.traits import SHARED_QPARAMS
from clika_ref.core.types import TensorType
from clika_ref_aten.size_arithmetic import same_type
from clika_ref_aten.spatial import allow_unbatched, count_windows, expand_per_dim, floor_divide, pad_zeros

aten = torch.ops.aten

SAMPLE_DTYPES = (torch.float32, torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)


@operator(aten.pixel_shuffle.default, quant=SHARED_QPARAMS, error=EXACT)
def pixel_shuffle(x: Tensor, *, upscale_factor: int) -> Tensor:
    """Move channels into space: ``x[..., c * r * r, h, w]`` to ``[..., c, h * r, w * r]``, ``r`` the factor."""
    return F.pixel_shuffle(x, upscale_factor)


@pixel_shuffle.types
def _(x, *, upscale_factor):
    r, (*batch, c, h, w) = upscale_factor, x.shape
    return TensorType(x.dtype, (*batch, floor_divide(c, r * r), h * r, w * r))


@pixel_shuffle.onnx
def _(op, x, *, upscale_factor):
    r, (*batch, c, h, w) = upscale_factor, op.shape(x)
    if len(batch) == 1 and op.dtype(x).is_floating_point:
        return op.DepthToSpace(x, blocksize=r, mode="CRD")
    first, b = list(range(len(batch))), len(batch)
    split = op.reshape(x, (*batch, floor_divide(c, r * r), r, r, h, w))
    return op.reshape(op.Transpose(split, perm=[*first, b, b + 3, b + 1, b + 4, b + 2]), op.result.shape)


@pixel_shuffle.samples
def _(draw, s):
    r = draw(s.choice(2, 3, 1))
    *batch, c, h, w = draw(s.tensor(rank=(3, 5), size=(1, 3))).shape
    c += r > 1  # with one channel, any order is right
    return s.call(draw(s.tensor(shape=(*batch, c * r * r, h, w), dtype=SAMPLE_DTYPES)), upscale_factor=r)


@operator(aten.pixel_unshuffle.default, quant=SHARED_QPARAMS, error=EXACT)
def pixel_unshuffle(x: Tensor, *, downscale_factor: int) -> Tensor:
    """Move space into channels: ``x[..., c, h * r, w * r]`` to ``[..., c * r * r, h, w]``, ``r`` the factor."""
    if not x.numel():  # on a CPU, eager returns it unchanged
        return x.new_empty(_unshuffle_shape(x.shape, downscale_factor))
    return F.pixel_unshuffle(x, downscale_factor)


def _unshuffle_shape(shape, r):
    *batch, c, h, w = shape
    return (*batch, c * r * r, floor_divide(h, r), floor_divide(w, r))


@pixel_unshuffle.types
def _(x, *, downscale_factor):
    return TensorType(x.dtype, _unshuffle_shape(x.shape, downscale_factor))


@pixel_unshuffle.onnx
def _(op, x, *, downscale_factor):  # ONNX's SpaceToDepth puts channels last within the new dim, PyTorch first
    r, (*batch, c, h, w) = downscale_factor, op.shape(x)
    first, b = list(range(len(batch))), len(batch)
    split = op.reshape(x, (*batch, c, floor_divide(h, r), r, floor_divide(w, r), r))
    return op.reshape(op.Transpose(split, perm=[*first, b, b + 2, b + 4, b + 1, b + 3]), op.result.shape)


@pixel_unshuffle.samples
def _(draw, s):
    r = draw(s.choice(2, 3, 1))
    *batch, c, h, w = draw(s.tensor(rank=(3, 5), size=(1, 3))).shape
    return s.call(draw(s.tensor(shape=(*batch, c, h * r, w * r), dtype=SAMPLE_DTYPES)), downscale_factor=r)


@operator(aten.channel_shuffle.default, aten.native_channel_shuffle.default, quant=SHARED_QPARAMS, error=EXACT)
def channel_shuffle(x: Tensor, *, groups: int) -> Tensor:
    """Interleave the groups of channels of ``x[n, c, ...]``: ``i * c / groups + j`` becomes ``j * groups + i``."""
    return torch.channel_shuffle(x, groups)


channel_shuffle.types(same_type)


@channel_shuffle.onnx
def _(op, x, *, groups):
    n, c, *rest = op.shape(x)
    split = op.reshape(x, (n, groups, floor_divide(c, groups), math.prod(rest)))
    return op.reshape(op.Transpose(split, perm=[0, 2, 1, 3]), op.shape(x))


@channel_shuffle.samples
def _(draw, s):
    groups = draw(s.choice(2, 3, 1))
    n, c, *rest = draw(s.tensor(rank=(3, 5), size=(1, 3))).shape
    return s.call(draw(s.tensor(shape=(n, c * groups, *rest), dtype=SAMPLE_DTYPES[:3])), groups=groups)


def _window_counts(lengths, kernel_size, dilation, padding, stride):
    columns = [expand_per_dim(value, 2) for value in (kernel_size, dilation, padding, stride)]
    spatial = zip(lengths, *columns, strict=True)
    return [count_windows(n, k, s, p, d) for n, k, d, p, s in spatial]


@operator(aten.im2col.default, quant=SHARED_QPARAMS, error=EXACT)
def im2col(
    x: Tensor,
    *,
    kernel_size: tuple[int, ...],
    dilation: tuple[int, ...],
    padding: tuple[int, ...],
    stride: tuple[int, ...],
) -> Tensor:
    """The windows ``[k, l]`` of ``x[n, c, h, w]`` as columns: ``[n, c * k * l, number of windows]``."""
    return F.unfold(x, kernel_size, dilation, padding, stride)


@im2col.types
def _(x, *, kernel_size, **spacing):
    *batch, c, h, w = x.shape
    counts = _window_counts((h, w), kernel_size, **spacing)
    return TensorType(x.dtype, (*batch, c * math.prod(expand_per_dim(kernel_size, 2)), math.prod(counts)))


def _window_indices(op, count, stride, kernel, dilation):
    """Return ``int64[kernel, count]``: the indices of the elements of each window along a dim."""
    offsets = torch.arange(kernel)[:, None] * dilation
    if not is_symbolic(count):
        return op.constant(offsets + torch.arange(count) * stride, torch.int64)
    starts = op.Range(*(op.scalar(v, torch.int64) for v in (0, count * stride, stride)))
    return op.Add(op.constant(offsets, torch.int64), starts)


@im2col.onnx
def _(op, x, *, kernel_size, **spacing):
    counts = _window_counts(op.shape(x)[-2:], kernel_size, **spacing)
    kernel, dilation, padding, stride = (
        expand_per_dim(v, 2) for v in (kernel_size, spacing["dilation"], spacing["padding"], spacing["stride"])
    )
    b = op.rank(x) - 3
    if any(padding):
        x = pad_zeros(op, x, padding, padding)
    for axis, *spatial in zip((b + 1, b + 3), counts, stride, kernel, dilation, strict=True):
        x = op.Gather(x, _window_indices(op, *spatial), axis=axis)
    windows = op.Transpose(x, perm=[*range(b), b, b + 1, b + 3, b + 2, b + 4])
    return op.reshape(windows, op.result.shape)


def _draw_windows(draw, s):
    return {
        "kernel_size": (draw(s.choice(2, 3, 1)), draw(s.choice(2, 3))),
        "dilation": (draw(s.choice(1, 2)), 1),
        "padding": (draw(s.choice(0, 1)), draw(s.choice(0, 2))),
        "stride": (draw(s.choice(1, 2)), draw(s.choice(1, 3))),
    }


@im2col.samples
def _(draw, s):
    batch = (draw(s.integers(1, 2)),) if draw(s.choice(True, True, False)) else ()
    shape = (*batch, draw(s.integers(1, 3)), draw(s.integers(5, 8)), draw(s.integers(5, 8)))
    return s.call(draw(s.tensor(shape=shape, dtype=SAMPLE_DTYPES[:3])), **_draw_windows(draw, s))


@operator(aten.col2im.default, error=DOT)
def col2im(
    x: Tensor,
    *,
    output_size: tuple[int, ...],
    kernel_size: tuple[int, ...],
    dilation: tuple[int, ...],
    padding: tuple[int, ...],
    stride: tuple[int, ...],
) -> Tensor:
    """Put columns ``x[n, c * k * l, windows]`` back as windows of ``[n, c, h, w]``, summing where they overlap."""
    return F.fold(x, output_size, kernel_size, dilation, padding, stride)


@col2im.types
def _(x, *, output_size, kernel_size, **_):
    *batch, c, _ = x.shape
    return TensorType(
        x.dtype, (*batch, floor_divide(c, math.prod(expand_per_dim(kernel_size, 2))), *expand_per_dim(output_size, 2))
    )


def _fold(op, x, *, output_size, kernel_size, dilation, padding, stride):
    return op.Col2Im(
        x,
        op.ints(expand_per_dim(output_size, 2)),
        op.ints(expand_per_dim(kernel_size, 2)),
        dilations=expand_per_dim(dilation, 2),
        pads=[*expand_per_dim(padding, 2)] * 2,
        strides=expand_per_dim(stride, 2),
    )


col2im.onnx(allow_unbatched(1, _fold))


@col2im.samples
def _(draw, s):
    windows, size = _draw_windows(draw, s), (draw(s.integers(5, 8)), draw(s.integers(5, 8)))
    batch = (draw(s.integers(1, 2)),) if draw(s.choice(True, True, False)) else ()
    rows = draw(s.integers(1, 3)) * math.prod(windows["kernel_size"])
    columns = math.prod(_window_counts(size, **windows))
    return s.call(draw(s.tensor(shape=(*batch, rows, columns))), output_size=size, **windows)
