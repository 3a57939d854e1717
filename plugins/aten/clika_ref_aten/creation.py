"""Tensor factories, such as full, arange and eye, and triangles of matrices."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.types import Number

from clika_ref.core.accuracy import EXACT
from clika_ref.core.operators import Operator, operator
from clika_ref.core.symbols import is_symbolic
from clika_ref.core.traits import KEEP_FLOAT, SHARED_QPARAMS
from clika_ref.core.types import TensorType
from clika_ref.torch_internals.symbols import CeilToInt, FloatTrueDiv, TruncToInt
from clika_ref_aten.elementwise import python_type_of
from clika_ref_aten.families import name_reference
from clika_ref_aten.size_arithmetic import is_nonnegative, make_index_range
from clika_ref_aten.spatial import ceil_divide, floor_divide

aten = torch.ops.aten

SAMPLE_DTYPES = (torch.float32, torch.int64, torch.int32, torch.bool, torch.float64, torch.uint8)


def _dtype_of(*numbers):
    """Return the dtype that ATen infers for scalars."""
    return torch.tensor([python_type_of(n)() for n in numbers], device="meta").dtype


# All constant fills become `full` (zeros, ones, new_*, *_like), so that passes see one operator


@operator(quant=KEEP_FLOAT, error=EXACT)
def full(
    *, size: tuple[int, ...], fill_value: Number, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Tensor:
    """Return a tensor of the given size, filled with ``fill_value``."""
    return torch.full(size, fill_value, dtype=dtype, device=device)


@full.onnx
def _(op, *, size, fill_value, dtype, device):
    value = op.scalar(fill_value, op.result.dtype)
    return op.Expand(value, op.ints(size)) if size else value


@full.samples
def _(draw, s):
    size = tuple(draw(s.integers(0, 3)) for _ in range(draw(s.integers(0, 3))))
    value = draw(s.choice(0, 1.5, True, -3, float("inf"), float("nan")))
    fits = SAMPLE_DTYPES if 0 <= value < 256 else (torch.float32, torch.float64, torch.float16)
    return s.call(size=size, fill_value=value, dtype=draw(s.choice(None, *fits)), device=None)


@full.from_torch(aten.full.default)
def _(size, fill_value, *, dtype=None, device=None, **storage):
    return full.call(size=tuple(size), fill_value=fill_value, dtype=dtype or _dtype_of(fill_value), device=device)


def _declare_constant_fill(number, *overloads):
    """Declare factories that fill a tensor with ``number``."""

    @full.from_torch(*overloads)
    def _(size, *unused_strides, dtype=None, device=None, **storage):
        dtype = dtype or torch.get_default_dtype()
        return full.call(size=tuple(size), fill_value=number, dtype=dtype, device=device)


def _declare_fill_like(number, *overloads):
    """Declare factories that use the shape, dtype and device of a tensor."""

    @full.from_torch(*overloads)
    def _(x, *, dtype=None, device=None, **storage):
        return full.call(size=x.type.shape, fill_value=number, dtype=dtype or x.type.dtype, device=device)


def _declare_new_fill(number, *overloads):
    """Declare factories that use the dtype and device of a tensor."""

    @full.from_torch(*overloads)
    def _(x, size, *unused_strides, dtype=None, device=None, **storage):
        return full.call(size=tuple(size), fill_value=number, dtype=dtype or x.type.dtype, device=device)


# Empty tensors are uninitialized in eager; here they are zeros, so that the artifact is deterministic.
_declare_constant_fill(
    0, aten.zeros.default, aten.empty.memory_format, aten.empty_strided.default, aten.empty_permuted.default
)
_declare_constant_fill(1, aten.ones.default)
_declare_fill_like(0, aten.zeros_like.default, aten.empty_like.default, aten.zero.default)
_declare_fill_like(1, aten.ones_like.default)
_declare_new_fill(0, aten.new_zeros.default, aten.new_empty.default, aten.new_empty_strided.default)
_declare_new_fill(1, aten.new_ones.default)


@full.from_torch(aten.full_like.default, aten.fill.Scalar)
def _(x, fill_value, *, dtype=None, device=None, **storage):
    return full.call(size=x.type.shape, fill_value=fill_value, dtype=dtype or x.type.dtype, device=device)


@full.from_torch(aten.new_full.default)
def _(x, size, fill_value, *, dtype=None, device=None, **storage):
    return full.call(size=tuple(size), fill_value=fill_value, dtype=dtype or x.type.dtype, device=device)


@full.from_torch(aten.scalar_tensor.default)
def _(s, *, dtype=None, device=None, **storage):
    return full.call(size=(), fill_value=s, dtype=dtype or torch.get_default_dtype(), device=device)


@operator(aten.fill.Tensor, quant=KEEP_FLOAT, error=EXACT)
def fill(x: Tensor, value: Tensor) -> Tensor:
    """Return a tensor of the shape and dtype of ``x``, filled with the 0-d ``value``."""
    return torch.fill(x, value)


@fill.onnx
def _(op, x, value):
    (value,) = op.promote(value)
    return op.Expand(value, op.ints(op.shape(x))) if op.rank(x) else value


@fill.samples
def _(draw, s):
    x = draw(s.tensor(dtype=(torch.float32, torch.int64, torch.bool)))
    return s.call(x, draw(s.tensor(shape=(), dtype=(torch.float32, torch.int64))))


# Sequences


@operator(error=EXACT)
def arange(
    *,
    start: Number = 0,
    end: Number,
    step: Number = 1,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """``start, start + step, ...`` up to, but not including, ``end``.

    Raises:
        ValueError: the step is infinite; PyTorch returns one element or raises, depending on the device.
    """
    if isinstance(step, float) and math.isinf(step):
        raise ValueError(f"arange does not support the step {step}. Use a finite one.")
    return torch.arange(start, end, step, dtype=dtype, device=device)


@arange.types
def _(*, start, end, step, dtype, device):
    dtype = dtype or _dtype_of(start, end, step, 0)
    if not is_symbolic((start, end, step)):
        return TensorType(dtype, tuple(torch.arange(start, end, step, dtype=dtype, device="meta").shape))
    return TensorType(dtype, (_arange_length(*_truncate_bounds(start, end, step, dtype=dtype)),))


def truncate_to_int(number: Any) -> Any:
    """Truncate a number or a size expression to an integer."""
    if is_symbolic(number):
        return number if number.is_integer else TruncToInt(number)
    return int(number)


def _truncate_bounds(*numbers, dtype) -> tuple[Any, ...]:
    """Return start, end and step as eager counts with them: truncated for int64, but not for other integer dtypes."""
    return tuple(map(truncate_to_int, numbers)) if dtype == torch.int64 else numbers


def _arange_length(start, end, step) -> Any:
    """Return ``ceil((end - start) / step)`` as a size expression."""
    if float in map(python_type_of, (start, end, step)):
        return CeilToInt(FloatTrueDiv(end - start, step))
    if step == 1:
        return end - start
    if is_nonnegative(step):
        return ceil_divide(end - start, step)
    return -floor_divide(start - end, step)


@arange.onnx
def _(op, *, start, end, step, dtype, device):
    dtype, (count,) = op.result.dtype, op.result.shape
    if not is_symbolic((start, end, step)):
        return op.constant(torch.arange(start, end, step, dtype=dtype), dtype)
    start, end, step = _truncate_bounds(start, end, step, dtype=dtype)
    if all(python_type_of(n) is int for n in (start, end, step)) and is_nonnegative(start) and is_nonnegative(step):
        return op.cast(op.Range(*op.promote(start, end, step, to=torch.int64)), dtype)
    if not dtype.is_floating_point:
        start, step = truncate_to_int(start), truncate_to_int(step)  # as eager does, after computing the length
    # Integer positions first: ONNX Runtime rewrites Gather(x, Range) as a Slice, where an end of -1 means the last
    # element. And a Range of floats is a running sum, which would drift.
    position = make_index_range(op, count)
    wide = torch.float64 if float in map(python_type_of, (start, step)) else torch.int64
    position, first, by = op.promote(position, start, step, to=wide)
    return op.cast(op.Add(op.Mul(position, by), first), dtype)


@arange.samples
def _(draw, s):
    step = draw(s.choice(1, 2, -1, 0.5, -3))
    count, start = draw(s.integers(0, 6)), draw(s.choice(0, -2, 1.5, 7))
    dtype = draw(s.choice(None, torch.float32, torch.int32, torch.float64))
    if dtype is torch.int32:
        step, start = int(step) or 1, int(start)
    beyond = draw(s.integers(0, 1)) * (1 if step > 0 else -1)
    return s.call(start=start, end=start + count * step + beyond, step=step, dtype=dtype, device=None)


def _arange(start, end, step, dtype, device):
    dtype = dtype or _dtype_of(start, end, step, 0)
    return arange.call(start=start, end=end, step=step, dtype=dtype, device=device)


@arange.from_torch(aten.arange.default)
def _(end, *, dtype=None, device=None, **storage):
    return _arange(0, end, 1, dtype, device)


@arange.from_torch(aten.arange.start, aten.arange.start_step)
def _(start, end, step=1, *, dtype=None, device=None, **storage):
    return _arange(start, end, step, dtype, device)


# Matrices


@operator(aten.eye.m, error=EXACT)
def eye(*, n: int, m: int, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
    """Return a matrix ``[n, m]`` with ones on the diagonal and zeros elsewhere."""
    return torch.eye(n, m, dtype=dtype, device=device)


@eye.from_torch(aten.eye.default)
def _(n, *, dtype=None, device=None, **storage):
    return eye.call(n=n, m=n, dtype=dtype or torch.get_default_dtype(), device=device)


@eye.onnx
def _(op, *, n, m, dtype, device):
    row = op.Unsqueeze(make_index_range(op, n), op.ints([1]))
    return op.cast(op.Equal(row, make_index_range(op, m)), op.result.dtype)


@eye.samples
def _(draw, s):
    dtype = draw(s.choice(None, *SAMPLE_DTYPES))
    return s.call(n=draw(s.integers(0, 4)), m=draw(s.integers(0, 4)), dtype=dtype, device=None)


def _declare_triangle_indices(name: str, half: str) -> Operator:
    """Declare the indices of a triangle, with a conversion: ATen's schema encodes the default dtype as an integer."""
    make = getattr(torch, name)

    @operator(error=EXACT)
    @name_reference(name, f"Return the indices ``[2, n]`` on and {half} a diagonal of a matrix ``[row, col]``.")
    def indices(
        *,
        row: int,
        col: int,
        offset: int = 0,
        dtype: torch.dtype | None = torch.int64,
        device: torch.device | None = None,
    ) -> Tensor:
        return make(row, col, offset, dtype=dtype or torch.int64, device=device)

    @indices.onnx
    def _(op, **attrs):
        return op.constant(indices(**attrs), op.result.dtype)

    @indices.from_torch(getattr(aten, name).default)
    def _(row, col, offset=0, *, dtype=None, device=None, **storage):
        return indices.call(row=row, col=col, offset=offset, dtype=dtype or torch.int64, device=device)

    @indices.samples
    def _(draw, s):
        size = {"row": draw(s.integers(0, 4)), "col": draw(s.integers(0, 4))}
        dtypes = s.choice(torch.int64, torch.int32)
        return s.call(**size, offset=draw(s.integers(-2, 2)), dtype=draw(dtypes), device=None)

    return indices


tril_indices = _declare_triangle_indices("tril_indices", "below")
triu_indices = _declare_triangle_indices("triu_indices", "above")


def _declare_triangle(name: str, sign: str, *, upper: bool) -> Operator:
    """Declare the triangle of a matrix on one side of a diagonal."""
    keep = getattr(torch, name)

    @operator(getattr(aten, name).default, quant=SHARED_QPARAMS, error=EXACT)
    @name_reference(name, f"Keep ``x[..., i, j]`` where ``j - i {sign} diagonal``, with zeros elsewhere.")
    def triangle(x: Tensor, *, diagonal: int = 0) -> Tensor:
        return keep(x, diagonal)

    @triangle.onnx
    def _(op, x, *, diagonal):
        is_narrow = op.dtype(x) in (torch.int32, torch.int16, torch.int8, torch.uint8)
        whole = op.cast(x, torch.int64) if is_narrow else x  # ONNX Runtime has Trilu of int64 only
        return op.cast(op.Trilu(whole, op.scalar(diagonal, torch.int64), upper=upper), op.result.dtype)

    @triangle.samples
    def _(draw, s):
        x = draw(s.tensor(rank=(2, 5), dtype=(torch.float32, torch.int64, torch.bool, torch.int32, torch.uint8)))
        return s.call(x, diagonal=draw(s.integers(-4, 4)))

    return triangle


tril = _declare_triangle("tril", "<=", upper=False)
triu = _declare_triangle("triu", ">=", upper=True)
