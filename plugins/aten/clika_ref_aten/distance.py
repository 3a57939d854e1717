"""Distances and similarities of vectors, and losses based on them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clika_ref.core.accuracy import COMPOSE
from clika_ref.core.errors import TargetError
from clika_ref.core.operators import operator
from clika_ref.core.symbols import is_symbolic
from clika_ref.core.types import TensorType
from clika_ref_aten.elementwise import FLOATS, HALF_DTYPES, unary_sampler
from clika_ref_aten.float_layers import FLOAT_PRODUCT
from clika_ref_aten.indexing import broadcast_shape
from clika_ref_aten.loss import REDUCE_MEAN, draw_reduction, handle_empty_mean, is_equal_to, reduce_losses
from clika_ref_aten.size_arithmetic import floor_quotient

aten = torch.ops.aten

SAMPLE_NORM_ORDERS = (2.0, 1.0, 0.0, 3.0, math.inf)
EUCLIDEAN_ORDER = 2.0
MATRIX_PRODUCT_MODE = 1
"""ATen's ``compute_mode`` for distances by a matrix product: fast, but imprecise for close points."""


def vector_norm(op, x, p, axes, *, keepdims=False):
    """Return the norm ``sum(|x| ** p) ** (1 / p)`` along axes (None: all), with ATen's limits at 0 and inf.

    The axes must not be negative: in empty tensors, ONNX Runtime keeps negative axes.
    """
    axes, options = None if axes is None else op.ints(axes), {"keepdims": int(keepdims)}
    if p == EUCLIDEAN_ORDER:
        return op.ReduceL2(x, axes, **options)
    if p == 1:
        return op.ReduceL1(x, axes, **options)
    if p == 0:
        return op.ReduceSum(op.cast(op.Not(is_equal_to(op, x, 0)), op.dtype(x)), axes, **options)
    if math.isinf(p):
        limit = (op.ReduceMax if p > 0 else op.ReduceMin)(op.Abs(x), axes, **options)
        missing = op.ReduceMax(op.cast(op.IsNaN(x), op.dtype(x)), axes, **options)  # runtimes ignore NaN
        return op.Where(op.Greater(missing, op.like(x, 0)), op.like(x, math.nan), limit)
    total = op.ReduceSum(op.Pow(op.Abs(x), op.like(x, p)), axes, **options)
    return op.Pow(total, op.like(x, 1 / p))


def _distance_norm(op, difference, p, axis):
    """Return the `vector_norm` of differences along ``axis``, with eager's special cases in `cdist` and `pdist`."""
    if p == 0:  # NaN stays NaN here, but counts as 1 in norms
        apart = op.Min(op.Ceil(op.Abs(difference)), op.like(difference, 1))
        return op.ReduceSum(apart, op.ints([axis]), keepdims=0)
    found = vector_norm(op, difference, p, [axis])
    return op.Max(found, op.like(found, 0)) if p == math.inf else found  # ReduceMax of no elements is -inf


def difference_norm(op, x1, x2, *, axis, p, eps, keepdim=False):
    """Return ``length(x1 - x2 + eps)`` along ``axis``, the last dim."""
    difference = op.Add(op.Sub(x1, x2), op.like(x1, eps))
    return vector_norm(op, difference, p, [axis], keepdims=keepdim)


def _at_least_1d(op, x1, x2):
    """Return the operands; two 0-d tensors become vectors of one element."""
    if op.rank(x1) or op.rank(x2):
        return x1, x2
    return tuple(op.declare(op.Reshape(x, op.ints([1])), TensorType(op.dtype(x), (1,))) for x in (x1, x2))


def _last_axis(op, *operands):
    """Return the index of the last dim of the broadcast operands."""
    return max(map(op.rank, operands)) - 1


def _draw_broadcastable_pair(draw, s):
    """Draw two tensors that broadcast; the second may lack the first dim."""
    x1 = draw(s.tensor(rank=(0, 5), dtype=FLOATS[::2]))
    shorter = x1.rank > 1 and draw(s.booleans())
    return x1, draw(s.tensor(shape=x1.shape[1:] if shorter else x1.shape, dtype=x1.dtype))


@operator(aten.cosine_similarity.default, error=COMPOSE)
def cosine_similarity(x1: Tensor, x2: Tensor, *, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """``sum(x1 / max(|x1|, eps) * x2 / max(|x2|, eps))`` along ``dim`` of the broadcast shape."""
    return torch.cosine_similarity(x1, x2, dim, eps)


@cosine_similarity.onnx
def _(op, x1, x2, *, dim, eps):
    x1, x2 = _at_least_1d(op, *op.promote(x1, x2))
    shapes, axis = (op.shape(x1), op.shape(x2)), dim % (_last_axis(op, x1, x2) + 1)
    if shapes[0] != shapes[1]:  # before the norms: a size of 1 along dim counts once per repetition
        x1, x2 = op.Expand(x1, op.Shape(x2)), op.Expand(x2, op.Shape(x1))
    units = [
        op.Div(x, op.Max(vector_norm(op, x, EUCLIDEAN_ORDER, [axis], keepdims=True), op.like(x, eps))) for x in (x1, x2)
    ]
    return op.ReduceSum(op.Mul(*units), op.ints([axis]), keepdims=0)


@cosine_similarity.types
def _(x1, x2, *, dim, eps):
    shape = list(broadcast_shape(x1.shape, x2.shape))
    if shape:
        del shape[dim]
    return TensorType(torch.promote_types(x1.dtype, x2.dtype), tuple(shape))


@cosine_similarity.samples
def _(draw, s):
    x1, x2 = _draw_broadcastable_pair(draw, s)
    last = max(x1.rank, 1) - 1
    return s.call(x1, x2, dim=draw(s.integers(-last - 1, last)), eps=draw(s.choice(1e-8, 0.5)))


@operator(aten.pairwise_distance.default, error=COMPOSE)
def pairwise_distance(x1: Tensor, x2: Tensor, *, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    """``sum(|x1 - x2 + eps| ** p) ** (1 / p)`` along the last dim."""
    return torch.pairwise_distance(x1, x2, p, eps, keepdim)


@pairwise_distance.onnx
def _(op, x1, x2, *, p, eps, keepdim):
    both = _at_least_1d(op, *op.promote(x1, x2))
    found = difference_norm(op, *both, axis=_last_axis(op, *both), p=p, eps=eps, keepdim=keepdim)
    return found if op.rank(x1) or op.rank(x2) else op.Reshape(found, op.ints([]))


@pairwise_distance.samples
def _(draw, s):
    x1, x2 = _draw_broadcastable_pair(draw, s)
    return s.call(
        x1, x2, p=draw(s.choice(*SAMPLE_NORM_ORDERS)), eps=draw(s.choice(1e-6, 0.1)), keepdim=draw(s.booleans())
    )


@operator(aten.dist.default, error=COMPOSE)
def dist(x: Tensor, other: Tensor, *, p: float = 2) -> Tensor:
    """``sum(|x - other| ** p) ** (1 / p)`` over all elements."""
    return torch.dist(x, other, p)


@dist.onnx
def _(op, x, other, *, p):
    return vector_norm(op, op.Sub(*op.promote(x, other)), p, None)


@dist.samples
def _(draw, s):
    return s.call(*_draw_broadcastable_pair(draw, s), p=draw(s.choice(*SAMPLE_NORM_ORDERS)))


@operator(aten.cdist.default, error=COMPOSE, quant=FLOAT_PRODUCT)
def cdist(x1: Tensor, x2: Tensor, *, p: float = 2.0, compute_mode: int | None = None) -> Tensor:
    """``sum over m of (|x1[..., i, m] - x2[..., j, m]| ** p) ** (1 / p)`` in ``[..., i, j]``.

    ``compute_mode`` selects when eager uses a matrix product for ``p = 2``: None above 25 rows, 1 always, 2 never.
    """
    return aten.cdist.default(x1, x2, p, compute_mode)


cdist.from_torch(aten._cdist_forward.default)(lambda *operands: cdist.call(*operands[:2], p=operands[2]))  # noqa: SLF001


@cdist.onnx
def _(op, x1, x2, *, p, compute_mode):
    sizes = op.shape(x1)[-2], op.shape(x2)[-2]
    large = not is_symbolic(sizes) and max(sizes) > 25  # Source: ATen's Distance.cpp, `cdist_impl`
    by_product = compute_mode == MATRIX_PRODUCT_MODE or (compute_mode is None and large)
    # ONNX Runtime 1.31 returns uninitialized memory where it fuses a Transpose into an empty product
    if p == EUCLIDEAN_ORDER and by_product and not op.sizes.may_be_zero(op.shape(x1)[-1]):
        return _distance_by_matmul(op, x1, x2)
    difference = op.Sub(op.Unsqueeze(x1, op.ints([-2])), op.Unsqueeze(x2, op.ints([-3])))
    if p == math.inf:  # here, but not in pdist, eager ignores NaN
        difference = op.Where(op.IsNaN(difference), op.like(x1, 0), difference)
    return _distance_norm(op, difference, p, len(op.result.shape))


def _distance_by_matmul(op, x1, x2):
    """Return ``sqrt(|a|^2 - 2 a b + |b|^2)`` for all pairs of rows."""
    squares = [op.ReduceSumSquare(x, op.ints([op.rank(x) - 1]), keepdims=1) for x in (x1, x2)]
    rank = op.rank(x2)
    swap = [*range(rank - 2), rank - 1, rank - 2]
    product = op.MatMul(op.Mul(x1, op.like(x1, -2)), op.Transpose(x2, perm=swap))
    total = op.Add(op.Add(product, squares[0]), op.Transpose(squares[1], perm=swap))
    return op.Sqrt(op.Max(total, op.like(x1, 0)))


@cdist.types
def _(x1, x2, *, p, compute_mode):
    batch = broadcast_shape(x1.shape[:-2], x2.shape[:-2])
    return TensorType(x1.dtype, (*batch, x1.shape[-2], x2.shape[-2]))


@cdist.samples
def _(draw, s):
    dtype, m = draw(s.choice(torch.float32, torch.float64)), draw(s.integers(1, 4))
    batch = draw(s.choice((), (2,), (2, 3)))
    x1 = draw(s.tensor(shape=(*batch, draw(s.choice(1, 3, 30)), m), dtype=dtype))
    x2 = draw(s.tensor(shape=(*batch[1:], draw(s.integers(1, 5)), m), dtype=dtype))
    return s.call(x1, x2, p=draw(s.choice(*SAMPLE_NORM_ORDERS)), compute_mode=draw(s.choice(None, 1, 2)))


@operator(aten.pdist.default, error=COMPOSE)
def pdist(x: Tensor, *, p: float = 2.0) -> Tensor:
    """``sum over m of (|x[i, m] - x[j, m]| ** p) ** (1 / p)`` for all ``i < j`` of ``x[n, m]``, row by row."""
    return torch.pdist(x, p)


@pdist.onnx
def _(op, x, *, p):
    rows = op.shape(x)[0]
    if is_symbolic(rows):
        raise TargetError(
            f"pdist with a dynamic number of rows ({rows}) has no ONNX equivalent. Use torch.cdist(x, x)."
        )
    first, second = torch.triu_indices(rows, rows, 1)
    pairs = [op.Gather(x, op.constant(index, torch.int64), axis=0) for index in (first, second)]
    return _distance_norm(op, op.Sub(*pairs), p, 1)


@pdist.types
def _(x, *, p):
    rows = x.shape[0]
    return TensorType(x.dtype, (floor_quotient(rows * (rows - 1), 2),))


pdist.samples(unary_sampler(rank=2, size=(2, 5), dtype=FLOATS[::2], attrs={"p": SAMPLE_NORM_ORDERS}))


@operator(aten.triplet_margin_loss.default, error=COMPOSE)
def triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    *,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: int = REDUCE_MEAN,
) -> Tensor:
    """``max(margin + d(anchor, positive) - d(anchor, negative), 0)``, then mean or sum; ``d`` is `pairwise_distance`.

    ``swap`` uses ``d(positive, negative)`` where it is smaller.
    """
    return aten.triplet_margin_loss.default(anchor, positive, negative, margin, p, eps, swap, reduction)


@triplet_margin_loss.onnx
@handle_empty_mean
def _(op, anchor, positive, negative, *, margin, p, eps, swap, reduction):
    axis = _last_axis(op, anchor, positive, negative)
    anchor, positive, negative = op.promote(anchor, positive, negative)
    near = difference_norm(op, anchor, positive, axis=axis, p=p, eps=eps)
    far = difference_norm(op, anchor, negative, axis=axis, p=p, eps=eps)
    if swap:
        far = op.Min(far, difference_norm(op, positive, negative, axis=axis, p=p, eps=eps))
    return reduce_losses(op, op.Relu(op.Sub(op.Add(near, op.like(near, margin)), far)), reduction)


@triplet_margin_loss.samples
def _(draw, s):
    anchor, positive = (draw(s.tensor(shape=(3, 4), dtype=torch.float32)) for _ in range(2))
    return s.call(
        anchor,
        positive,
        draw(s.tensor(shape=(3, 4))),
        margin=draw(s.choice(1.0, 0.3)),
        p=draw(s.choice(*SAMPLE_NORM_ORDERS)),
        eps=draw(s.choice(1e-6, 0.1)),
        swap=draw(s.booleans()),
        reduction=draw_reduction(draw, s),
    )


@operator(aten.cosine_embedding_loss.default, error=COMPOSE)
def cosine_embedding_loss(
    x1: Tensor, x2: Tensor, target: Tensor, *, margin: float = 0.0, reduction: int = REDUCE_MEAN
) -> Tensor:
    """``1 - cos(x1, x2)`` where ``target`` is 1, ``max(cos(x1, x2) - margin, 0)`` where -1, then the mean or sum."""
    return aten.cosine_embedding_loss.default(x1, x2, target, margin, reduction)


@cosine_embedding_loss.onnx
@handle_empty_mean
def _(op, x1, x2, target, *, margin, reduction):
    axes, dtype = op.ints([op.rank(target)]), op.result.dtype
    x1, x2 = op.promote(x1, x2, to=torch.float32 if dtype in HALF_DTYPES else dtype)  # the epsilon underflows in half
    product = op.ReduceSum(op.Mul(x1, x2), axes, keepdims=0)
    tiny = op.like(x1, 1e-12)  # Source: ATen's Loss.cpp, `EPSILON`
    squares = [op.Add(op.ReduceSumSquare(x, axes, keepdims=0), tiny) for x in (x1, x2)]
    cosine = op.Div(product, op.Sqrt(op.Mul(*squares)))
    zero = op.like(x1, 0)
    similar_loss = op.Where(is_equal_to(op, target, 1), op.Sub(op.like(x1, 1), cosine), zero)
    apart = op.Relu(op.Sub(cosine, op.like(x1, margin)))
    loss = op.Add(similar_loss, op.Where(is_equal_to(op, target, -1), apart, zero))
    return op.cast(reduce_losses(op, loss, reduction), dtype)


@cosine_embedding_loss.samples
def _(draw, s):
    shape = draw(s.choice((3, 4), (4,)))
    dtype = draw(s.choice(torch.float32, torch.float64))
    return s.call(
        draw(s.tensor(shape=shape, dtype=dtype)),
        draw(s.tensor(shape=shape, dtype=dtype)),
        draw(s.tensor(shape=shape[:-1], dtype=torch.int64, low=-1, high=1)),
        margin=draw(s.choice(0.0, 0.3)),
        reduction=draw_reduction(draw, s),
    )
