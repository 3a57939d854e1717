"""Upsampling and downsampling of spatial dims: nearest, linear and cubic, with or without antialiasing."""

from __future__ import annotations

from typing import Any

import numpy as np
import sympy
import torch
from torch import Tensor

from clika_ref.core.accuracy import EXACT, INTERPOLATION
from clika_ref.core.errors import ModelError, TargetError
from clika_ref.core.operators import Operator, operator
from clika_ref.core.symbols import is_symbolic
from clika_ref.core.traits import OWN_QPARAMS, SHARED_QPARAMS
from clika_ref.core.types import TensorType
from clika_ref.torch_internals.symbols import ToFloat, TruncToInt
from clika_ref_aten.families import name_reference
from clika_ref_aten.spatial import SPATIAL_DIMS

aten = torch.ops.aten

NEAREST_DTYPES = (torch.float32, torch.float32, torch.uint8, torch.float64)

ANTIALIAS_ATTRIBUTES = {"antialias": 1, "exclude_outside": 1}

INEXACT_SIZES = ((26, 64),) * 3 + ((2, 55),) * 3
"""Input and output sizes that expose differences in rounding.

At the first pair, dividing by the factor selects other elements than multiplying by its inverse. At the second, eager's
own kernels differ in the middle element.
"""

SMALL_PLANE_LIMIT = 128
"""Largest height plus width of a 2-d result for which eager uses a separate kernel."""

MAX_CHECKED_SIZE = 1 << 14
"""The size up to which rounding is checked if the real size is symbolic."""


def _scale_size(n: Any, scale: float) -> Any:
    """Return ``floor(n * scale)``, in double precision; expressions have the same form as PyTorch's."""
    if not is_symbolic(n):
        return int(float(n) * scale)
    return n * int(scale) if float(scale).is_integer() else TruncToInt(ToFloat(n) * sympy.Float(scale))


def _complete(op, packet, dims, lowering, dtypes=(torch.float32,)):
    """Declare all facts but the reference of a resampling operator.

    ATen has two overloads: ``vec`` takes a size or factors, ``default`` a size and the factors that it came from.
    """
    corners = 0 if "nearest" in op.name else 1

    @op.from_torch(packet.vec)
    def _(x, output_size, *rest):
        scales = (None,) * dims if rest[corners] is None else tuple(rest[corners])
        if output_size is None:
            output_size = tuple(map(_scale_size, x.type.shape[2:], scales))
        return op.call(x, output_size=tuple(output_size), scales=scales, **_corner_attributes(op, rest[:corners]))

    @op.from_torch(packet.default)
    def _(x, output_size, *rest, **named):
        scales = (*rest[corners:], *named.values())
        scales = (*scales, *[None] * (dims - len(scales)))
        return op.call(x, output_size=tuple(output_size), scales=scales, **_corner_attributes(op, rest[:corners]))

    @op.types
    def _(x, *, output_size, **_):
        return TensorType(x.dtype, (*x.shape[:2], *output_size))

    op.onnx(lowering)
    # Eager's antialiasing returns the first element for a result of size 1, whatever the correct value is.
    shortest = 2 if op.name.endswith("aa") else 1
    options = {"dtypes": dtypes, "shortest": shortest, "inexact": () if corners else INEXACT_SIZES}
    op.samples(_sampler(dims, aligned="align_corners" in op.attributes, **options))


def _corner_attributes(op, corners):
    """Return the attribute ``align_corners`` if the operator has it.

    Raises:
        ModelError: ``align_corners`` is combined with antialiasing.
    """
    if "align_corners" in op.attributes:
        return {"align_corners": corners[0]}
    if any(corners):
        raise ModelError(
            f"{op.name}(align_corners=True): eager PyTorch uses the weights of unaligned corners, and reads "
            "a dim of size 1 wrongly. Use align_corners=False with antialias=True"
        )
    return {}


def _sampler(dims, *, aligned, dtypes, shortest, inexact):
    def sample(draw, s):
        plain = (3, 5, 8) if inexact else range(2 * shortest, 10)
        lengths = [draw(s.choice(*plain, *(length for length, _ in inexact))) for _ in range(dims)]
        attrs = {"align_corners": draw(s.booleans())} if aligned else {}
        if draw(s.booleans()):
            scales = tuple(draw(s.choice(2.0, 3.0, 0.5, 1.5, 0.7, 2.3, 2.3)) for _ in lengths)
            size = tuple(map(_scale_size, lengths, scales))
        else:
            rounded = [after for _, after in inexact]
            scales = (None,) * dims
            size = tuple(draw(s.choice(n, 2 * n, shortest, 5, 13, *rounded)) for n in lengths)
        x = draw(s.tensor(shape=(draw(s.integers(1, 2)), draw(s.integers(1, 3)), *lengths), dtype=dtypes))
        return s.call(x, output_size=size, scales=scales, **attrs)

    return sample


def _source_indices(n, m, scale, *, exact, dtype, small):
    """Return the source index of each of ``m`` elements in PyTorch's nearest mode, in its own arithmetic.

    The last step rounds once, in float32. Source: aten/src/ATen/native/cpu/UpSampleKernel.cpp, HelperInterpNearest and
    HelperInterpNearestExact; in a ``small`` plane nearest_idx and nearest_exact_idx of UpSample.h.
    """
    if small and not exact and m in (n, 2 * n):  # the factor is not used
        scale = None
    dtype = np.float32 if small else dtype
    step = dtype(1.0 / scale) if scale else dtype(n) / dtype(m)
    positions = np.arange(m).astype(np.float64)
    if exact:
        positions = step * (positions + 0.5)
        positions = positions if small else np.maximum((positions - 0.5).astype(dtype), 0) + dtype(0.5)
    else:
        positions = positions.astype(dtype) * step
    return np.minimum(np.floor(positions.astype(np.float32)), n - 1).astype(np.int64)


def _small_plane_cases(sizes):
    """Return whether a result is a small plane, as a tuple: both answers if the sizes are symbolic.

    Source: aten/src/ATen/native/cpu/UpSampleKernel.cpp, _use_vectorized_kernel_cond_2d.
    """
    if len(sizes) != 2:
        return (False,)
    return (False, True) if is_symbolic(tuple(sizes)) else (sum(sizes) <= SMALL_PLANE_LIMIT,)


def _repeat_factor(n, m, scale, planes, **how):
    """Return the integer factor between two sizes if each element is simply repeated, else None."""
    if is_symbolic((n, m)):
        factor = int(scale) if scale and float(scale).is_integer() and _scale_size(n, scale) == m else 0
        n = MAX_CHECKED_SIZE
    else:
        factor = 0 if m % n else m // n
    if not factor:
        return None
    repeated = np.arange(n * factor) // factor
    found = (_source_indices(n, n * factor, scale, small=small, **how) for small in planes)
    return factor if all(np.array_equal(sources, repeated) for sources in found) else None


def _lower_source_indices(op, n, m, scale, *, exact, dtype, small):
    """Return the source indices along a dim, ``int64[m]``, computed at run time if a size is symbolic."""
    if not is_symbolic((n, m)):
        return op.constant(_source_indices(n, m, scale, exact=exact, dtype=dtype, small=small), torch.int64)
    real = torch.float64 if dtype is np.float64 and not small else torch.float32
    step = op.scalar(1.0 / scale, real) if scale else op.Div(op.scalar(n, real), op.scalar(m, real))
    if scale and small and not exact:
        length, *idle = (op.scalar(number, torch.int64) for number in (m, n, 2 * n))
        is_idle = op.Or(*(op.Equal(length, other) for other in idle))
        step = op.Where(is_idle, op.Div(op.scalar(n, real), op.scalar(m, real)), step)
    positions = op.Range(*(op.scalar(v, torch.int64) for v in (0, m, 1)))
    if exact:
        half = op.scalar(0.5, torch.float64)
        positions = op.Mul(op.cast(step, torch.float64), op.Add(op.cast(positions, torch.float64), half))
        if not small:
            positions = op.Max(op.cast(op.Sub(positions, half), real), op.scalar(0.0, real))
            positions = op.Add(positions, op.scalar(0.5, real))
    else:
        positions = op.Mul(op.cast(positions, real), step)
    positions = op.cast(op.Floor(op.cast(positions, torch.float32)), torch.int64)
    return op.Min(positions, op.scalar(n - 1, torch.int64))


def _nearest_lowering(*, exact):
    """Return a lowering by Resize where that is exact, otherwise by Gather with PyTorch's source indices.

    Resize divides by a rounded factor: from 26 to 64 it selects element 12 where PyTorch selects 13.
    """

    def lower(op, x, *, output_size, scales):
        options = {"exact": exact, "dtype": np.float64 if op.dtype(x) == torch.float64 else np.float32}
        spatial, planes = list(zip(op.shape(x)[2:], output_size, scales, strict=True)), _small_plane_cases(output_size)
        factors = [
            1 if n == m and not scale else _repeat_factor(n, m, scale, planes, **options) for n, m, scale in spatial
        ]
        if None not in factors:
            factors = op.constant([1.0, 1.0, *factors], torch.float32)
            modes = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
            return op.Resize(x, None, factors, **modes)
        for axis, (length, factor) in enumerate(zip(spatial, factors, strict=True), start=2):
            if factor == 1:
                continue
            differs = exact or length[2] or options["dtype"] is np.float64  # in a small plane
            positions = [
                _lower_source_indices(op, *length, small=small, **options)
                for small in (planes if differs else planes[:1])
            ]
            if len(positions) > 1:
                limit, plane = (op.scalar(number, torch.int64) for number in (SMALL_PLANE_LIMIT, sum(output_size)))
                positions = [op.Where(op.Greater(plane, limit), *positions)]
            x = op.Gather(x, *positions, axis=axis)
        return x

    return lower


def _resize_factors(op, x, output_size, scales):
    """Return the factors of all dims for Resize, or None if the sizes alone determine them.

    PyTorch computes coordinates from the user's factor, not from the rounded size.
    """
    spatial = list(zip(op.shape(x)[2:], output_size, scales, strict=True))
    if all(scale is None or (not is_symbolic((n, m)) and n * scale == m) for n, m, scale in spatial):
        return None
    factors = []
    for n, m, scale in spatial:
        if scale is None and is_symbolic((n, m)):
            raise TargetError(
                f"resampling from {n} to {m} without a factor, next to a dim with one: ONNX takes either factors "
                "or sizes. Give scale_factor for all dims, or size"
            )
        if is_symbolic(n) and not is_symbolic(m):
            raise TargetError(
                f"resampling from the dynamic size {n} to {m} by a factor of {scale}: ONNX would compute the size "
                "from the factor. Give one of the two."
            )
        exact = m / n if scale is None else scale
        factor = np.float32(exact)
        # ONNX recomputes the size from the factor: a factor rounded down would lose the last element.
        factors.append(np.nextafter(factor, np.float32(np.inf)) if factor < exact else factor)
    return np.array([1, 1, *factors], np.float32)


def _interpolation_lowering(mode, **modes):
    def lower(op, x, *, output_size, align_corners=False, scales):
        options = {**modes, "coordinate_transformation_mode": "align_corners" if align_corners else "half_pixel"}
        factors = None if align_corners else _resize_factors(op, x, output_size, scales)
        if factors is not None:
            return op.Resize(x, None, op.constant(factors, torch.float32), mode=mode, **options)
        return op.Resize(x, None, None, op.ints((*op.shape(x)[:2], *output_size)), mode=mode, **options)

    return lower


NEAREST_DOCS = {
    False: "Nearest-neighbour resampling: element ``j`` is ``x[n, c, floor(j / scale)]``, with ``scale = new / old``.",
    True: "Nearest-neighbour resampling with aligned centres: element ``j`` is ``x[n, c, floor((j + 0.5) / scale)]``.",
}
"""Docstrings of nearest resampling of one dim; True: with aligned centres (exact)."""


def _declare_nearest(dims: int, *, exact: bool) -> Operator:
    """Declare the nearest-neighbour resampling of ``dims`` spatial dims."""
    family = "upsample_nearest_exact" if exact else "upsample_nearest"
    name, extent = f"{family}{dims}d", "both" if dims == 2 else "all"
    resample = getattr(aten, f"_{name}" if exact else name)
    doc = f"`{family}1d` along {extent} spatial dims of ``x[n, c, {SPATIAL_DIMS[dims]}]``."

    @operator(quant=SHARED_QPARAMS, error=EXACT)
    @name_reference(name, NEAREST_DOCS[exact] if dims == 1 else doc)
    def nearest(
        x: Tensor, *, output_size: tuple[int, ...], scales: tuple[float | None, ...] = (None,) * dims
    ) -> Tensor:
        return resample(x, output_size, *scales)

    _complete(nearest, resample, dims, _nearest_lowering(exact=exact), NEAREST_DTYPES)
    return nearest


def _declare_interpolation(name: str, dims: int, doc: str, mode: str, **modes: Any) -> Operator:
    """Declare the interpolation of ``dims`` spatial dims by a mode of ONNX's Resize."""
    resample = getattr(aten, name)

    @operator(quant=OWN_QPARAMS, error=INTERPOLATION)
    @name_reference(name, doc)
    def interpolation(
        x: Tensor,
        *,
        output_size: tuple[int, ...],
        align_corners: bool,
        scales: tuple[float | None, ...] = (None,) * dims,
    ) -> Tensor:
        return resample(x, output_size, align_corners, *scales)

    _complete(interpolation, resample, dims, _interpolation_lowering(mode, **modes))
    return interpolation


def _declare_antialiased(name: str, doc: str, mode: str, **modes: Any) -> Operator:
    """Declare the antialiased interpolation of two spatial dims by a mode of ONNX's Resize."""
    resample = getattr(aten, f"_{name}")

    @operator(quant=OWN_QPARAMS, error=INTERPOLATION)
    @name_reference(name, doc)
    def interpolation(
        x: Tensor, *, output_size: tuple[int, ...], scales: tuple[float | None, ...] = (None, None)
    ) -> Tensor:
        return resample(x, output_size, False, *scales)

    _complete(interpolation, resample, 2, _interpolation_lowering(mode, **modes, **ANTIALIAS_ATTRIBUTES))
    return interpolation


upsample_nearest1d, upsample_nearest2d, upsample_nearest3d = (_declare_nearest(n, exact=False) for n in (1, 2, 3))
upsample_nearest_exact1d, upsample_nearest_exact2d, upsample_nearest_exact3d = (
    _declare_nearest(n, exact=True) for n in (1, 2, 3)
)

upsample_linear1d = _declare_interpolation(
    "upsample_linear1d",
    1,
    "Linear interpolation of ``x[n, c, w]``; ``align_corners`` keeps the first and last elements in place.",
    "linear",
)
upsample_bilinear2d = _declare_interpolation(
    "upsample_bilinear2d",
    2,
    "Bilinear interpolation of ``x[n, c, h, w]``; ``align_corners`` keeps the corners in place.",
    "linear",
)
upsample_trilinear3d = _declare_interpolation(
    "upsample_trilinear3d",
    3,
    "Trilinear interpolation of ``x[n, c, d, h, w]``; ``align_corners`` keeps the corners in place.",
    "linear",
)
upsample_bicubic2d = _declare_interpolation(
    "upsample_bicubic2d",
    2,
    "Bicubic interpolation of ``x[n, c, h, w]`` over 16 neighbours, by cubic convolution with a = -0.75.",
    "cubic",
    cubic_coeff_a=-0.75,
)
upsample_bilinear2d_aa = _declare_antialiased(
    "upsample_bilinear2d_aa",
    "Antialiased bilinear interpolation of ``x[n, c, h, w]``: downsampling uses more neighbours.",
    "linear",
)
upsample_bicubic2d_aa = _declare_antialiased(
    "upsample_bicubic2d_aa",
    "Antialiased bicubic interpolation of ``x[n, c, h, w]`` (a = -0.5): downsampling uses more neighbours.",
    "cubic",
    cubic_coeff_a=-0.5,
)
