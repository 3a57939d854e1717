"""Reductions over dims: sums, means, products, min/max, all and any.

ONNX Runtime's ReduceMax and ReduceMin ignore NaN unless it comes first. This is not corrected here: checking for NaN
makes a reduction eight times as slow (1.31, one thread).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clika_ref.core.accuracy import COMPOSE, DOT, EXACT, SOFTMAX
from clika_ref.core.operators import operator
from clika_ref.core.traits import OWN_QPARAMS, SHARED_QPARAMS
from clika_ref.core.types import TensorType
from clika_ref_aten.elementwise import HALF_DTYPES
from clika_ref_aten.ordering import reduce_min_max

aten = torch.ops.aten

SUMMABLE_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)
"""Dtypes that runtimes sum and multiply; other integers are computed in int64, which wraps around to the same bits."""

COMPARABLE_DTYPES = (*SUMMABLE_DTYPES, torch.uint8, torch.int8)
"""Dtypes that runtimes compare."""


def as_dims(dim: int | tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Normalize ``dim`` to a tuple, or None for all dims; an empty tuple means all dims, as in ATen."""
    if dim is None or dim == ():
        return None
    return (dim,) if isinstance(dim, int) else tuple(dim)


def axes_operand(op, x, dim):
    """Return the reduced dims as an operand of Reduce*; None for all dims, and for a 0-d tensor."""
    dims = as_dims(dim)
    rank = op.rank(x)
    return op.ints([d % rank for d in dims]) if dims and rank else None


def count_reduced(shape, dim):
    """Return the number of elements that a reduction over ``dim`` combines into one."""
    dims = as_dims(dim) if shape else None
    return math.prod(shape if dims is None else (shape[d] for d in dims))


def mean_of(op, x, count, over, *, keepdims):
    """Return the mean of ``count`` elements; NaN for no elements, where runtimes return 0."""
    mean = op.ReduceMean(x, over, keepdims=keepdims)
    return op.Div(mean, op.cast(is_nonempty(op, count), op.dtype(x))) if op.sizes.may_be_zero(count) else mean


def is_nonempty(op, count):
    """Return whether ``count`` is not 0, as a 0-d bool."""
    return op.cast(op.scalar(count, torch.int64), torch.bool)


def shape_after_reduction(shape, dim, *, keepdim):
    """Return the shape after a reduction over ``dim``; fake tensors reject dims that may be empty."""
    dims = as_dims(dim)
    gone = range(len(shape)) if dims is None else [d % max(len(shape), 1) for d in dims]
    return tuple(1 if d in gone else size for d, size in enumerate(shape) if keepdim or d not in gone)


def selection_type(x, *, dim=None, keepdim=False):
    """Type rule of reductions that select an element."""
    return TensorType(x.dtype, shape_after_reduction(x.shape, dim, keepdim=keepdim))


def to_comparable(op, x):
    """Return ``x`` in a dtype that runtimes compare."""
    return x if op.dtype(x) in COMPARABLE_DTYPES else op.cast(x, torch.int32)


def _sum(op, x, over, *, keepdims):
    """Sum in the dtype of the result; integers are summed as int64, which wraps around to the same bits."""
    dtype = op.result.dtype
    if dtype.is_floating_point:
        return op.ReduceSum(op.cast(x, dtype), over, keepdims=keepdims)
    if dtype == op.dtype(x) == torch.int64:
        return _sum_int64(op, x, over, keepdims=keepdims)
    wide = op.cast(op.cast(x, dtype), torch.int64)
    return op.cast(op.ReduceSum(wide, over, keepdims=keepdims), dtype)


def _sum_int64(op, x, over, *, keepdims):
    """Sum int64 as two 32-bit halves: ONNX Runtime sums in float64, which is exact for up to 2^21 halves."""
    half = op.scalar(2**32, torch.int64)
    low = op.Mod(x, half)  # at least 0; TensorRT does not import BitwiseAnd
    high = op.Div(op.Sub(x, low), half)
    highs, lows = (op.ReduceSum(part, over, keepdims=keepdims) for part in (high, low))
    return op.Add(op.Mul(highs, half), lows)


def _min_max_lowering(op_type):
    """Return the lowering of a maximum or minimum over dims."""

    def lower(op, x, *, dim, keepdim):
        found = reduce_min_max(op, op_type, to_comparable(op, x), axes_operand(op, x, dim), keepdims=keepdim)
        return op.cast(found, op.result.dtype)

    return lower


def _all_any_lowering(op_type):
    """Return the lowering of all or any: runtimes reduce bools as integers."""

    def lower(op, x, *, dim, keepdim):
        truth = op.cast(x, torch.bool)
        if dim == ():  # ATen reduces no dims here, unlike everywhere else
            return op.cast(truth, op.result.dtype)
        truth = op.cast(truth, torch.int32)
        reduced = op.node(op_type, truth, axes_operand(op, x, dim), keepdims=keepdim)
        found = op.node("Greater", reduced, op.scalar(0, torch.int32))  # no elements: the smallest integer
        return op.cast(found, op.result.dtype)

    return lower


def draw_dims(draw, s, x):
    """Draw None, one dim, or two."""
    form = draw(s.choice("one", "all", *(("two",) if x.rank > 1 else ()))) if x.rank else "all"
    if form == "all":
        return None
    first = draw(s.integers(-x.rank, x.rank - 1))
    return (first,) if form == "one" else (first, (first + draw(s.integers(1, x.rank - 1))) % x.rank)


def _reduction_sampler(*dtypes, low=-3.0, high=3.0, to=()):
    """Return a sampler for a tensor of one of the dtypes, reduced over any dims; ``to`` lists dtypes of the result."""

    def sample(draw, s):
        x = draw(s.tensor(dtype=dtypes, low=low, high=high))
        attrs = {"dim": draw_dims(draw, s, x), "keepdim": draw(s.booleans())}
        return s.call(x, **attrs, **({"dtype": draw(s.choice(None, *to))} if to else {}))

    return sample


def _all_any_sampler(*dtypes, **bounds):
    """Return a sampler like `_reduction_sampler` that also draws the empty tuple of dims."""
    plain = _reduction_sampler(*dtypes, **bounds)

    def sample(draw, s):
        call = plain(draw, s)
        return call if draw(s.integers(0, 5)) else s.call(*call.operands, dim=(), keepdim=call.attrs["keepdim"])

    return sample


# Sums and means


@operator(aten.sum.default, aten.sum.dim_IntList, quant=OWN_QPARAMS, error=DOT)
def sum_(
    x: Tensor, *, dim: tuple[int, ...] | None = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """Sum over the dims ``dim`` (None: all), computed in ``dtype``; integers and bools give int64."""
    return torch.sum(x, dim, keepdim, dtype=dtype)


@sum_.onnx
def _(op, x, *, dim, keepdim, dtype):
    return _sum(op, x, axes_operand(op, x, dim), keepdims=keepdim)


sum_.samples(
    _reduction_sampler(torch.float32, torch.int64, torch.bool, torch.uint8, high=4, to=(torch.float32, torch.int32))
)


@operator(aten.mean.default, aten.mean.dim, quant=OWN_QPARAMS, error=DOT)
def mean(
    x: Tensor, *, dim: tuple[int, ...] | None = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """Mean over the dims ``dim`` (None: all), computed in ``dtype``."""
    return torch.mean(x, dim, keepdim, dtype=dtype)


@mean.onnx
def _(op, x, *, dim, keepdim, dtype):
    (wide,) = op.promote(x)
    return mean_of(op, wide, count_reduced(op.shape(x), dim), axes_operand(op, x, dim), keepdims=keepdim)


@mean.samples
def _(draw, s):
    x = draw(s.tensor(dtype=(torch.float32, torch.int64), low=-3, high=4))
    own = (None,) if x.dtype.is_floating_point else ()  # the mean of integers needs a float dtype
    dtype = draw(s.choice(*own, torch.float32, torch.float64))
    return s.call(x, dim=draw_dims(draw, s, x), keepdim=draw(s.booleans()), dtype=dtype)


@operator(aten.nansum.default, error=DOT)
def nansum(
    x: Tensor, *, dim: tuple[int, ...] | None = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """Sum over the dims ``dim`` (None: all), ignoring NaN."""
    return torch.nansum(x, dim, keepdim, dtype=dtype)


@nansum.onnx
def _(op, x, *, dim, keepdim, dtype):
    values = op.Where(op.IsNaN(x), op.like(x, 0.0), x) if op.dtype(x).is_floating_point else x
    return _sum(op, values, axes_operand(op, x, dim), keepdims=keepdim)


nansum.samples(_reduction_sampler(torch.float32, torch.int64, high=4, to=(torch.float64,)))


@operator(aten.nanmean.default, error=DOT)
def nanmean(
    x: Tensor, *, dim: tuple[int, ...] | None = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """Mean over the dims ``dim`` (None: all), ignoring NaN."""
    return torch.nanmean(x, dim, keepdim, dtype=dtype)


@nanmean.onnx
def _(op, x, *, dim, keepdim, dtype):
    missing, over = op.IsNaN(x), axes_operand(op, x, dim)
    (values,) = op.promote(op.Where(missing, op.like(x, 0.0), x))
    count = op.ReduceSum(op.cast(op.Not(missing), op.result.dtype), over, keepdims=keepdim)
    return op.Div(op.ReduceSum(values, over, keepdims=keepdim), count)


nanmean.samples(_reduction_sampler(torch.float32, high=4, to=(torch.float64,)))


@operator(aten.prod.default, aten.prod.dim_int, error=COMPOSE)
def prod(x: Tensor, *, dim: int | None = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    """Multiply the elements along ``dim`` (None: all elements); integers give int64."""
    return torch.prod(x, dtype=dtype) if dim is None else torch.prod(x, dim, keepdim, dtype=dtype)


@prod.onnx
def _(op, x, *, dim, keepdim, dtype):
    dtype = op.result.dtype
    factors = op.cast(x, dtype if dtype in SUMMABLE_DTYPES else torch.int64)
    return op.cast(op.ReduceProd(factors, axes_operand(op, x, dim), keepdims=keepdim and dim is not None), dtype)


@prod.samples
def _(draw, s):
    x = draw(s.tensor(dtype=(torch.float32, torch.int64, torch.int32, torch.bool)))
    dim = draw(s.integers(-x.rank, x.rank - 1)) if x.rank and draw(s.booleans()) else None
    return s.call(x, dim=dim, keepdim=draw(s.booleans()), dtype=draw(s.choice(None, torch.float32)))


@operator(aten.logsumexp.default, error=SOFTMAX)
def logsumexp(x: Tensor, *, dim: tuple[int, ...], keepdim: bool = False) -> Tensor:
    """``log(sum(exp(x)))`` over the dims ``dim`` (none given: all), without overflow."""
    return torch.logsumexp(x, dim, keepdim)


@logsumexp.types
def _(x, *, dim, keepdim):
    dtype = x.dtype if x.dtype.is_floating_point else torch.get_default_dtype()
    return TensorType(dtype, shape_after_reduction(x.shape, dim, keepdim=keepdim))


@logsumexp.onnx
def _(op, x, *, dim, keepdim):
    dtype = op.result.dtype  # in FP16, ONNX Runtime uses the definition, which overflows
    (wide,) = op.promote(x, to=torch.float32 if dtype in HALF_DTYPES else dtype)
    # ONNX Runtime 1.31 subtracts at least 0 if the first element is -inf, and numbers below -88 then count as -inf.
    none, lowest = op.like(wide, -math.inf), op.like(wide, torch.finfo(op.dtype(wide)).min)
    finite = op.Where(op.Equal(wide, none), lowest, wide)
    found = op.declare(op.ReduceLogSumExp(finite, axes_operand(op, x, dim), keepdims=keepdim), op.dtype(wide))
    return op.cast(op.Where(op.LessOrEqual(found, lowest), none, found), dtype)


@logsumexp.samples
def _(draw, s):
    x = draw(s.tensor(dtype=(torch.float32, torch.int64), low=-100, high=100))
    return s.call(x, dim=draw_dims(draw, s, x) or tuple(range(x.rank)), keepdim=draw(s.booleans()))


# Minimum and maximum


@operator(aten.amax.default, aten.max.default, quant=SHARED_QPARAMS, error=EXACT)
def amax(x: Tensor, *, dim: tuple[int, ...] = (), keepdim: bool = False) -> Tensor:
    """Return the largest element over the dims ``dim`` (none given: all)."""
    return torch.amax(x, () if dim is None else dim, keepdim)


amax.types(selection_type)
amax.onnx(_min_max_lowering("ReduceMax"))
amax.samples(_reduction_sampler(torch.float32, torch.int64, torch.int32, torch.bool, torch.uint8))


@operator(aten.amin.default, aten.min.default, quant=SHARED_QPARAMS, error=EXACT)
def amin(x: Tensor, *, dim: tuple[int, ...] = (), keepdim: bool = False) -> Tensor:
    """Return the smallest element over the dims ``dim`` (none given: all)."""
    return torch.amin(x, () if dim is None else dim, keepdim)


amin.types(selection_type)
amin.onnx(_min_max_lowering("ReduceMin"))
amin.samples(_reduction_sampler(torch.float32, torch.int64, torch.int16, torch.bool, torch.int8))


@operator(aten.aminmax.default, quant=SHARED_QPARAMS, error=EXACT)
def aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest element along ``dim`` (None: of all elements)."""
    return torch.aminmax(x, dim=dim, keepdim=keepdim)


@aminmax.types
def _(x, *, dim, keepdim):
    return (selection_type(x, dim=dim, keepdim=keepdim),) * 2


@aminmax.onnx
def _(op, x, *, dim, keepdim):
    return tuple(_min_max_lowering(kind)(op, x, dim=dim, keepdim=keepdim) for kind in ("ReduceMin", "ReduceMax"))


@aminmax.samples
def _(draw, s):
    x = draw(s.tensor(dtype=(torch.float32, torch.int64)))
    dim = draw(s.integers(-x.rank, x.rank - 1)) if x.rank and draw(s.booleans()) else None
    return s.call(x, dim=dim, keepdim=draw(s.booleans()))


# All and any


@operator(aten.all.default, aten.all.dims, aten._is_all_true.default, error=EXACT)  # noqa: SLF001 - a name of ATen
def all_(x: Tensor, *, dim: tuple[int, ...] | None = None, keepdim: bool = False) -> Tensor:
    """Whether all elements over the dims ``dim`` (None: all) are nonzero."""
    return torch.all(x, dim=dim, keepdim=keepdim)


all_.onnx(_all_any_lowering("ReduceMin"))
all_.samples(_all_any_sampler(torch.bool, torch.float32, torch.int64, torch.uint8, low=0))


@all_.from_torch(aten.all.dim)
def _(x, dim, keepdim=False):
    return all_.call(x, dim=(dim,), keepdim=keepdim)


@operator(aten.any.default, aten.any.dims, aten._is_any_true.default, error=EXACT)  # noqa: SLF001 - a name of ATen
def any_(x: Tensor, *, dim: tuple[int, ...] | None = None, keepdim: bool = False) -> Tensor:
    """Whether any element over the dims ``dim`` (None: all) is nonzero."""
    return torch.any(x, dim=dim, keepdim=keepdim)


any_.onnx(_all_any_lowering("ReduceMax"))
any_.samples(_all_any_sampler(torch.bool, torch.float32, torch.int64, torch.uint8, low=-1, high=1))


@any_.from_torch(aten.any.dim)
def _(x, dim, keepdim=False):
    return any_.call(x, dim=(dim,), keepdim=keepdim)


@operator(aten.count_nonzero.dim_IntList, error=EXACT)
def count_nonzero(x: Tensor, *, dim: tuple[int, ...] | None = None) -> Tensor:
    """Count the nonzero elements over the dims ``dim`` (None: all)."""
    return torch.count_nonzero(x, dim)


@count_nonzero.onnx
def _(op, x, *, dim):
    nonzero = op.cast(op.cast(x, torch.bool), torch.int64)
    return op.ReduceSum(nonzero, axes_operand(op, x, dim), keepdims=False)


@count_nonzero.from_torch(aten.count_nonzero.default)
def _(x, dim=None):
    return count_nonzero.call(x, dim=as_dims(dim))


@count_nonzero.samples
def _(draw, s):
    x = draw(s.tensor(dtype=(torch.float32, torch.int64, torch.bool), low=-1, high=1))
    return s.call(x, dim=draw_dims(draw, s, x))
