"""Convolutions and transposed convolutions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clika_ref.core.accuracy import DOT
from clika_ref.core.errors import TargetError
from clika_ref.core.operators import Operator, operator
from clika_ref.core.symbols import is_symbolic
from clika_ref.core.traits import compute_trait
from clika_ref.core.types import TensorType
from clika_ref_aten.families import name_reference
from clika_ref_aten.spatial import (
    SAME_UPPER,
    SPATIAL_DIMS,
    allow_unbatched,
    count_explicit_windows,
    count_windows,
    expand_per_dim,
    explicit_ends,
    is_explicit,
    pad_ends,
)

aten = torch.ops.aten


def _same_padding(kernel, dilation):
    """Return the begins and ends of ``padding="same"``; the extra element of an odd total goes to the end."""
    totals = [d * (k - 1) for k, d in zip(kernel, expand_per_dim(dilation, len(kernel)), strict=True)]
    return [t // 2 for t in totals], [t - t // 2 for t in totals]


def _require_unstrided(stride):
    if any(step != 1 for step in stride):
        raise ValueError(
            f"a convolution with padding='same' and the stride {stride}: padding='same' needs a stride of 1"
        )


def _require_channels(weight):
    """Reject an empty weight: without input channels, eager returns 0 output channels for any weight."""
    if not weight.numel():
        raise ValueError(f"a convolution with a weight of the shape {list(weight.shape)}: it has no channels")


def _apply_padding(x, weight, padding, dilation, stride) -> Any:
    """Return ``x``, padded if needed, and the padding for torch: its own ``same`` warns where it pads unevenly."""
    _require_channels(weight)
    kernel = weight.shape[2:]
    if is_explicit(padding, len(kernel)):
        window = (kernel, expand_per_dim(stride, len(kernel)), expand_per_dim(dilation, len(kernel)))
        begins, ends = explicit_ends(padding, x.shape[-len(kernel) :], *window)
    elif padding == "same":
        _require_unstrided(stride)
        begins, ends = _same_padding(kernel, dilation)
    else:
        return x, padding
    return (x, begins) if begins == ends else (pad_ends(x, begins, ends), 0)


def _pads(op, weight, padding, dilation):
    """Return ONNX's ``pads``: all begins, then all ends; None for `SAME_UPPER`."""
    kernel = op.shape(weight)[2:]
    if padding == "valid":
        return [0] * 2 * len(kernel)
    if is_explicit(padding, len(kernel)):
        return None if padding == SAME_UPPER else list(padding)
    if padding != "same":
        return [*expand_per_dim(padding, len(kernel))] * 2
    if is_symbolic(kernel):
        raise TargetError(
            f"a convolution with padding='same' and the kernel size {kernel}: ONNX needs padding as numbers. "
            "Pad explicitly with torch.nn.functional.pad"
        )
    begins, ends = _same_padding(kernel, dilation)
    return [*begins, *ends]


def _convolve(op, x, weight, bias=None, *, stride, padding, dilation, groups, output_padding=None):
    """Lower a convolution, or with an ``output_padding`` a transposed one."""
    dims = op.rank(weight) - 2
    return op.node(
        "Conv" if output_padding is None else "ConvTranspose",
        x,
        weight,
        bias,
        strides=expand_per_dim(stride, dims),
        pads=_pads(op, weight, padding, dilation),
        auto_pad="SAME_UPPER" if padding == SAME_UPPER else None,
        output_padding=None if output_padding is None else expand_per_dim(output_padding, dims),
        dilations=expand_per_dim(dilation, dims),
        group=groups,
    )


def _conv_type(x, weight, bias=None, *, stride, padding, dilation, groups):
    """Type rule of a convolution: fake tensors cannot pad a symbolic dim unevenly."""
    dims = weight.rank - 2
    kernel, dilations = weight.shape[2:], expand_per_dim(dilation, dims)
    strides, lengths = expand_per_dim(stride, dims), x.shape[-dims:]
    if padding == "same":
        _require_unstrided(stride)
    elif is_explicit(padding, dims):
        lengths = count_explicit_windows(padding, lengths, kernel, strides, dilations)
    else:
        pads = expand_per_dim(0 if padding == "valid" else padding, dims)
        lengths = [count_windows(*window) for window in zip(lengths, kernel, strides, pads, dilations, strict=True)]
    return TensorType(x.dtype, (*x.shape[: -dims - 1], weight.shape[0], *lengths))


def _require_spatial_sizes(lengths):
    if any(isinstance(n, int) and n < 1 for n in lengths):  # one PyTorch kernel accepts it, the others raise
        raise ValueError(f"a transposed convolution to the spatial sizes {list(lengths)}: each must be at least 1")


def _conv_transpose_type(x, weight, bias=None, *, stride, padding, output_padding, groups, dilation):
    """Type rule of a transposed convolution."""
    dims = weight.rank - 2
    columns = [expand_per_dim(v, dims) for v in (stride, padding, output_padding, dilation)]
    spatial = zip(x.shape[-dims:], weight.shape[2:], *columns, strict=True)
    lengths = [(n - 1) * s - 2 * p + d * (k - 1) + o + 1 for n, k, s, p, o, d in spatial]
    _require_spatial_sizes(lengths)
    return TensorType(x.dtype, (*x.shape[: -dims - 1], weight.shape[1] * groups, *lengths))


def _draw_operands(draw, s, dims, *, transposed, batched=True, kernels=(1, 2, 3)):
    """Draw x, weight, bias and the number of groups."""
    groups, channels, out = draw(s.choice(1, 2)), draw(s.integers(1, 3)), draw(s.integers(1, 3))
    batch = (draw(s.integers(1, 2)),) if batched else ()
    x = draw(s.tensor(shape=(*batch, groups * channels, *(draw(s.integers(5, 8)) for _ in range(dims)))))
    outer, inner = (groups * channels, out) if transposed else (groups * out, channels)
    weight = draw(s.tensor(shape=(outer, inner, *(draw(s.choice(*kernels)) for _ in range(dims)))))
    bias = draw(s.tensor(shape=(groups * out,))) if draw(s.booleans()) else None
    return x, weight, bias, groups


def _sampler(dims):
    def sample(draw, s):
        padding = draw(s.choice("numbers", "same", "valid", "explicit", SAME_UPPER))
        batched = draw(s.choice(True, True, False))
        kernels = (2, 3, 4) if padding == "same" else (1, 2, 3)  # an even kernel is padded unevenly
        x, weight, bias, groups = _draw_operands(draw, s, dims, transposed=False, batched=batched, kernels=kernels)
        if padding in {"numbers", "explicit"}:
            count = 2 * dims if padding == "explicit" else draw(s.choice(dims, 1))
            padding = tuple(draw(s.choice(0, 1, 2)) for _ in range(count))
        stride = tuple(1 if padding == "same" else draw(s.choice(1, 2, 3)) for _ in range(draw(s.choice(dims, 1))))
        dilation = tuple(draw(s.choice(1, 1, 2)) for _ in range(dims))
        if padding == SAME_UPPER:
            stride = tuple(map(min, expand_per_dim(stride, dims), weight.shape[2:]))
            dilation = (1,) * dims
        return s.call(x, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups)

    return sample


def _draw_transposed_attributes(draw, s, dims):
    """Draw attributes of a transposed convolution; torch requires output padding below the stride or the dilation."""
    stride = tuple(draw(s.choice(1, 2, 3)) for _ in range(dims))
    return {
        "stride": stride,
        "padding": tuple(draw(s.choice(0, 1)) for _ in range(dims)),
        "output_padding": tuple(draw(s.integers(0, step - 1)) for step in stride),
        "dilation": tuple(draw(s.choice(1, 2)) for _ in range(dims)),
    }


def _conv_transpose_sampler(dims):
    def sample(draw, s):
        x, weight, bias, groups = _draw_operands(
            draw, s, dims, transposed=True, batched=draw(s.choice(True, True, False))
        )
        return s.call(x, weight, bias, groups=groups, **_draw_transposed_attributes(draw, s, dims))

    return sample


KERNEL_DIMS = {1: "i", 2: "i, j", 3: "i, j, l"}
"""The spatial dims of a kernel as docstrings name them, by their number."""


def _declare_conv(dims: int) -> Operator:
    """Declare the convolution over ``dims`` spatial dims."""
    name = f"conv{dims}d"
    overloads, convolve = getattr(aten, name), getattr(F, name)
    kernel = f"``weight[k, c / groups, {KERNEL_DIMS[dims]}]``"

    @operator(
        overloads.default,
        overloads.padding,
        quant=compute_trait(weight=1, axis=0, bias=2, channel=-1 - dims),
        error=DOT,
    )
    @name_reference(name, f"Cross-correlate ``x[n, c, {SPATIAL_DIMS[dims]}]`` with {kernel} and add ``bias[k]``.")
    def conv(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        stride: tuple[int, ...] = (1,) * dims,
        padding: tuple[int, ...] | str = (0,) * dims,
        dilation: tuple[int, ...] = (1,) * dims,
        groups: int = 1,
    ) -> Tensor:
        x, padding = _apply_padding(x, weight, padding, dilation, stride)
        return convolve(x, weight, bias, stride, padding, dilation, groups)

    conv.onnx(allow_unbatched(dims, _convolve))
    conv.types(_conv_type)
    conv.samples(_sampler(dims))
    return conv


def _declare_conv_transpose(dims: int) -> Operator:
    """Declare the transposed convolution over ``dims`` spatial dims."""
    name = f"conv_transpose{dims}d"
    overloads, convolve = getattr(aten, name), getattr(F, name)
    kernel = f"``weight[c, k / groups, {KERNEL_DIMS[dims]}]``"

    @operator(
        overloads.default if dims == 1 else overloads.input,
        quant=compute_trait(weight=1, axis=1, bias=2, channel=-1 - dims),
        error=DOT,
    )
    @name_reference(
        name, f"Transposed convolution of ``x[n, c, {SPATIAL_DIMS[dims]}]`` with {kernel}, plus ``bias[k]``."
    )
    def conv_transpose(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        stride: tuple[int, ...] = (1,) * dims,
        padding: tuple[int, ...] = (0,) * dims,
        output_padding: tuple[int, ...] = (0,) * dims,
        groups: int = 1,
        dilation: tuple[int, ...] = (1,) * dims,
    ) -> Tensor:
        result = convolve(x, weight, bias, stride, padding, output_padding, groups, dilation)
        _require_spatial_sizes(result.shape[-dims:])
        return result

    conv_transpose.onnx(allow_unbatched(dims, _convolve))
    conv_transpose.types(_conv_transpose_type)
    conv_transpose.samples(_conv_transpose_sampler(dims))
    return conv_transpose


conv1d, conv2d, conv3d = map(_declare_conv, (1, 2, 3))
conv_transpose1d, conv_transpose2d, conv_transpose3d = map(_declare_conv_transpose, (1, 2, 3))


# Kept in float: the channel axis of the weight depends on `transposed`, which a trait cannot express.
@operator(aten.convolution.default, error=DOT)
def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    transposed: bool,
    output_padding: tuple[int, ...],
    groups: int,
) -> Tensor:
    """Convolution or transposed convolution of ``x[n, c, ...]`` with ``weight``, over all spatial dims."""
    _require_channels(weight)
    return torch.convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)


@convolution.from_torch(aten._convolution.default, aten._convolution.deprecated)  # noqa: SLF001 - ATen's name
def _(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups, *_):
    return convolution.call(
        x,
        weight,
        bias,
        stride=stride,
        padding=padding,
        dilation=dilation,
        transposed=transposed,
        output_padding=output_padding,
        groups=groups,
    )


@convolution.onnx
def _(op, x, weight, bias=None, *, transposed, output_padding, **attrs):
    return _convolve(op, x, weight, bias, output_padding=output_padding if transposed else None, **attrs)


@convolution.types
def _(x, weight, bias=None, *, transposed, output_padding, **attrs):
    if transposed:
        return _conv_transpose_type(x, weight, bias, output_padding=output_padding, **attrs)
    return _conv_type(x, weight, bias, **attrs)


@convolution.samples
def _(draw, s):
    dims, transposed = draw(s.choice(2, 1, 3)), draw(s.booleans())
    x, weight, bias, groups = _draw_operands(draw, s, dims, transposed=transposed)
    attrs = _draw_transposed_attributes(draw, s, dims)
    if not transposed:
        attrs["output_padding"] = (0,) * dims
    return s.call(x, weight, bias, transposed=transposed, groups=groups, **attrs)
