"""Distances, losses and norms of tensors without elements."""

from __future__ import annotations

import math

import pytest
import torch
from clika_ref_aten import (
    attention,
    classification_loss,
    convolution,
    cumulative,
    distance,
    dropout,
    embedding,
    folding,
    gating,
    layer_normalization,
    linear,
    loss,
)
from one_operator import Case, build_case_graph, run_onnx

NUMBERS = torch.empty(2, 0), torch.empty(2, 0)
LOSSES = [
    op
    for op in vars(loss).values()
    if getattr(op, "lowering", None) and getattr(op, "name", "") != "margin_ranking_loss"
]


def assert_same(op, *operands, **attrs):
    call = op.call(*operands, **attrs)
    case = Case(op, list(call.operands), call.attrs)
    for expected, actual in zip(case.eager(), run_onnx(build_case_graph(case), case.tensors), strict=True):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert torch.equal(actual.nan_to_num(7.0), expected.nan_to_num(7.0)), actual


def test_addr_factor_0_does_not_overflow():
    """A product with the factor 0 does not overflow before."""
    large = torch.full((2,), 1e30)
    assert_same(linear.addr, torch.ones(2, 2), large, large, beta=0, alpha=0)
    assert_same(linear.addr, torch.ones(2, 2), large, large, beta=2, alpha=0.5)


def test_eager_inconsistent_empty_call_raises():
    """Empty calls where eager is inconsistent raise ValueError."""
    with pytest.raises(ValueError, match=r"a weight of the shape \[2, 0, 1\]: it has no channels"):
        convolution.conv1d(torch.empty(1, 0, 6), torch.empty(2, 0, 1))
    with pytest.raises(ValueError, match=r"scores of the shape \[3, 0\] have no classes"):
        classification_loss.cross_entropy_loss(torch.empty(3, 0), torch.empty(3, 0))
    assert linear.addmv(torch.ones(()), torch.empty(0, 1), torch.empty(1)).shape == (0,)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("op", LOSSES, ids=lambda op: op.name)
def test_loss_mean_of_empty_equals_eager(op, reduction):
    """The mean loss of empty tensors is NaN, as in eager."""
    attrs = {"log_input": True, "full": False, "eps": 1e-8} if op is loss.poisson_nll_loss else {}
    assert_same(op, *NUMBERS, reduction=reduction, **attrs)


def test_loss_mean_of_no_pairs_equals_eager():
    """The mean loss of no pairs is NaN, as in eager."""
    assert_same(loss.margin_ranking_loss, *NUMBERS, torch.empty(2, 0))
    rows, targets = torch.empty(0, 3), torch.empty(0, dtype=torch.int64)
    assert_same(distance.cosine_embedding_loss, rows, rows, targets)
    assert_same(distance.triplet_margin_loss, rows, rows, rows)


@pytest.mark.parametrize(("reduction", "expected"), [(0, []), (1, math.nan), (2, 0.0)])
def test_margin_loss_no_rows_equals_other_losses(reduction, expected):
    """Margin losses of no rows equal other losses, not uninitialized memory."""
    x, expected = torch.empty(0, 3), torch.tensor(expected)
    for op, side in (
        (classification_loss.multi_margin_loss, (0,)),
        (classification_loss.multilabel_margin_loss, (0, 3)),
    ):
        target = torch.empty(side, dtype=torch.int64)
        torch.full((), 7.0)  # memory that is free again
        assert torch.equal(op(x, target, reduction=reduction).nan_to_num(9), expected.nan_to_num(9))
        assert_same(op, x, target, reduction=reduction)
    with pytest.raises(RuntimeError, match="Expected non-empty vector or matrix"):
        classification_loss.multilabel_margin_loss(x[:, :0], target[:, :0], reduction=reduction)


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.0])
def test_distance_of_empty_vectors_equals_eager(p):
    """The distances of empty vectors equal eager's."""
    assert_same(distance.pairwise_distance, *NUMBERS, p=p)
    assert_same(distance.pairwise_distance, *NUMBERS, p=p, keepdim=True)
    assert_same(distance.pairwise_distance, torch.empty(0, 3), torch.empty(0, 3), p=p)
    assert_same(distance.cdist, torch.empty(4, 0), torch.empty(3, 0), p=math.inf)
    assert_same(distance.pdist, torch.empty(3, 0), p=math.inf)
    assert_same(distance.cdist, torch.empty(4, 0), torch.empty(3, 0), p=p)
    assert_same(distance.pdist, torch.empty(3, 0), p=p)
    assert_same(distance.pdist, torch.empty(0, 3), p=p)


def test_cosine_similarity_of_empty_vectors_equals_eager():
    """The cosine similarity of empty vectors equals eager's."""
    assert_same(distance.cosine_similarity, torch.empty(2, 0), torch.empty(2, 0), dim=1)
    assert_same(distance.cosine_similarity, torch.empty(2, 0), torch.empty(2, 0), dim=0)


def test_native_dropout_empty_mask_has_bool_dtype():
    """The mask of native_dropout of an empty tensor is bool."""
    _, mask = dropout.native_dropout(torch.empty(2, 0), p=0.5, train=False)
    assert mask.dtype == torch.bool
    assert_same(dropout.native_dropout, torch.empty(2, 0), p=0.5, train=False)


def test_embedding_bag_empty_rows_equal_eager():
    """Embeddings without elements make bags without elements."""
    indices, offsets = torch.tensor([0, 2, 1]), torch.tensor([0, 2])
    for mode in range(3):
        assert_same(embedding.embedding_bag, torch.empty(3, 0), indices, offsets, mode=mode)


def test_pixel_unshuffle_empty_pixels_equal_eager():
    """Pixels without area move into channels too."""
    x = torch.empty(1, 2, 4, 0)
    assert folding.pixel_unshuffle(x, downscale_factor=2).shape == (1, 8, 2, 0)
    assert_same(folding.pixel_unshuffle, x, downscale_factor=2)


def test_glu_of_empty_equals_eager():
    """glu of an empty tensor is empty."""
    assert_same(gating.glu, torch.empty(3, 0), dim=-1)
    assert_same(gating.glu, torch.empty(0, 4), dim=1)


@pytest.mark.parametrize("shape", [(3, 0), (0, 3)])
def test_layer_norm_of_empty_equals_eager(shape):
    """Layer norms of empty tensors equal eager's."""
    sides = shape[1:]
    assert_same(layer_normalization.layer_norm, torch.empty(shape), None, None, normalized_shape=sides)
    assert_same(layer_normalization.native_layer_norm, torch.empty(shape), None, None, normalized_shape=sides, eps=1e-5)


def test_diff_of_empty_equals_eager():
    """Differences of too few elements are empty."""
    assert_same(cumulative.diff, torch.empty(3, 0), None, None, n=1, dim=-1)
    assert_same(cumulative.diff, torch.ones(3, 1), None, None, n=2, dim=-1)


@pytest.mark.parametrize("mask", [None, torch.empty(3, 0)])
def test_attention_no_keys_returns_zero(mask):
    """Attention to no keys is zero, not uninitialized memory."""
    query, key, value = torch.ones(2, 3, 4), torch.empty(2, 0, 4), torch.empty(2, 0, 5)
    for _ in range(3):
        torch.full((2, 3, 5), 7.0)  # memory that is free again, and not zero
        assert not attention.scaled_dot_product_attention(query, key, value, mask).any()
    assert_same(attention.scaled_dot_product_attention, query, key, value, mask)


def test_attention_float16_no_keys_with_mask_returns_zero():
    """FP16 attention to no keys with a mask is zero."""
    query, key, value = (torch.empty(2, n, 5, dtype=torch.float16) for n in (4, 0, 0))
    assert_same(attention.scaled_dot_product_attention, query, key, value, torch.empty(2, 4, 0, dtype=torch.bool))
