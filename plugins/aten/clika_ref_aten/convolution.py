"""Convolutions and transposed convolutions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clika_ref.core.accuracy import DOT
from clika_ref.core.errors import TargetError
from clika_ref.core.operators import operator
from clika_ref.core.symbols import is_symbolic
from clika_ref.core.traits import compute_trait
from clika_ref.core.types import TensorType
from clika_ref_aten.spatial import allow_unbatched, expand_per_dim, floor_divide

aten = torch.ops.aten


def _same_padding(kernel, dilation):
    """Return the begins and ends of ``padding="same"``; the extra element of an odd total goes to the end."""
    totals = [d * (k - 1) for k, d in zip(kernel, expand_per_dim(dilation, len(kernel)), strict=True)]
    return [t // 2 for t in totals], [t - t // 2 for t in totals]


def _require_unstrided(stride):
    if any(step != 1 for step in stride):
        raise ValueError(f"padding='same' needs a stride of 1, not {stride}")


def _require_channels(weight):
    """Reject an empty weight: without input channels, eager returns 0 output channels for any weight."""
    if not weight.numel():
        raise ValueError(f"a convolution with a weight of the shape {list(weight.shape)} has no channels")


def _apply_same_padding(x, weight, padding, dilation, stride) -> Any:
    """Return ``x``, padded if needed, and a numeric padding: torch's own ``same`` warns where it pads unevenly."""
    _require_channels(weight)
    if padding != "same":
        return x, padding
    _require_unstrided(stride)
    begins, ends = _same_padding(weight.shape[2:], dilation)
    if begins == ends:
        return x, begins
    pads = [p for pair in zip(reversed(begins), reversed(ends), strict=True) for p in pair]
    return F.pad(x, pads), 0


def _pads(op, weight, padding, dilation):
    """Return ONNX's ``pads``: all begins, then all ends."""
    kernel = op.shape(weight)[2:]
    if padding == "valid":
        return [0] * 2 * len(kernel)
    if padding != "same":
        return [*expand_per_dim(padding, len(kernel))] * 2
    if is_symbolic(kernel):
        msg = (
            f"convolution with padding='same' and a dynamic kernel size {kernel}: ONNX needs constant padding. Pad "
            "explicitly with torch.nn.functional.pad."
        )
        raise TargetError(msg)
    begins, ends = _same_padding(kernel, dilation)
    return [*begins, *ends]


def _convolve(op, x, weight, bias=None, *, stride, padding, dilation, groups):
    sides = op.rank(weight) - 2
    return op.Conv(
        x,
        weight,
        bias,
        strides=expand_per_dim(stride, sides),
        pads=_pads(op, weight, padding, dilation),
        dilations=expand_per_dim(dilation, sides),
        group=groups,
    )


def _convolve_transposed(op, x, weight, bias=None, *, stride, padding, output_padding, groups, dilation):
    sides = op.rank(weight) - 2
    return op.ConvTranspose(
        x,
        weight,
        bias,
        strides=expand_per_dim(stride, sides),
        pads=_pads(op, weight, padding, dilation),
        output_padding=expand_per_dim(output_padding, sides),
        dilations=expand_per_dim(dilation, sides),
        group=groups,
    )


def _conv_type(x, weight, bias=None, *, stride, padding, dilation, groups):
    """Type rule of a convolution: fake tensors cannot pad a symbolic dim unevenly."""
    sides = weight.rank - 2
    kernel, dilations = weight.shape[2:], expand_per_dim(dilation, sides)
    if padding == "same":
        _require_unstrided(stride)
        lengths = x.shape[-sides:]
    else:
        pads = expand_per_dim(0 if padding == "valid" else padding, sides)
        spatial = zip(x.shape[-sides:], kernel, expand_per_dim(stride, sides), pads, dilations, strict=True)
        lengths = [floor_divide(n + 2 * p - d * (k - 1) - 1, s) + 1 for n, k, s, p, d in spatial]
    return TensorType(x.dtype, (*x.shape[: -sides - 1], weight.shape[0], *lengths))


def _require_spatial_sizes(lengths):
    if any(isinstance(n, int) and n < 1 for n in lengths):  # one PyTorch kernel accepts it, the others raise
        raise ValueError(f"a transposed convolution has the output size {list(lengths)}: each must be at least 1")


def _check_spatial_sizes(result, sides):
    """Return the result of a transposed convolution after checking its spatial sizes."""
    _require_spatial_sizes(result.shape[-sides:])
    return result


def _conv_transpose_type(x, weight, bias=None, *, stride, padding, output_padding, groups, dilation):
    """Type rule of a transposed convolution."""
    sides = weight.rank - 2
    columns = [expand_per_dim(v, sides) for v in (stride, padding, output_padding, dilation)]
    spatial = zip(x.shape[-sides:], weight.shape[2:], *columns, strict=True)
    lengths = [(n - 1) * s - 2 * p + d * (k - 1) + o + 1 for n, k, s, p, o, d in spatial]
    _require_spatial_sizes(lengths)
    return TensorType(x.dtype, (*x.shape[: -sides - 1], weight.shape[1] * groups, *lengths))


def _draw_operands(draw, s, sides, *, transposed, batched=True, kernels=(1, 2, 3)):
    """Draw x, weight, bias and the number of groups."""
    groups, channels, out = draw(s.choice(1, 2)), draw(s.integers(1, 3)), draw(s.integers(1, 3))
    batch = (draw(s.integers(1, 2)),) if batched else ()
    x = draw(s.tensor(shape=(*batch, groups * channels, *(draw(s.integers(5, 8)) for _ in range(sides)))))
    outer, inner = (groups * channels, out) if transposed else (groups * out, channels)
    weight = draw(s.tensor(shape=(outer, inner, *(draw(s.choice(*kernels)) for _ in range(sides)))))
    bias = draw(s.tensor(shape=(groups * out,))) if draw(s.booleans()) else None
    return x, weight, bias, groups


def _samples(sides):
    def sample(draw, s):
        padding, batched = draw(s.choice("numbers", "same", "valid")), draw(s.choice(True, True, False))
        kernels = (2, 3, 4) if padding == "same" else (1, 2, 3)  # an even kernel is padded unevenly
        x, weight, bias, groups = _draw_operands(draw, s, sides, transposed=False, batched=batched, kernels=kernels)
        if padding == "numbers":
            padding = tuple(draw(s.choice(0, 1, 2)) for _ in range(draw(s.choice(sides, 1))))
        stride = tuple(1 if padding == "same" else draw(s.choice(1, 2, 3)) for _ in range(draw(s.choice(sides, 1))))
        dilation = tuple(draw(s.choice(1, 1, 2)) for _ in range(sides))
        return s.call(x, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups)

    return sample


def _draw_transposed_attributes(draw, s, sides):
    """Draw attributes of a transposed convolution; torch requires output padding below the stride or the dilation."""
    stride = tuple(draw(s.choice(1, 2, 3)) for _ in range(sides))
    return {
        "stride": stride,
        "padding": tuple(draw(s.choice(0, 1)) for _ in range(sides)),
        "output_padding": tuple(draw(s.integers(0, side - 1)) for side in stride),
        "dilation": tuple(draw(s.choice(1, 2)) for _ in range(sides)),
    }


def _samples_transposed(sides):
    def sample(draw, s):
        x, weight, bias, groups = _draw_operands(
            draw, s, sides, transposed=True, batched=draw(s.choice(True, True, False))
        )
        return s.call(x, weight, bias, groups=groups, **_draw_transposed_attributes(draw, s, sides))

    return sample


@operator(
    aten.conv1d.default, aten.conv1d.padding, quant=compute_trait(weight=1, axis=0, bias=2, channel=-2), error=DOT
)
def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: tuple[int, ...] = (1,),
    padding: tuple[int, ...] | str = (0,),
    dilation: tuple[int, ...] = (1,),
    groups: int = 1,
) -> Tensor:
    """Cross-correlate ``x[n, c, w]`` with ``weight[k, c / groups, i]`` and add ``bias[k]``."""
    x, padding = _apply_same_padding(x, weight, padding, dilation, stride)
    return F.conv1d(x, weight, bias, stride, padding, dilation, groups)


conv1d.onnx(allow_unbatched(1, _convolve))
conv1d.types(_conv_type)
conv1d.samples(_samples(1))


@operator(
    aten.conv2d.default, aten.conv2d.padding, quant=compute_trait(weight=1, axis=0, bias=2, channel=-3), error=DOT
)
def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: tuple[int, ...] = (1, 1),
    padding: tuple[int, ...] | str = (0, 0),
    dilation: tuple[int, ...] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """Cross-correlate ``x[n, c, h, w]`` with ``weight[k, c / groups, i, j]`` and add ``bias[k]``."""
    x, padding = _apply_same_padding(x, weight, padding, dilation, stride)
    return F.conv2d(x, weight, bias, stride, padding, dilation, groups)


conv2d.onnx(allow_unbatched(2, _convolve))
conv2d.types(_conv_type)
conv2d.samples(_samples(2))


@operator(
    aten.conv3d.default, aten.conv3d.padding, quant=compute_trait(weight=1, axis=0, bias=2, channel=-4), error=DOT
)
def conv3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: tuple[int, ...] = (1, 1, 1),
    padding: tuple[int, ...] | str = (0, 0, 0),
    dilation: tuple[int, ...] = (1, 1, 1),
    groups: int = 1,
) -> Tensor:
    """Cross-correlate ``x[n, c, d, h, w]`` with ``weight[k, c / groups, i, j, l]`` and add ``bias[k]``."""
    x, padding = _apply_same_padding(x, weight, padding, dilation, stride)
    return F.conv3d(x, weight, bias, stride, padding, dilation, groups)


conv3d.onnx(allow_unbatched(3, _convolve))
conv3d.types(_conv_type)
conv3d.samples(_samples(3))


@operator(aten.conv_transpose1d.default, quant=compute_trait(weight=1, axis=1, bias=2, channel=-2), error=DOT)
def conv_transpose1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: tuple[int, ...] = (1,),
    padding: tuple[int, ...] = (0,),
    output_padding: tuple[int, ...] = (0,),
    groups: int = 1,
    dilation: tuple[int, ...] = (1,),
) -> Tensor:
    """Transposed convolution of ``x[n, c, w]`` with ``weight[c, k / groups, i]``, plus ``bias[k]``."""
    return _check_spatial_sizes(
        F.conv_transpose1d(x, weight, bias, stride, padding, output_padding, groups, dilation), 1
    )


conv_transpose1d.onnx(allow_unbatched(1, _convolve_transposed))
conv_transpose1d.types(_conv_transpose_type)
conv_transpose1d.samples(_samples_transposed(1))


@operator(aten.conv_transpose2d.input, quant=compute_trait(weight=1, axis=1, bias=2, channel=-3), error=DOT)
def conv_transpose2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: tuple[int, ...] = (1, 1),
    padding: tuple[int, ...] = (0, 0),
    output_padding: tuple[int, ...] = (0, 0),
    groups: int = 1,
    dilation: tuple[int, ...] = (1, 1),
) -> Tensor:
    """Transposed convolution of ``x[n, c, h, w]`` with ``weight[c, k / groups, i, j]``, plus ``bias[k]``."""
    return _check_spatial_sizes(
        F.conv_transpose2d(x, weight, bias, stride, padding, output_padding, groups, dilation), 2
    )


conv_transpose2d.onnx(allow_unbatched(2, _convolve_transposed))
conv_transpose2d.types(_conv_transpose_type)
conv_transpose2d.samples(_samples_transposed(2))


@operator(aten.conv_transpose3d.input, quant=compute_trait(weight=1, axis=1, bias=2, channel=-4), error=DOT)
def conv_transpose3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: tuple[int, ...] = (1, 1, 1),
    padding: tuple[int, ...] = (0, 0, 0),
    output_padding: tuple[int, ...] = (0, 0, 0),
    groups: int = 1,
    dilation: tuple[int, ...] = (1, 1, 1),
) -> Tensor:
    """Transposed convolution of ``x[n, c, d, h, w]`` with ``weight[c, k / groups, i, j, l]``, plus ``bias[k]``."""
    return _check_spatial_sizes(
        F.conv_transpose3d(x, weight, bias, stride, padding, output_padding, groups, dilation), 3
    )


conv_transpose3d.onnx(allow_unbatched(3, _convolve_transposed))
conv_transpose3d.types(_conv_transpose_type)
conv_transpose3d.samples(_samples_transposed(3))


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
    if transposed:
        return _convolve_transposed(op, x, weight, bias, output_padding=output_padding, **attrs)
    return _convolve(op, x, weight, bias, **attrs)


@convolution.types
def _(x, weight, bias=None, *, transposed, output_padding, **attrs):
    if transposed:
        return _conv_transpose_type(x, weight, bias, output_padding=output_padding, **attrs)
    return _conv_type(x, weight, bias, **attrs)


@convolution.samples
def _(draw, s):
    sides, transposed = draw(s.choice(2, 1, 3)), draw(s.booleans())
    x, weight, bias, groups = _draw_operands(draw, s, sides, transposed=transposed)
    attrs = _draw_transposed_attributes(draw, s, sides)
    if not transposed:
        attrs["output_padding"] = (0,) * sides
    return s.call(x, weight, bias, transposed=transposed, groups=groups, **attrs)
