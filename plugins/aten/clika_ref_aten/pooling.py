"""Max and average pooling with a fixed kernel size."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clika_ref.core.accuracy import DOT, EXACT
from clika_ref.core.operators import Operator, operator
from clika_ref.core.symbols import is_symbolic
from clika_ref.core.traits import OWN_QPARAMS, SHARED_QPARAMS
from clika_ref.core.types import TensorType
from clika_ref.torch_internals.symbols import Min
from clika_ref_aten.families import name_reference
from clika_ref_aten.spatial import (
    POOLED_INDICES,
    SAME_UPPER,
    SPATIAL_DIMS,
    allow_unbatched,
    as_expression,
    ceil_divide,
    count_explicit_windows,
    count_windows,
    expand_per_dim,
    explicit_ends,
    is_explicit,
    pad_ends,
    pad_zeros,
)

aten = torch.ops.aten

MAX_POOL_DTYPES = {torch.int16: torch.float32, torch.int32: torch.float64, torch.int64: torch.float64}
"""Integer dtypes without a MaxPool in ONNX, and float dtypes that hold them exactly (int64 up to 2**53)."""


def _window_attributes(dims, kernel_size, stride, padding, dilation=1):
    """Return kernel, stride, padding and dilation per dim; the stride defaults to the kernel size.

    An explicit padding is a preceding ``pad``, so the padding is 0.
    """
    kernel, own = expand_per_dim(kernel_size, dims), 0 if is_explicit(padding, dims) else padding
    return kernel, *(expand_per_dim(value, dims) for value in (stride or kernel, own, dilation))


def _pad_explicitly(x, dims, kernel_size, stride, padding, dilation, value):
    """Return ``x`` with its explicit padding, and the remaining padding.

    Raises:
        ValueError: a spatial dim is empty, which pooling rejects without padding as well.
    """
    if not is_explicit(padding, dims):
        return x, padding
    if not all(x.shape[-dims:]):
        raise ValueError(f"a pooling of the shape {list(x.shape)} with padding={padding!r}: a spatial dim is empty")
    kernel, strides, own, dilations = _window_attributes(dims, kernel_size, stride, padding, dilation)
    return pad_ends(x, *explicit_ends(padding, x.shape[-dims:], kernel, strides, dilations), value), own


def _window_count(n, k, s, p, d, *, ceil_mode) -> Any:
    """Return the number of windows along a dim; the last one must start inside it or in the padding before it."""
    if not ceil_mode:
        return count_windows(n, k, s, p, d)
    fitting, starting = ceil_divide(n + 2 * p - d * (k - 1) - 1, s) + 1, ceil_divide(n + p, s)
    return Min(as_expression(fitting), as_expression(starting)) if is_symbolic(n) else min(fitting, starting)


def _type_rule(dims, *extra):
    """Return the type rule of a pooling: fake tensors check whether a symbolic dim is large enough.

    The rule rejects an explicit padding with ``ceil_mode``, as a window may start in that padding.
    """

    def rule(x, *, kernel_size, stride, padding, dilation=1, ceil_mode, **_):
        lengths = x.shape[-dims:]
        kernel, strides, own, dilations = _window_attributes(dims, kernel_size, stride, padding, dilation)
        if is_explicit(padding, dims):
            if ceil_mode:
                raise ValueError(f"a pooling with padding={padding!r} and ceil_mode=True. Use ceil_mode=False.")
            counts = count_explicit_windows(padding, lengths, kernel, strides, dilations)
        else:
            windows = zip(lengths, kernel, strides, own, dilations, strict=True)
            counts = [_window_count(*window, ceil_mode=ceil_mode) for window in windows]
        return tuple(TensorType(dtype, (*x.shape[:-dims], *counts)) for dtype in (x.dtype, *extra))

    return rule


def _end_paddings(lengths, counts, windows, *, ceil_mode):
    """Return the padding after each dim that makes all windows fit, or None if it is unknown or ONNX rejects it.

    It replaces ONNX's ``ceil_mode``, because runtimes disagree on windows that start in the padding.
    """
    kernel, _, padding, _ = windows
    if not ceil_mode:
        return list(padding)
    if is_symbolic(tuple(lengths)):
        return None
    spatial = zip(lengths, counts, *windows, strict=True)
    ends = [max((count - 1) * s + d * (k - 1) + 1 - n - p, p) for n, count, k, s, p, d in spatial]
    return ends if all(end < k for end, k in zip(ends, kernel, strict=True)) else None


def _pads(padding, begins, ends):
    """Return ONNX's ``pads`` and ``auto_pad``."""
    if is_explicit(padding, len(begins)):
        return (None, "SAME_UPPER") if padding == SAME_UPPER else (list(padding), None)
    return [*begins, *ends], None


def _crop_windows(op, x, counts):
    """Return the first ``counts`` windows of each spatial dim: only ONNX has windows that start beyond."""
    axes = list(range(-len(counts), 0))
    return op.Slice(x, op.ints([0] * len(axes)), op.ints(counts), op.ints(axes))


def _max_pool_lowering(dims, outputs):
    def lower(op, x, *, kernel_size, stride, padding, dilation, ceil_mode):
        windows = _window_attributes(dims, kernel_size, stride, padding, dilation)
        kernel, strides, begins, dilations = windows
        lengths, counts = op.shape(x)[-dims:], op.result.shape[-dims:]
        ends = _end_paddings(lengths, counts, windows, ceil_mode=ceil_mode)
        pads, auto_pad = _pads(padding, begins, begins if ends is None else ends)
        pooled = op.MaxPool(
            op.cast(x, MAX_POOL_DTYPES.get(op.dtype(x), op.dtype(x))),
            outputs=outputs,
            kernel_shape=kernel,
            strides=strides,
            pads=pads,
            auto_pad=auto_pad,
            dilations=dilations,
            ceil_mode=1 if ends is None else None,
        )
        values, *indices = [pooled] if outputs == 1 else pooled
        indices = [op.declare(i, torch.int64) for i in indices]
        kept = [r if ends is not None else _crop_windows(op, r, counts) for r in (values, *indices)]
        values = op.cast(kept[0], op.dtype(x))
        if outputs == 1:
            return values
        plane = math.prod(lengths)  # ONNX returns flat indices of the whole tensor, PyTorch of one plane
        return values, op.Mod(kept[1], op.scalar(plane, torch.int64))

    return allow_unbatched(dims, lower)


def _draw_explicit_padding(draw, s, kernel, attrs):
    """Draw attributes with explicit padding. Each window keeps two elements along each dim of a kernel above 1."""
    if 2 not in kernel and draw(s.booleans()):
        one = {"dilation": (1,)} if "dilation" in attrs else {}
        return {"padding": SAME_UPPER, "ceil_mode": False, "stride": draw(s.choice((), (1,))), **one}
    pads = tuple(draw(s.choice((k - 1) // 2, 0)) for k in (*kernel, *kernel))
    return {"padding": pads, "ceil_mode": False}


def _sampler(dims, dtypes, *, dilated, unique=False):
    def sample(draw, s):
        kernel = tuple(draw(s.choice(2, 3, 3, 1)) for _ in range(draw(s.choice(dims, 1))))
        attrs = {
            "kernel_size": kernel,
            "stride": draw(s.choice((), (1,), (2,), (3,), (2, 3, 1)[:dims])),
            "padding": tuple(draw(s.choice(k // 2, 0, k // 3)) for k in kernel),  # more leaves no partial window
            "ceil_mode": draw(s.choice(True, True, False)),
        }
        if dilated:
            attrs["dilation"] = draw(s.choice((1,), (2,), (1, 2, 1)[:dims]))
        batch = (draw(s.integers(1, 3)),) if draw(s.choice(True, True, False)) else ()
        shape = (*batch, draw(s.integers(1, 3)), *(draw(s.integers(5, 8)) for _ in range(dims)))
        x = draw(s.tensor(shape=shape, dtype=dtypes, low=-50, high=50, unique=unique))
        if x.dtype.is_floating_point and not unique and draw(s.booleans()):
            attrs |= _draw_explicit_padding(draw, s, expand_per_dim(kernel, dims), attrs)
        return s.call(x, **attrs)

    return sample


NUMBERS = (torch.float32, torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _declare_max_pool(dims: int, *, with_indices: bool = False) -> Operator:
    """Declare the maximum pooling of ``dims`` spatial dims, which may also return indices."""
    name = f"max_pool{dims}d{'_with_indices' if with_indices else ''}"
    pool = getattr(F if with_indices else torch, name)
    result = f"The largest element of each window of ``x[n, c, {SPATIAL_DIMS[dims]}]``"
    doc = f"{result}, and its {POOLED_INDICES[dims]}." if with_indices else f"{result}."

    @operator(getattr(aten, name).default, quant=SHARED_QPARAMS, error=EXACT)
    @name_reference(name, doc, returns_pair=with_indices)
    def max_pool(
        x: Tensor,
        *,
        kernel_size: tuple[int, ...],
        stride: tuple[int, ...] = (),
        padding: tuple[int, ...] | str = (0,) * dims,
        dilation: tuple[int, ...] = (1,) * dims,
        ceil_mode: bool = False,
    ) -> Tensor:
        lowest = -math.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
        x, own = _pad_explicitly(x, dims, kernel_size, stride, padding, dilation, lowest)
        return pool(x, kernel_size, stride, own, dilation, ceil_mode)

    max_pool.types(_type_rule(dims, *[torch.int64] * with_indices))
    max_pool.onnx(_max_pool_lowering(dims, outputs=1 + with_indices))
    has_integers = dims == 2 or (dims == 3 and not with_indices)
    dtypes = (NUMBERS[:-2] if with_indices else NUMBERS) if has_integers else torch.float32
    max_pool.samples(_sampler(dims, dtypes, dilated=True, unique=with_indices))
    return max_pool


max_pool1d, max_pool2d, max_pool3d = map(_declare_max_pool, (1, 2, 3))
max_pool1d_with_indices, max_pool2d_with_indices, max_pool3d_with_indices = (
    _declare_max_pool(dims, with_indices=True) for dims in (1, 2, 3)
)


def _avg_pool_lowering(dims):
    def lower(op, x, *, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override=None):
        windows = _window_attributes(dims, kernel_size, stride, padding)
        kernel, strides, begins, _ = windows
        lengths, counts = op.shape(x)[-dims:], op.result.shape[-dims:]
        ends = _end_paddings(lengths, counts, windows, ceil_mode=ceil_mode)
        counted = count_include_pad or divisor_override is not None or is_explicit(padding, dims)
        if counted and ceil_mode and any(begins):
            # Padding counts in the mean, but the rest of a window beyond it does not, so padding must be real elements.
            x = pad_zeros(op, x, begins, begins)
            ends = None if ends is None else [end - p for end, p in zip(ends, begins, strict=True)]
            begins = (0,) * dims
        whole = divisor_override is not None and ceil_mode
        if whole:  # a sum: elements beyond the padding must be zeros that count
            x = pad_zeros(op, x, [0] * dims, [s - 1 for s in strides])
        pads, auto_pad = _pads(padding, begins, begins if ends is None or whole else ends)
        pooled = op.AveragePool(
            x,
            kernel_shape=kernel,
            strides=strides,
            pads=pads,
            auto_pad=auto_pad,
            ceil_mode=1 if ends is None and not whole else None,
            count_include_pad=1 if counted and (pads is None or any(pads)) and not ceil_mode else None,
        )
        if ends is None or whole:
            pooled = _crop_windows(op, pooled, counts)
        if divisor_override is None:
            return pooled
        return op.Mul(pooled, op.like(pooled, math.prod(kernel) / divisor_override))

    return allow_unbatched(dims, lower)


def _average_sampler(dims, *, divided):
    def sample(draw, s):
        call = _sampler(dims, torch.float32, dilated=False)(draw, s)
        call.attrs["count_include_pad"] = draw(s.choice(True, True, False))
        if divided:
            call.attrs["divisor_override"] = draw(s.choice(None, None, 1, 5, -2))
        return call

    return sample


@operator(aten.avg_pool1d.default, quant=OWN_QPARAMS, error=DOT)
def avg_pool1d(
    x: Tensor,
    *,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...] = (),
    padding: tuple[int, ...] | str = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """The mean of each window of ``x[n, c, w]``; ``count_include_pad`` includes the padding."""
    x, own = _pad_explicitly(x, 1, kernel_size, stride, padding, 1, 0)
    return torch.avg_pool1d(x, kernel_size, stride, own, ceil_mode, count_include_pad)


avg_pool1d.types(_type_rule(1))
avg_pool1d.onnx(_avg_pool_lowering(1))
avg_pool1d.samples(_average_sampler(1, divided=False))


def _declare_avg_pool(dims: int) -> Operator:
    """Declare the average pooling of 2 or 3 spatial dims, which has a divisor, unlike that of one dim."""
    name = f"avg_pool{dims}d"
    pool = getattr(F, name)
    windows = f"``x[n, c, {SPATIAL_DIMS[dims]}]``"

    @operator(getattr(aten, name).default, quant=OWN_QPARAMS, error=DOT)
    @name_reference(name, f"The mean of each window of {windows}; ``count_include_pad`` includes the padding.")
    def avg_pool(
        x: Tensor,
        *,
        kernel_size: tuple[int, ...],
        stride: tuple[int, ...] = (),
        padding: tuple[int, ...] | str = (0,) * dims,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        x, own = _pad_explicitly(x, dims, kernel_size, stride, padding, 1, 0)
        return pool(x, kernel_size, stride, own, ceil_mode, count_include_pad, divisor_override)

    avg_pool.types(_type_rule(dims))
    avg_pool.onnx(_avg_pool_lowering(dims))
    avg_pool.samples(_average_sampler(dims, divided=True))
    return avg_pool


avg_pool2d, avg_pool3d = map(_declare_avg_pool, (2, 3))
