"""Scaled dot-product attention."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from clika_ref.core.accuracy import COMPOSE
from clika_ref.core.errors import ModelError
from clika_ref.core.operators import operator
from clika_ref.core.symbols import is_symbolic
from clika_ref.core.types import TensorType
from clika_ref_aten.float_layers import FLOAT_PRODUCT
from clika_ref_aten.linear import multiply_unfused
from clika_ref_aten.reduction import is_nonempty
from clika_ref_aten.size_arithmetic import make_index_range
from clika_ref_aten.spatial import floor_divide

aten = torch.ops.aten

MASKED_SCORE = float("-inf")


@operator(error=COMPOSE, quant=FLOAT_PRODUCT)
def scaled_dot_product_attention(
    x: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``softmax(scale * x[..., l, e] @ key[..., s, e].T + mask[..., l, s]) @ value[..., s, v]``.

    ``scale`` defaults to ``1 / sqrt(e)``. A boolean mask keeps the keys where it is True; ``is_causal`` keeps those
    with ``s <= l``. A fully masked row gives zeros. ``enable_gqa`` lets heads (dim -3) of ``x`` share one of ``key``.
    """
    if not key.shape[-2]:  # eager's fused kernel returns uninitialized memory here
        return x.new_zeros((*x.shape[:-1], value.shape[-1]))
    return F.scaled_dot_product_attention(
        x, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


@scaled_dot_product_attention.from_torch(aten.scaled_dot_product_attention.default)
def _(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    *,
    scale=None,
    enable_gqa=False,
):
    if dropout_p:
        raise ModelError(
            f"scaled_dot_product_attention(dropout_p={dropout_p}): dropout inside attention is not supported, since "
            "it cannot be deployed. Call model.eval(), or pass dropout_p=0.0 unless self.training."
        )
    return scaled_dot_product_attention.call(
        query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


@scaled_dot_product_attention.types
def _(x, key, value, attn_mask=None, *, enable_gqa, **_):
    batch = x.shape[:-2]
    for other in () if enable_gqa else (key, value):
        batch = _broadcast(batch, other.shape[:-2])
    return TensorType(x.dtype, (*batch, x.shape[-2], value.shape[-1]))


def _broadcast(a, b):
    rank = max(len(a), len(b))
    pairs = zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True)
    return tuple(n if m == 1 else m for n, m in pairs)


@scaled_dot_product_attention.onnx
def _(op, x, key, value, attn_mask=None, *, is_causal, scale, enable_gqa):
    batch, keys, width = op.shape(key)[:-2], op.shape(key)[-2], op.shape(key)[-1]
    axes = list(range(op.rank(key)))
    columns = op.Transpose(key, perm=[*axes[:-2], axes[-1], axes[-2]])
    op.declare(columns, TensorType(op.dtype(key), (*batch, width, keys)))
    scaled = _scale_query(op, x, scale)
    op.declare(scaled, TensorType(op.dtype(x), op.shape(x)))
    scores = _matmul_shared_heads(op, scaled, columns, enable_gqa)
    if op.sizes.may_be_zero(width):  # ONNX Runtime 1.31 leaves a fused empty product uninitialized
        scores = op.Where(is_nonempty(op, width), scores, op.like(x, 0.0))
    alive = None
    if is_causal:
        scores = op.Add(scores, _mask_to_bias(op, _causal_mask(op, op.shape(x)[-2], keys), x))
    if attn_mask is not None and keys != 0:  # without keys there is nothing to mask and ReduceMax fails
        boolean = op.dtype(attn_mask) == torch.bool
        bias = _mask_to_bias(op, attn_mask, x) if boolean else op.cast(attn_mask, op.dtype(x))
        scores = op.Add(scores, bias)
        last = op.ints([op.rank(attn_mask) - 1])
        alive = _find_unmasked_rows(op, bias, last, is_boolean=boolean)
    weights = op.Softmax(scores, axis=-1)
    op.declare(weights, TensorType(op.dtype(x), (*op.shape(x)[:-1], keys)))
    result = _matmul_shared_heads(op, weights, value, enable_gqa)
    return result if alive is None else op.Where(alive, result, op.like(x, 0.0))


def _find_unmasked_rows(op, bias, last, *, is_boolean):
    """Return whether each row of a mask has an element that is not masked.

    OpenVINO 2026.4 returns the lowest finite number as the maximum of rows that are -inf throughout.
    """
    if is_boolean:  # elements are 0 or -inf
        return op.Equal(op.ReduceMax(bias, last, keepdims=1), op.like(bias, 0.0))
    seen = op.cast(op.Not(op.Equal(bias, op.like(bias, MASKED_SCORE))), op.dtype(bias))
    return op.Greater(op.ReduceMax(seen, last, keepdims=1), op.like(bias, 0.0))


def _scale_query(op, x, scale):
    width = op.shape(x)[-1]
    if scale is None and is_symbolic(width):
        return op.Mul(x, op.Reciprocal(op.Sqrt(op.scalar(width, op.dtype(x)))))
    return multiply_unfused(op, x, 1 / math.sqrt(width or 1) if scale is None else scale)


def _mask_to_bias(op, mask, x):
    """Return a boolean mask as a bias to add to the scores: runtimes fuse an addition into attention."""
    return op.Where(mask, op.like(x, 0.0), op.like(x, MASKED_SCORE))


def _causal_mask(op, rows, columns):
    """Return ``bool[rows, columns]``, True where ``column <= row``."""
    return op.GreaterOrEqual(op.Unsqueeze(make_index_range(op, rows), op.ints([1])), make_index_range(op, columns))


def _matmul_shared_heads(op, a, b, enabled):
    """Return ``a @ b``; heads of ``a`` that share one of ``b`` are stacked along rows, instead of repeating ``b``."""
    heads, shared = (op.shape(a)[-3], op.shape(b)[-3]) if enabled else (1, 1)
    if heads == shared:
        return op.MatMul(a, b)
    *batch, _, rows, inner = op.shape(a)
    stacked = op.reshape(a, (*batch, shared, floor_divide(heads, shared) * rows, inner))
    return op.reshape(op.MatMul(stacked, b), (*batch, heads, rows, op.shape(b)[-1]))


@scaled_dot_product_attention.samples
def _(draw, s):
    batch = tuple(draw(s.integers(1, 3)) for _ in range(draw(s.choice(0, 1, 1, 2))))
    shared, grouped = draw(s.integers(1, 3)), draw(s.choice(False, False, True))
    heads = shared * draw(s.integers(1, 3)) if grouped else shared
    kind = draw(s.choice("bool", "none", "float", "causal"))
    length, keys, width, out = (draw(s.integers(1, 6)) for _ in range(4))
    if kind == "bool":
        keys = draw(s.choice(1, 2, 3))  # few, so that some row is fully masked
    x = draw(s.tensor(shape=(*batch, heads, length, width)))
    others = (1,) * len(batch) if draw(s.choice(False, False, True)) else batch  # shared by the whole batch
    key = draw(s.tensor(shape=(*others, shared, keys, width)))
    value = draw(s.tensor(shape=(*others, shared, keys, out)))
    mask = None
    if kind in ("bool", "float"):
        shape = (*(draw(s.choice(n, 1)) for n in (*batch, heads)), length, keys)[draw(s.integers(0, len(batch) + 1)) :]
        mask = draw(s.tensor(shape=shape, dtype=torch.bool if kind == "bool" else torch.float32))
    scale = draw(s.choice(None, 1.0, 0.3))
    return s.call(x, key, value, mask, is_causal=kind == "causal", scale=scale, enable_gqa=grouped)
