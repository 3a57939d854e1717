"""Jitter knows what calls consist of: a fused one is bounded by its parts."""

import pytest
import torch
from clika_ref_conformance.drawing.realizing import graph_of
from clika_ref_conformance.judging.judge import Reference
from clika_ref_conformance.verdicts import Verdict

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph
from clika_ref.core.registry import load_registry
from clika_ref.core.types import TensorType

OPERATORS = load_registry().operators


def attention(queries, keys, values, **attrs):
    """Return the reference of attention, which eager computes as one fused call."""
    graph = Graph("attention")
    named = {"q": queries, "k": keys, "v": values}
    operands = [graph.add_input(TensorType(t.dtype, tuple(t.shape)), name) for name, t in named.items()]
    graph.add_output(Builder(graph, OPERATORS)("scaled_dot_product_attention", *operands, **attrs))
    return Reference(graph, [queries, keys, values])


@pytest.mark.parametrize("causal", [False, True])
def test_attention_in_parts_is_as_right_as_fused_attention(causal):
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        queries, keys, values = (torch.randn(1, 3, 6, 4, generator=generator) for _ in range(3))
        scores = queries @ keys.transpose(-1, -2) / 2
        if causal:
            scores = scores.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf)
        result = torch.softmax(scores, -1) @ values
        reference = attention(queries, keys, values, is_causal=causal)
        assert reference.judge([result]).verdict is Verdict.PASS
        assert reference.judge([result + 2e-5]).verdict is Verdict.VALUE
        assert float(reference.expected[0].bound.max()) < 2e-5


def test_weights_that_are_integers_are_bounded_as_the_floats_that_they_are_summed_to():
    x, weights = torch.tensor([1, 1, 2]), torch.tensor([1, 2, 3])
    graph = graph_of(OPERATORS["bincount"], [x, weights], {"minlength": 0})
    reference = Reference(graph, [x, weights])
    assert reference.judge([torch.tensor([0.0, 3.0, 3.0], dtype=torch.float64)]).verdict is Verdict.PASS
    assert reference.judge([torch.tensor([0.0, 3.0, 3.1], dtype=torch.float64)]).verdict is Verdict.VALUE


def test_where_the_order_of_computation_decides_what_is_special_either_is_right_in_a_graph_too():
    x, weight = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([1, -torch.inf, 2])
    graph = Graph("normalized")
    values = [graph.add_input(TensorType(t.dtype, tuple(t.shape)), n) for n, t in (("x", x), ("weight", weight))]
    build = Builder(graph, OPERATORS)
    graph.add_output(build("batch_norm", build("exp", values[0]), values[1], training=True))
    reference = Reference(graph, [x, weight])
    scaled = torch.batch_norm(x.exp(), None, None, None, None, True, 0.1, 1e-5, False) * weight[:, None]
    assert scaled.isinf().sum() == 8
    assert reference.eager[0].isnan().any()
    for right in (scaled, reference.eager[0]):
        assert not reference.judge([right]).verdict.is_failure
    for wrong in (-scaled, scaled.index_fill(1, torch.tensor([0]), torch.nan)):
        assert reference.judge([wrong]).verdict.is_failure


def test_a_mean_of_an_infinity_is_nan_or_infinite_by_the_order_of_its_sum_in_a_graph_too():
    x = torch.tensor([torch.inf, 0, 2, 2])  # adding up differences from the mean so far, eager gets NaN
    graph = Graph("mean")
    build = Builder(graph, OPERATORS)
    value = build("relu", graph.add_input(TensorType(x.dtype, (4,)), "x"))
    graph.add_output(build("var_mean", value)[1])
    graph.add_output(build("sum", value))
    reference = Reference(graph, [x])
    assert reference.eager[0].isnan()
    for right in (torch.nan, torch.inf):
        assert reference.judge([torch.tensor(right), torch.tensor(torch.inf)]).verdict is Verdict.PASS
    assert reference.judge([torch.tensor(torch.inf), torch.tensor(torch.nan)]).verdict is Verdict.SPECIAL


def test_an_infinity_whose_sign_rounding_decides_may_have_either():
    x = torch.tensor([0.0, 1.0])
    graph = Graph("pole")
    build = Builder(graph, OPERATORS)
    value = graph.add_input(TensorType(x.dtype, (2,)), "x")
    graph.add_output(build("reciprocal", build("sin", value)))
    reference = Reference(graph, [x])
    one = 1 / x[1].sin()
    for first in (torch.inf, -torch.inf):
        assert reference.judge([torch.stack([torch.tensor(first), one])]).verdict is Verdict.PASS
    for wrong in ([torch.nan, one], [torch.inf, -one], [torch.inf, torch.inf]):
        assert reference.judge([torch.tensor(wrong)]).verdict.is_failure
