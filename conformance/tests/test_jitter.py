"""Jitter of fused calls is bounded by their parts."""

import pytest
import torch
from clika_ref_conformance.drawing.calls.call_graphs import build_call_graph
from clika_ref_conformance.judging.judge import CaseReference
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
    return CaseReference(graph, [queries, keys, values])


@pytest.mark.parametrize("causal", [False, True])
def test_jitter_attention_in_parts_passes_as_fused(causal):
    """Attention in parts is as right as fused attention."""
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


def test_jitter_integer_weights_bounded_as_floats():
    """Integer weights are bounded as the floats that they are summed to."""
    x, weights = torch.tensor([1, 1, 2]), torch.tensor([1, 2, 3])
    graph = build_call_graph(OPERATORS["bincount"], [x, weights], {"minlength": 0})
    reference = CaseReference(graph, [x, weights])
    assert reference.judge([torch.tensor([0.0, 3.0, 3.0], dtype=torch.float64)]).verdict is Verdict.PASS
    assert reference.judge([torch.tensor([0.0, 3.0, 3.1], dtype=torch.float64)]).verdict is Verdict.VALUE


def test_jitter_order_dependent_special_accepts_either():
    """If the order of computation decides the special result, either is right."""
    x, weight = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([1, -torch.inf, 2])
    graph = Graph("normalized")
    values = [graph.add_input(TensorType(t.dtype, tuple(t.shape)), n) for n, t in (("x", x), ("weight", weight))]
    build = Builder(graph, OPERATORS)
    graph.add_output(build("batch_norm", build("exp", values[0]), values[1], training=True))
    reference = CaseReference(graph, [x, weight])
    scaled = torch.batch_norm(x.exp(), None, None, None, None, True, 0.1, 1e-5, False) * weight[:, None]
    assert scaled.isinf().sum() == 8
    assert reference.eager[0].isnan().any()
    for right in (scaled, reference.eager[0]):
        assert not reference.judge([right]).verdict.is_failure
    for wrong in (-scaled, scaled.index_fill(1, torch.tensor([0]), torch.nan)):
        assert reference.judge([wrong]).verdict.is_failure


def test_jitter_infinity_of_uncertain_sign_accepts_either():
    """An infinity whose sign rounding decides may have either sign."""
    x = torch.arange(32.0)
    graph = Graph("pole")
    build = Builder(graph, OPERATORS)
    graph.add_output(build("reciprocal", build("sin", graph.add_input(TensorType(x.dtype, (32,)), "x"))))
    reference = CaseReference(graph, [x])
    rest = reference.eager[0][1:]

    def verdict(first, *others):
        return reference.judge([torch.cat([torch.tensor([first, *others]), rest[len(others) :]])]).verdict

    assert {verdict(torch.inf), verdict(-torch.inf)} == {Verdict.PASS}
    assert verdict(torch.nan) is Verdict.SPECIAL
    assert verdict(torch.inf, -torch.inf) is Verdict.SPECIAL


def test_jitter_empty_output_not_decomposed():
    """A call without output elements is not decomposed."""
    graph = Graph("norm")  # the parts of a norm reject two dims, one of them negative
    x = graph.add_input(TensorType(torch.float32, (4, 2, 0)), "x")
    graph.add_output(Builder(graph, OPERATORS)("linalg_vector_norm", x, ord=-torch.inf, dim=(-3, 1), keepdim=False))
    reference = CaseReference(graph, [torch.zeros(4, 2, 0)])
    assert reference.judge([torch.zeros(0)]).verdict is Verdict.PASS


def test_jitter_bound_centered_on_call_not_decomposition():
    """Bounds are centered on the result of the call if its decomposition differs."""
    x = torch.tensor([[-2.4423, -1.5865, -0.0384, -0.4994, -2.5911, -1.1080]])
    target = torch.tensor([[2, 5, 1, 5, 4, -1]])
    graph = build_call_graph(OPERATORS["multilabel_margin_loss"], [x, target], {"reduction": 1})
    reference = CaseReference(graph, [x, target])
    assert reference.judge([reference.eager[0] + 1e-6]).verdict is Verdict.PASS
    gaps = (1 - x[0, 0] + x[0, [0, 3]]).clamp(
        min=0
    ).sum() / 6  # PyTorch's decomposition: of the class after the last one
    assert reference.judge([reference.eager[0] + gaps]).verdict is Verdict.VALUE
    assert float(reference.expected[0].bound) < 2e-5


@pytest.mark.parametrize("name", ["var_mean", "std_mean"])
@pytest.mark.parametrize("infinity", [torch.inf, -torch.inf])
def test_jitter_mean_next_to_infinity_may_be_infinite(name, infinity):
    """A mean next to an infinity may be that infinity inside a graph too."""
    x = torch.randn(40, generator=torch.Generator().manual_seed(0))
    x[0] = infinity
    whole = x.repeat(41, 1)
    whole[1:, 0] = 1.0  # a single row is ambiguous: less than a twentieth
    graph = Graph("rounded")
    build = Builder(graph, OPERATORS)
    spread, mean = build(name, graph.add_input(TensorType(x.dtype, tuple(whole.shape)), "x"), dim=(1,))
    for value in (spread, build("ceil", mean)):
        graph.add_output(value)
    reference = CaseReference(graph, [whole])
    spreads, means = reference.eager
    assert means[0].isnan()

    def verdict(first):
        return reference.judge([spreads, torch.cat([torch.tensor([first]), means[1:]])]).verdict

    assert {verdict(torch.nan), verdict(infinity)} == {Verdict.PASS}
    assert verdict(-infinity) is Verdict.SPECIAL
