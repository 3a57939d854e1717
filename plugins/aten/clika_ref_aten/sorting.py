"""Sorting, and largest and smallest elements with their indices.

Eager orders NaN above all other elements; TopK, ArgMax and ArgMin of ONNX Runtime order it arbitrarily. Targets declare
this difference: the correct order of NaN would cost each call a second pass over the data.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clika_ref.core.accuracy import EXACT
from clika_ref.core.operators import operator
from clika_ref.core.traits import SHARED_QPARAMS
from clika_ref.core.types import TensorType
from clika_ref.torch_internals.symbols import FloorDiv
from clika_ref_aten.broadcasting import lower_broadcast
from clika_ref_aten.elementwise import unary_sampler
from clika_ref_aten.indexing import as_vector, match_rank
from clika_ref_aten.reduction import shape_after_reduction, to_comparable

aten = torch.ops.aten

SAMPLE_DTYPES = (torch.float32, torch.int64, torch.int32, torch.uint8)
"""Dtypes of samples. Samples without ties have at most 125 elements, which all differ in uint8."""


TOPK_DTYPES = {torch.bool: torch.int32, torch.bfloat16: torch.float32}
"""Dtypes that TopK does not support (bfloat16 before opset 24), and dtypes with the same order of elements."""


def _top_k(op, x, k, dim, *, largest, ordered=True):
    """Return the ``k`` first elements in order and their indices; the order is stable."""
    sortable = op.cast(as_vector(op, x), TOPK_DTYPES.get(op.dtype(x), op.dtype(x)))
    values, positions = op.TopK(sortable, op.ints([k]), axis=dim, largest=largest, sorted=ordered, outputs=2)
    return op.cast(values, op.dtype(x)), op.declare(positions, torch.int64)


def _dim_size(op, x, dim):
    return op.shape(x)[dim] if op.rank(x) else 1


def _match_rank(op, x, results):
    """Reshape the results to 0-d if ``x`` is 0-d."""
    return tuple(match_rank(op, x, r) for r in results)


@operator(aten.topk.default, error=EXACT)
def topk(x: Tensor, *, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """Return the ``k`` largest (or smallest) elements along ``dim`` and their indices, in order if ``sorted``."""
    return torch.topk(x, k, dim, largest, sorted)


@topk.types
def _(x, *, k, dim, largest, sorted):
    shape = list(x.shape)
    if shape:
        shape[dim] = k
    return TensorType(x.dtype, tuple(shape)), TensorType(torch.int64, tuple(shape))


@topk.onnx
def _(op, x, *, k, dim, largest, sorted):
    return _match_rank(op, x, _top_k(op, x, k, dim, largest=largest, ordered=sorted))


def _draw_count(draw, s, *dtypes):
    """Draw a tensor without ties, one of its dims, and a number up to the size of the dim."""
    x = draw(s.tensor(dtype=dtypes, low=0, high=255, unique=True, rank=(0, 3)))
    dim = draw(s.integers(-x.rank, x.rank - 1)) if x.rank else -1
    return x, dim, draw(s.integers(1, x.shape[dim])) if x.rank else 1


@topk.samples
def _(draw, s):
    x, dim, k = _draw_count(draw, s, *SAMPLE_DTYPES)
    return s.call(x, k=k, dim=dim, largest=draw(s.booleans()), sorted=k > 1 or draw(s.booleans()))


def _sort_dim(op, x, dim, *, descending):
    return _top_k(op, x, _dim_size(op, x, dim), dim, largest=descending)


@operator(aten.sort.default, error=EXACT)
def sort(x: Tensor, *, dim: int = -1, descending: bool = False, stable: bool = False) -> tuple[Tensor, Tensor]:
    """Return the sorted elements along ``dim`` and their indices; the sort is stable."""
    return torch.sort(x, dim=dim, descending=descending, stable=stable)


@sort.onnx
def _(op, x, *, dim, descending, stable):
    return _match_rank(op, x, _sort_dim(op, x, dim, descending=descending))


def _draw_order(draw, s):
    stable = draw(s.booleans())
    x = draw(s.tensor(rank=(0, 3), dtype=SAMPLE_DTYPES, low=0, high=4 if stable else 255, unique=not stable))
    dim = draw(s.integers(-x.rank, x.rank - 1)) if x.rank else draw(s.choice(0, -1))
    return s.call(x, dim=dim, descending=draw(s.booleans()), stable=stable)


sort.samples(_draw_order)


@operator(aten.argsort.default, aten.argsort.stable, error=EXACT)
def argsort(x: Tensor, *, dim: int = -1, descending: bool = False, stable: bool = False) -> Tensor:
    """Return the indices that sort the elements along ``dim``; the sort is stable."""
    return torch.argsort(x, dim=dim, descending=descending, stable=stable)


@argsort.onnx
def _(op, x, *, dim, descending, stable):
    return _match_rank(op, x, _sort_dim(op, x, dim, descending=descending))[1]


argsort.samples(_draw_order)


@sort.from_torch(aten.sort.stable)
def _(x, *, stable=None, dim=-1, descending=False):
    return sort.call(x, dim=dim, descending=descending, stable=bool(stable))


@operator(aten.msort.default, quant=SHARED_QPARAMS, error=EXACT)
def msort(x: Tensor) -> Tensor:
    """Return the sorted elements along the first dim."""
    return torch.msort(x)


@msort.onnx
def _(op, x):
    return _match_rank(op, x, _sort_dim(op, x, 0, descending=False))[0]


msort.samples(unary_sampler(dtype=SAMPLE_DTYPES, low=0))


# One element of the order


def _kth_smallest(op, x, k, dim, *, keepdim):
    """Return the ``k``-th smallest element (from 1) along ``dim``, and its index."""
    found = _top_k(op, x, k, dim, largest=False)
    if not op.rank(x):
        return _match_rank(op, x, found)
    last = op.constant([-1] if keepdim else -1, torch.int64)
    return tuple(op.Gather(part, last, axis=dim) for part in found)


@operator(aten.kthvalue.default, error=EXACT)
def kthvalue(x: Tensor, *, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the ``k``-th smallest element (from 1) along ``dim``, and its index."""
    return torch.kthvalue(x, k, dim, keepdim)


@kthvalue.types
def _(x, *, k, dim, keepdim):
    shape = shape_after_reduction(x.shape, dim, keepdim=keepdim)
    return TensorType(x.dtype, shape), TensorType(torch.int64, shape)


kthvalue.onnx(_kth_smallest)


@kthvalue.samples
def _(draw, s):
    x, dim, k = _draw_count(draw, s, torch.float32, torch.int64)
    return s.call(x, k=k, dim=dim, keepdim=draw(s.booleans()))


@operator(aten.median.dim, error=EXACT)
def median(x: Tensor, *, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the lower median along ``dim`` and its index."""
    return torch.median(x, dim, keepdim)


@median.onnx
def _(op, x, *, dim, keepdim):
    return _kth_smallest(op, x, FloorDiv(_dim_size(op, x, dim) + 1, 2), dim, keepdim=keepdim)


def _dim_sampler(*dtypes, unique=False):
    """Return a sampler for a tensor and one of its dims."""

    def sample(draw, s):
        x = draw(s.tensor(rank=(0, 3), dtype=dtypes, low=0, high=255 if unique else 9, unique=unique))
        dim = draw(s.integers(-x.rank, x.rank - 1)) if x.rank else draw(s.choice(0, -1))
        return s.call(x, dim=dim, keepdim=draw(s.booleans()))

    return sample


median.samples(_dim_sampler(torch.float32, torch.int64, unique=True))


@operator(aten.median.default, quant=SHARED_QPARAMS, error=EXACT)
def flat_median(x: Tensor) -> Tensor:
    """Return the lower median of all elements."""
    return torch.median(x)


@flat_median.onnx
def _(op, x):
    count, dtype = math.prod(op.shape(x)), op.dtype(x)
    sortable = TOPK_DTYPES.get(dtype, dtype)
    of_nothing = op.constant([math.nan if dtype.is_floating_point else torch.iinfo(dtype).min], sortable)
    if not count:
        return op.cast(op.reshape(of_nothing, ()), dtype)
    elements = op.Reshape(op.cast(x, sortable), op.ints([-1]))
    smallest, _ = op.TopK(elements, op.ints([FloorDiv(count + 1, 2)]), largest=False, outputs=2)
    if op.sizes.may_be_zero(count):
        last = op.Slice(smallest, op.ints([-1]), op.ints([torch.iinfo(torch.int64).max]))
        smallest = op.Concat(of_nothing, last, axis=0)
    return op.cast(op.declare(op.Gather(smallest, op.constant(-1, torch.int64), axis=0), sortable), dtype)


flat_median.samples(unary_sampler(dtype=(torch.float32, torch.int64)))


def _arg_min_max_lowering(op_type):
    """Return the lowering of argmax or argmin, with the first of equal elements."""

    def lower(op, x, *, dim, keepdim):
        if op.rank(x) == 0:
            return op.constant(0, torch.int64)
        if dim is None:
            first = _first_index(op, op_type, op.Reshape(x, op.ints([-1])), 0, keepdim=keepdim)
            return op.Reshape(first, op.ints([1] * op.rank(x))) if keepdim and op.rank(x) > 1 else first
        return _first_index(op, op_type, x, dim % op.rank(x), keepdim=keepdim)

    return lower


def _first_index(op, op_type, x, dim, *, keepdim):
    """Return the first index of the largest or smallest element along ``dim``.

    ``dim`` must not be negative: ONNX Runtime does not reduce empty tensors along -1.
    """
    if op.dtype(x) != torch.int64:
        return op.node(op_type, to_comparable(op, x), axis=dim, keepdims=keepdim)
    # Only ONNX Runtime's TopK compares int64
    _, position = op.TopK(x, op.ints([1]), axis=dim, largest=op_type == "ArgMax", outputs=2)
    position = op.declare(position, torch.int64)
    return position if keepdim else op.Squeeze(position, op.ints([dim]))


@operator(aten.argmax.default, error=EXACT)
def argmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Return the first index of the largest element along ``dim``, or in the flattened tensor if it is None."""
    return torch.argmax(x, dim, keepdim)


@operator(aten.argmin.default, error=EXACT)
def argmin(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Return the first index of the smallest element along ``dim``, or in the flattened tensor if it is None."""
    return torch.argmin(x, dim, keepdim)


def _draw_argument(draw, s):
    plain = _dim_sampler(torch.float32, torch.int32, torch.uint8, torch.int64, torch.int16)(draw, s)
    return s.call(*plain.operands, **{**plain.attrs, "dim": draw(s.choice(plain.attrs["dim"], None))})


def _position_type(x, *, dim, keepdim):
    return TensorType(torch.int64, shape_after_reduction(x.shape, dim, keepdim=keepdim))


argmax.types(_position_type)
argmin.types(_position_type)
argmax.onnx(_arg_min_max_lowering("ArgMax"))
argmin.onnx(_arg_min_max_lowering("ArgMin"))
argmax.samples(_draw_argument)
argmin.samples(_draw_argument)


@operator(aten.max.dim, error=EXACT)
def max_(x: Tensor, *, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the largest element along ``dim`` and its index, the first of equal ones."""
    return torch.max(x, dim, keepdim)


@operator(aten.min.dim, error=EXACT)
def min_(x: Tensor, *, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the smallest element along ``dim`` and its index, the first of equal ones."""
    return torch.min(x, dim, keepdim)


def _value_and_index_lowering(op_type):
    """Return the lowering of max or min along a dim: find the index, then gather the element."""

    def lower(op, x, *, dim, keepdim):
        if op.rank(x) == 0:
            return op.Identity(x), op.constant(0, torch.int64)
        if 0 in op.result.shape:
            zeros = (op.scalar(0, dtype) for dtype in (op.dtype(x), torch.int64))
            return tuple(lower_broadcast(op, zero, (), op.result.shape) for zero in zeros)
        dim %= op.rank(x)
        position = _first_index(op, op_type, x, dim, keepdim=True)
        found = op.GatherElements(x, position, axis=dim), position
        return found if keepdim else tuple(op.Squeeze(part, op.ints([dim])) for part in found)

    return lower


max_.onnx(_value_and_index_lowering("ArgMax"))
min_.onnx(_value_and_index_lowering("ArgMin"))
max_.samples(_dim_sampler(torch.float32, torch.int64, torch.int32, torch.bool))
min_.samples(_dim_sampler(torch.float32, torch.int64, torch.uint8, torch.bool))
