"""The judge: failures that it must report, correct results that it must accept, and its messages."""

from __future__ import annotations

import math
import re

import pytest
import torch
from case_references import Drawing, make_call_reference, randn
from clika_ref_conformance.judging import exact_arithmetic, jitter, jitter_runs, judge
from clika_ref_conformance.judging.judge import CaseReference
from clika_ref_conformance.verdicts import Verdict

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph
from clika_ref.core.registry import load_registry
from clika_ref.core.types import TensorType

# Step 0


@pytest.mark.parametrize(
    ("actual", "message"),
    [
        ([], "0 outputs instead of 1"),
        ([torch.ones(2), torch.ones(2)], "2 outputs instead of 1"),
        ([torch.ones(2).double()], r"output 0 is float64\[2\] instead of float32\[2\]"),
        ([torch.ones(2, 1)], r"output 0 is float32\[2, 1\] instead of float32\[2\]"),
        ([[1.0, 1.0]], "output 0 is a list, not a tensor"),
    ],
)
def test_judge_structure_checked_before_elements(actual, message: str) -> None:
    """The structure is compared before the elements."""
    found = make_call_reference("relu", torch.ones(2)).judge(actual)
    assert found.verdict is Verdict.STRUCTURE
    assert re.fullmatch(message, found.message)


def test_judge_trusted_eager_skips_exact_arithmetic(monkeypatch) -> None:
    """With trusted eager, eager's own bits pass without exact arithmetic."""
    drawing = Drawing(x := randn(5))
    drawing.graph.add_output(drawing.build("exp", drawing.values[0]))
    reference = CaseReference(drawing.graph, [x], trusts_eager=True)
    assert reference.judge([x.exp() + 1]).verdict is Verdict.VALUE
    monkeypatch.setattr(CaseReference, "_expect", None)
    found = reference.judge([x.exp()])
    assert (found.verdict, found.quality, found.elements) == (Verdict.PASS, 1.0, 5)
    with pytest.raises(TypeError):
        CaseReference(drawing.graph, [x]).judge([x.exp()])  # who does not, looks at eager as at any target


def test_judge_trusted_eager_stops_jitter_at_pass(monkeypatch) -> None:
    """With trusted eager, jitter runs stop as soon as the result is right."""
    drawn = []

    def record_runs(*args):
        for run in jitter_runs.repeat_run(*args):
            drawn.append(run)
            yield run

    drawing = Drawing(x := randn(50))
    drawing.graph.add_output(drawing.build("exp", drawing.build("sin", drawing.values[0])))
    monkeypatch.setattr(judge, "repeat_run", record_runs)
    trusting = CaseReference(drawing.graph, [x], trusts_eager=True)
    near = x.sin().exp().nextafter(torch.tensor(9.0))
    assert trusting.judge([near]).verdict is Verdict.PASS
    assert len(drawn) == judge.MIN_JITTER_RUNS
    assert trusting.judge([near + 1e-4]).verdict is Verdict.VALUE
    assert len(drawn) == 2 * judge.MIN_JITTER_RUNS + jitter.JITTER_RUNS
    assert CaseReference(drawing.graph, [x]).judge([near]).verdict is Verdict.PASS
    assert len(drawn) == 2 * (
        judge.MIN_JITTER_RUNS + jitter.JITTER_RUNS
    )  # one reference may have to judge many targets


def test_judge_trusted_eager_ambiguous_element_not_run(monkeypatch) -> None:
    """A few jitter runs decide nothing if rounding decides an element."""
    drawing = Drawing(x := torch.full((40,), 2.0))
    drawing.graph.add_output(drawing.build("floor", drawing.build("exp", drawing.build("log", drawing.values[0]))))
    expected = CaseReference(drawing.graph, [x], trusts_eager=True).judge([torch.full((40,), 1.0)])
    assert expected.verdict is Verdict.NOT_RUN
    monkeypatch.setattr(judge, "MIN_JITTER_RUNS", jitter.JITTER_RUNS)
    assert CaseReference(drawing.graph, [x], trusts_eager=True).judge([torch.full((40,), 1.0)]) == expected


def test_judge_trusted_eager_computes_needed_outputs_exactly() -> None:
    """With trusted eager, only the nodes that differing outputs need are computed exactly."""
    drawing = Drawing(x := randn(5))
    exp = drawing.build("exp", drawing.values[0])
    for output in (drawing.build("sin", exp), drawing.build("cos", exp), exp):
        drawing.graph.add_output(output)
    nodes = list(drawing.graph.nodes)
    assert exact_arithmetic.find_dependencies(drawing.graph, drawing.graph.outputs[1:2]) == {nodes[0], nodes[2]}
    reference = CaseReference(drawing.graph, [x], trusts_eager=True)
    right = [x.exp().sin(), x.exp().cos(), x.exp()]
    near = [right[0].nextafter(torch.tensor(2.0)), *right[1:]]
    found = reference.judge(near)
    assert (found.verdict, found.elements, found.quality) == (Verdict.PASS, 15, max(1.0, found.quality))
    assert found.error > 0
    assert reference.judge([right[0], right[1] + 1, right[2]]).message.startswith("output 1[")


# Step 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["exp", "gelu", "sigmoid", "softmax", "layer_norm", "linear", "var", "cumsum", "mean"])
def test_judge_eager_passes_each_dtype(name: str, dtype: torch.dtype) -> None:
    """Eager passes its own judge in each dtype."""
    x = randn(6, 16, dtype=dtype)
    extra = {
        "softmax": {"dim": -1},
        "layer_norm": {"normalized_shape": (16,), "eps": 1e-5},
        "cumsum": {"dim": 1},
        "mean": {"dim": (1,)},
    }
    operands = (x, randn(8, 16, seed=1, dtype=dtype)) if name == "linear" else (x,)
    reference = make_call_reference(name, *operands, **extra.get(name, {}))
    found = reference.judge(reference.eager)
    assert (found.verdict, found.unstable) == (Verdict.PASS, 0), found


def test_judge_eager_overflow_accepts_eager_or_exact() -> None:
    """If eager overflows, only its result or the exact one is right."""
    reference = make_call_reference(
        "soft_margin_loss", torch.tensor([-200.0, 1.0]), torch.tensor([1.0, 1.0]), reduction=0
    )
    finite = float(torch.log1p(torch.exp(torch.tensor(-1.0, dtype=torch.float64))))
    assert reference.eager[0][0].item() == math.inf
    for first, verdict in ((math.inf, Verdict.PASS), (200.0, Verdict.PASS), (190.0, Verdict.SPECIAL)):
        found = reference.judge([torch.tensor([first, finite])])
        assert (found.verdict, found.unstable) == (verdict, 1), found


def test_judge_eager_receives_contiguous_operands(monkeypatch) -> None:
    """Eager gets contiguous operands, because kernels differ by layout."""
    drawing = Drawing(torch.full((3, 4), math.inf))
    moved = drawing.build("permute", drawing.values[0], dims=(1, 0))
    drawing.graph.add_output(drawing.build("gelu", moved))
    gelu = drawing.graph.outputs[0].producer.op
    whole = gelu.reference
    monkeypatch.setattr(gelu, "reference", lambda x, **kw: whole(x, **kw) if x.is_contiguous() else x * math.nan)
    found = drawing.reference().judge([torch.full((4, 3), math.inf)])
    assert found.verdict in (Verdict.PASS, Verdict.UNSTABLE), found  # the latter with vectors of 512 bits


def test_judge_eager_wrong_everywhere_reports_unstable() -> None:
    """A case where eager is wrong everywhere judges no target."""
    reference = make_call_reference("soft_margin_loss", torch.tensor([-200.0]), torch.tensor([1.0]), reduction=0)
    assert reference.judge([torch.tensor([7.0])]).verdict is Verdict.UNSTABLE


# Step 2


def test_judge_copy_may_differ_in_sign_of_zero_only() -> None:
    """Copies may differ only in the sign of zero."""
    reference = make_call_reference("relu", torch.tensor([-0.0, 1.0]))
    assert reference.judge([torch.tensor([-0.0, 1.0])]).verdict is Verdict.PASS
    found = reference.judge([torch.tensor([0.0, 1.0 + 2**-23])])
    assert found.verdict is Verdict.VALUE
    assert (
        found.message
        == "output 0[1] is 1.0000001192092896 instead of 1.0; 1 of 2 elements are wrong; the inputs are 1.0 there"
    )


def test_judge_integer_must_be_equal() -> None:
    """An integer is right or wrong."""
    reference = make_call_reference("add", torch.tensor([2**40]), torch.tensor([1]), alpha=1)
    assert reference.judge([torch.tensor([2**40 + 1])]).verdict is Verdict.PASS
    assert reference.judge([torch.tensor([2**40])]).verdict is Verdict.VALUE


def test_judge_graph_kthvalue_chooses_among_ties_only() -> None:
    """A graph may choose among ties of integers and nothing else."""
    graph = Graph("ties")
    x = graph.add_input(TensorType(torch.int64, (3,)), "x")
    build = Builder(graph, load_registry().operators)
    build("neg", x)
    graph.add_output(build("kthvalue", x, k=1, dim=0, keepdim=False)[1])
    reference = CaseReference(graph, [torch.tensor([0, 5, 0])])
    found = [reference.judge([torch.tensor(index)]).verdict.is_failure for index in range(3)]
    assert found == [False, True, False]


def test_judge_topk_ties_chosen_once() -> None:
    """topk may choose among ties, but no index twice."""
    reference = make_call_reference("topk", torch.tensor([1.0, 3.0, 3.0, 3.0]), k=2, dim=-1, largest=True, sorted=True)
    values = torch.tensor([3.0, 3.0])
    assert reference.judge([values, torch.tensor([3, 1])]).verdict is Verdict.PASS
    for wrong in ([1, 1], [0, 1], [1, 4]):
        assert reference.judge([values, torch.tensor(wrong)]).verdict is Verdict.VALUE, wrong


def test_judge_argmax_must_choose_first() -> None:
    """argmax must choose the first maximum."""
    reference = make_call_reference("argmax", torch.tensor([1.0, 3.0, 3.0]), dim=0, keepdim=False)
    assert reference.judge([torch.tensor(2)]).verdict is Verdict.VALUE


def test_judge_stable_sort_has_one_order() -> None:
    """A stable sort has only one correct order."""
    for stable, verdict in ((False, Verdict.PASS), (True, Verdict.VALUE)):
        reference = make_call_reference(
            "argsort", torch.tensor([2.0, 2.0, 1.0]), dim=0, descending=False, stable=stable
        )
        swapped = torch.tensor([2, 1, 0])
        assert reference.judge([swapped]).verdict is verdict


# Step 3


@pytest.mark.parametrize(
    ("x", "wrong"), [(math.nan, 0.0), (math.nan, math.inf), (math.inf, 3.4e38), (math.inf, -math.inf), (1.0, math.nan)]
)
def test_judge_special_elements_must_match(x: float, wrong: float) -> None:
    """NaN and infinities must match."""
    reference = make_call_reference("sqrt", torch.tensor([x, 1.0]))
    assert reference.judge(reference.eager).verdict is Verdict.PASS
    found = reference.judge([torch.tensor([wrong, 1.0])])
    assert found.verdict is Verdict.SPECIAL, found
    assert found.message.startswith("output 0[0] is ")


def test_judge_overflow_threshold_accepts_max_and_infinity() -> None:
    """At the overflow threshold, the largest number and infinity are both right."""
    largest = torch.finfo(torch.float32).max
    reference = make_call_reference("mul", torch.tensor([largest]), torch.tensor([1 - 2**-23]))
    for right in (largest, math.inf, float(reference.eager[0])):
        assert reference.judge([torch.tensor([right])]).verdict is Verdict.PASS, right
    assert reference.judge([torch.tensor([-math.inf])]).verdict is Verdict.SPECIAL


# The rest


def test_judge_random_output_checked_by_structure_only() -> None:
    """Outputs that depend on random numbers are checked by structure only."""
    drawing = Drawing(torch.full((4,), 0.5))
    drawn = drawing.build("bernoulli", drawing.values[0])
    reference = drawing.reference(drawing.build("mul", drawn, 3.0))
    assert reference.judge([torch.full((4,), 7.0)]).verdict is Verdict.PASS
    assert reference.judge([torch.full((3,), 7.0)]).verdict is Verdict.STRUCTURE


@pytest.mark.parametrize(
    ("x", "right"), [(math.nan, True), (math.inf, True), (300.0, True), (255.5, False), (-0.5, False)]
)
def test_judge_undefined_integer_cast_may_return_any(x: float, right: bool) -> None:
    """A cast to an integer dtype that cannot hold the number may return any integer."""
    drawing = Drawing(torch.tensor([x, 2.5]))
    reference = drawing.reference(drawing.build("to", drawing.values[0], dtype=torch.uint8), drawing.values[0])
    found = reference.judge([torch.tensor([77, 2], dtype=torch.uint8), drawing.inputs[0]])
    assert (found.verdict is Verdict.PASS) == right, found


def test_judge_counts_strayed_eager_apart_from_overflow() -> None:
    """Eager outside a bound that is too narrow is counted apart from overflow."""
    narrow = make_call_reference(
        "celu", torch.tensor([-50.0, 1.0]), alpha=-1.5
    )  # its class knows no rounding of the quotient
    found = narrow.judge(narrow.eager)
    assert (found.unstable, found.unstable_finite) == (1, 1)
    overflows = make_call_reference("softplus", torch.tensor([1.0]), beta=1.0, threshold=20.0)
    overflows.expected[0].eager = torch.tensor([math.inf])
    found = overflows.judge([torch.tensor([math.inf])])
    assert (found.unstable, found.unstable_finite) == (1, 0)


@pytest.mark.parametrize("name", ["sin", "cos", "tan", "exp", "sqrt"])
def test_judge_float_function_rounds_integers_first(name: str) -> None:
    """Integers are rounded before a float function is computed."""
    reference = make_call_reference(name, torch.tensor([2**40 + 1, 2**62 + 12345, -(2**53) - 1, 7]))
    found = reference.judge(reference.eager)
    assert (found.verdict, found.unstable) == (Verdict.PASS, 0), found


def test_judge_dequantize_computes_in_float32() -> None:
    """The dtype argument of dequantize is not the dtype of its arithmetic."""
    x, scale = torch.arange(200, 210, dtype=torch.uint8)[None], torch.tensor([0.0333])
    reference = make_call_reference("dequantize", x, scale, None, dtype=torch.float16, axis=0)
    found = reference.judge(reference.eager)
    assert (found.verdict, found.unstable) == (Verdict.PASS, 0), found
    exact = x.double() * scale.double()  # its reference itself rounds to float32
    assert ((reference.expected[0].exact - exact).abs() <= 2**-22 * exact).all()


def test_judge_quantize_saturates_except_nan() -> None:
    """quantize saturates, so that only NaN is undefined."""
    for x, verdict in ((1e9, Verdict.VALUE), (math.inf, Verdict.VALUE), (math.nan, Verdict.PASS)):
        reference = make_call_reference("quantize", torch.tensor([x]), 0.1, 0, dtype=torch.int8)
        assert reference.judge([torch.tensor([5], dtype=torch.int8)]).verdict is verdict


def test_judge_empty_output_passes() -> None:
    """Empty outputs pass."""
    reference = make_call_reference("exp", torch.ones(0, 3))
    assert reference.judge([torch.ones(0, 3)]).verdict is Verdict.PASS


def test_judge_same_seed_repeats_bounds() -> None:
    """The same seed gives the same bounds."""
    x = randn(3, 8)
    bounds = [
        make_call_reference("layer_norm", x, None, None, normalized_shape=(8,), eps=1e-5).expected[0].bound
        for _ in range(2)
    ]
    assert torch.equal(*bounds)


def test_judge_message_names_index_error_and_bound() -> None:
    """A message names the index, both elements and the allowed error."""
    found = make_call_reference("exp", torch.zeros(2, 2)).judge([torch.tensor([[1.0, 1.0], [1.5, 1.0]])])
    assert found.message == (
        "output 0[1, 0] is 1.5 instead of 1.0 (exact 1.0, bound 9.54e-07 of ulp(8, None)); 1 of 4 elements are wrong"
        "; the inputs are 0.0 there"
    )
    assert found.error == 0.5
    assert found.ratio == pytest.approx(0.5 * 2**20)


def test_judge_overwritten_inputs_do_not_matter() -> None:
    """Inputs are copied, so that a target may overwrite them."""
    x = torch.ones(2)
    reference = make_call_reference("neg", x)
    x.zero_()
    assert reference.judge([-torch.ones(2)]).verdict is Verdict.PASS


def test_judge_missing_nan_blamed_not_correct_element():
    """The message names the missing NaN, not a correct element."""
    x = torch.tensor([[[1.0, 2.0, 3.0, math.nan]]])
    found = make_call_reference("adaptive_avg_pool1d", x, output_size=(2,)).judge([torch.tensor([[[1.5, 3.0]]])])
    assert found.verdict is Verdict.SPECIAL
    assert "output 0[0, 0, 1] is 3.0 instead of nan" in found.message


def test_judge_integer_sum_to_float_rounds_as_float() -> None:
    """Integers that are summed to a float have the error of floats."""
    x = torch.tensor([-(2**53), 3, 2**53 - 1])
    reference = make_call_reference("sum", x, dim=None, keepdim=False, dtype=torch.float32)
    assert reference.judge([torch.tensor(3.0)]).verdict is Verdict.PASS  # 2^53 - 1 is 2^53 in float32
    assert reference.judge([torch.tensor(2.0**33)]).verdict is Verdict.VALUE


@pytest.mark.parametrize("seed", range(4))
def test_judge_variance_lost_in_rounding_passes(seed: int) -> None:
    """A variance below the rounding error of its mean is no discontinuity."""
    x = 30 + 0.003 * randn(5, 5, 4, seed=seed)
    mean, square = x.mean(-1, keepdim=True), (x * x).mean(-1, keepdim=True)
    in_one_pass = (x - mean) / ((square - mean * mean).clamp(min=0) + 1e-5).sqrt()
    found = make_call_reference("layer_norm", x, None, None, normalized_shape=(4,), eps=1e-5).judge([in_one_pass])
    assert not found.verdict.is_failure, found.message


@pytest.mark.parametrize(("ulps", "verdict"), [(0, Verdict.PASS), (3, Verdict.PASS), (2000, Verdict.VALUE)])
def test_judge_mean_error_counts_below_variance_error(ulps: int, verdict: Verdict) -> None:
    """The error of a mean counts even if that of the variance is larger."""
    steps = [265.0, 416, 265, -321, -64, -730, -487, 667, 94, -441, -636, 458, -245, -38, 239]
    x = (torch.tensor(steps) * 2**-18 - 50).reshape(1, 3, 5)
    mean, deviation = torch.native_layer_norm(x, x.shape, None, None, 1e-12)[1:]
    shifted = mean + ulps * 2**-18
    graph = make_call_reference(
        "native_layer_norm", x, torch.ones_like(x), None, normalized_shape=x.shape, eps=1e-12
    ).graph
    found = CaseReference(graph, [x, torch.ones_like(x)], trusts_eager=True).judge(
        [(x - shifted) * deviation, mean, deviation]
    )
    assert found.verdict is verdict, found.message
