"""Cumulative sums, products, maxima and minima along a dim, and differences of neighbours.

Where ONNX has no such operator, a scan combines the results of spans of 1, 2, 4, ... elements. It takes one step per
binary digit of the size, which must be static.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from clika_ref.core.accuracy import COMPOSE, DOT, EXACT, SOFTMAX
from clika_ref.core.errors import TargetError
from clika_ref.core.operators import operator
from clika_ref.core.symbols import is_symbolic
from clika_ref.core.traits import OWN_QPARAMS
from clika_ref.core.types import TensorType
from clika_ref.torch_internals.symbols import torch_sympy
from clika_ref_aten.reduction import SUMMABLE_DTYPES

aten = torch.ops.aten


def _dim_sampler(*dtypes, low=-2.0, high=2.0):
    """Return a sampler for a tensor and one of its dims."""

    def sample(draw, s):
        x = draw(s.tensor(dtype=dtypes, size=(1, 6), low=low, high=high))
        return s.call(x, dim=draw(s.integers(-x.rank, x.rank - 1)) if x.rank else draw(s.choice(0, -1)))

    return sample


def _draw_dim_and_dtype(draw, s):
    """Draw a tensor, one of its dims, and a dtype of the result."""
    call = _dim_sampler(torch.float32, torch.int64, torch.uint8, torch.bool)(draw, s)
    return s.call(*call.operands, **call.attrs, dtype=draw(s.choice(None, torch.float32, torch.int32)))


def _scan_steps(op, x, dim):
    """Return the spans 1, 2, 4, ... below the size of ``dim``.

    Raises:
        TargetError: the size is dynamic.
    """
    length = op.shape(x)[dim]
    if is_symbolic(length):
        raise TargetError(
            f"a cumulative operator along the dynamic dim {length}: ONNX has no form for it. Give the dim a fixed size"
        )
    return [2**i for i in range(max(length - 1, 0).bit_length())]


def _shift(op, x, dim, step, first):
    """Shift a tensor by ``step`` elements towards the end of ``dim``; ``first`` fills the start."""
    rank = len(op.result.shape)
    pads = [0] * (2 * rank)
    pads[dim % rank], pads[dim % rank + rank] = step, -step
    return op.Pad(x, op.ints(pads), op.like(x, first))


@operator(aten.cumsum.default, quant=OWN_QPARAMS, error=DOT)
def cumsum(x: Tensor, *, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """``y[i] = x[0] + ... + x[i]`` along ``dim``, computed in ``dtype``; integers and bools give int64."""
    return torch.cumsum(x, dim, dtype=dtype)


@cumsum.onnx
def _(op, x, *, dim, dtype):
    dtype = op.result.dtype
    summed = op.cast(x, dtype if dtype in SUMMABLE_DTYPES else torch.int64)
    if op.rank(x):
        summed = op.CumSum(summed, op.constant(dim, torch.int64))
    return op.Identity(x) if summed is x else op.cast(summed, dtype)


cumsum.samples(_draw_dim_and_dtype)


@operator(aten.cumprod.default, error=COMPOSE)
def cumprod(x: Tensor, *, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """``y[i] = x[0] * ... * x[i]`` along ``dim``, computed in ``dtype``; integers and bools give int64."""
    return torch.cumprod(x, dim, dtype=dtype)


@cumprod.onnx
def _(op, x, *, dim, dtype):
    dtype = op.result.dtype
    result = op.cast(x, dtype if dtype in SUMMABLE_DTYPES else torch.int64)
    for step in _scan_steps(op, x, dim) if op.rank(x) else ():
        result = op.Mul(result, _shift(op, result, dim, step, 1))
    return op.cast(result, dtype)


cumprod.samples(_draw_dim_and_dtype)


@operator(aten.logcumsumexp.default, error=SOFTMAX)
def logcumsumexp(x: Tensor, *, dim: int) -> Tensor:
    """``log(exp(x[0]) + ... + exp(x[i]))`` along ``dim``, without overflow."""
    return torch.logcumsumexp(x, dim)


@logcumsumexp.onnx
def _(op, x, *, dim):
    result = x
    for step in _scan_steps(op, x, dim) if op.rank(x) else ():
        other = _shift(op, result, dim, step, -math.inf)
        distance = op.Abs(op.Sub(result, other))
        distance = op.Where(op.Equal(result, other), op.like(x, 0.0), distance)  # inf - inf is NaN
        result = op.Add(op.Max(result, other), op.Log(op.Add(op.Exp(op.Neg(distance)), op.like(x, 1.0))))
    return result


logcumsumexp.samples(_dim_sampler(torch.float32, low=-50, high=50))


@operator(aten.cummax.default, error=EXACT)
def cummax(x: Tensor, *, dim: int) -> tuple[Tensor, Tensor]:
    """Return the cumulative maximum along ``dim``, and the last index where it occurs."""
    return torch.cummax(x, dim)


@operator(aten.cummin.default, error=EXACT)
def cummin(x: Tensor, *, dim: int) -> tuple[Tensor, Tensor]:
    """Return the cumulative minimum along ``dim``, and the last index where it occurs."""
    return torch.cummin(x, dim)


def _cumulative_min_max(wins):
    """Return the lowering of a cumulative maximum or minimum; ``wins`` compares an element with the best so far."""

    def lower(op, x, *, dim):
        if op.rank(x) == 0:
            return op.Identity(x), op.constant(0, torch.int64)
        dtype, shape = op.dtype(x), op.shape(x)
        is_supported = dtype.is_floating_point or dtype in (torch.int64, torch.int32)
        values = x if is_supported else op.cast(x, torch.int32)
        axis = dim % len(shape)
        steps = _scan_steps(op, x, dim)
        count = torch.arange(shape[axis]).reshape([-1 if d == axis else 1 for d in range(len(shape))])
        positions = op.Expand(op.constant(count, torch.int64), op.ints(shape))
        for step in steps:
            # Position -1 marks padding before the start; it never wins.
            best, at = _shift(op, values, dim, step, 0), _shift(op, positions, dim, step, -1)
            later = op.Or(op.node(wins, values, best), op.Less(at, op.like(at, 0)))
            if dtype.is_floating_point:
                later = op.Or(later, op.IsNaN(values))  # NaN beats all other elements, and a later NaN an earlier one
            values, positions = op.Where(later, values, best), op.Where(later, positions, at)
        return op.cast(values, dtype), positions

    return lower


def _values_and_indices_type(x, *, dim):
    return x, TensorType(torch.int64, x.shape)


cummax.types(_values_and_indices_type)
cummin.types(_values_and_indices_type)
cummax.onnx(_cumulative_min_max("GreaterOrEqual"))
cummin.onnx(_cumulative_min_max("LessOrEqual"))
cummax.samples(_dim_sampler(torch.float32, torch.int64, torch.uint8, torch.bool, low=0))
cummin.samples(_dim_sampler(torch.float32, torch.int64, torch.uint8, torch.bool, low=0))


@operator(aten.diff.default, quant=OWN_QPARAMS, error=COMPOSE)
def diff(
    x: Tensor, prepend: Tensor | None = None, append: Tensor | None = None, *, n: int = 1, dim: int = -1
) -> Tensor:
    """``y[i] = x[i + 1] - x[i]`` along ``dim``, ``n`` times; ``prepend`` and ``append`` are joined to ``x`` first."""
    return torch.diff(x, n, dim, prepend, append)


@diff.types
def _(x, prepend, append, *, n, dim):
    if not n:
        return x
    shape, parts = list(x.shape), [part for part in (x, prepend, append) if part is not None]
    left = sum(part.shape[dim] for part in parts) - n
    shape[dim] = torch_sympy.Max(left, 0) if is_symbolic(left) else max(left, 0)
    return TensorType(functools.reduce(torch.promote_types, (part.dtype for part in parts)), tuple(shape))


@diff.onnx
def _(op, x, prepend, append, *, n, dim):
    if n == 0:
        return op.Identity(x)
    parts = [part for part in (prepend, x, append) if part is not None]
    result = op.Concat(*op.promote(*parts), axis=dim) if len(parts) > 1 else x
    minus = "Xor" if op.result.dtype == torch.bool else "Sub"
    for _ in range(n):
        later = op.Slice(result, op.ints([1]), op.ints([torch.iinfo(torch.int64).max]), op.ints([dim]))
        earlier = op.Slice(result, op.ints([0]), op.ints([-1]), op.ints([dim]))
        result = op.node(minus, later, earlier)
    return result


@diff.samples
def _(draw, s):
    x = draw(s.tensor(rank=(1, 3), size=(3, 6), dtype=(torch.float32, torch.int64, torch.bool)))
    dim = draw(s.integers(-x.rank, x.rank - 1))
    joined = [draw(s.tensor(shape=x.shape, dtype=x.dtype)) if draw(s.booleans()) else None for _ in range(2)]
    return s.call(x, *joined, n=draw(s.integers(0, 2)), dim=dim)
