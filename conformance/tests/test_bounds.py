"""Error bounds of the judge: differences by rounding pass, larger and too coarse ones fail."""

from __future__ import annotations

import math

import pytest
import torch
from case_references import Drawing, make_call_reference, randn, round_to_tf32
from clika_ref_conformance.verdicts import Reason, Verdict
from torch.nn import functional as F

# Step 4


def test_judge_gelu_tanh_for_erf_fails() -> None:
    """GELU by tanh does not pass for GELU by erf."""
    x = randn(64)
    reference = make_call_reference("gelu", x, approximate="none")
    assert reference.judge([F.gelu(x)]).verdict is Verdict.PASS
    assert reference.judge([F.gelu(x, approximate="tanh")]).verdict is Verdict.VALUE


@pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16])
def test_judge_cast_pair_without_rounding_fails(cast: torch.dtype) -> None:
    """A cast to a narrow dtype and back must round."""
    drawing = Drawing(randn(32))
    narrow = drawing.build("to", drawing.build("exp", drawing.values[0]), dtype=cast)
    reference = drawing.reference(drawing.build("to", narrow, dtype=torch.float32))
    assert reference.judge([drawing.inputs[0].exp().to(cast).float()]).verdict is Verdict.PASS
    assert reference.judge([drawing.inputs[0].exp()]).verdict is Verdict.VALUE


def test_judge_layer_norm_epsilon_outside_root_fails() -> None:
    """The epsilon of layer_norm belongs under the root."""
    x = randn(4, 16)
    reference = make_call_reference("layer_norm", x, None, None, normalized_shape=(16,), eps=1e-5)
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, correction=0, keepdim=True)
    assert reference.judge([(x - mean) / (variance + 1e-5).sqrt()]).verdict is Verdict.PASS
    assert reference.judge([(x - mean) / (variance.sqrt() + 1e-5)]).verdict is Verdict.VALUE


def test_judge_mul_factor_rounded_to_float16_fails() -> None:
    """A factor that is rounded to float16 is another factor."""
    x = randn(8)
    reference = make_call_reference("mul", x, 1 / 3)
    assert reference.judge([x * (1 / 3)]).verdict is Verdict.PASS
    assert reference.judge([x * float(torch.tensor(1 / 3).half())]).verdict is Verdict.VALUE


def test_judge_composition_bounded_by_its_parts() -> None:
    """A composition is limited to the errors that its parts allow."""
    x, target = randn(16), randn(16, seed=1)
    reference = make_call_reference("mse_loss", x, target, reduction=1)
    right = ((x - target) ** 2).mean()
    assert reference.judge([right]).verdict is Verdict.PASS
    assert reference.judge([right * (1 + 2**-13)]).verdict is Verdict.VALUE


@pytest.mark.parametrize(
    ("op", "attrs"),
    [("sum", {"dim": (1,)}), ("mean", {"dim": (1,)}), ("cumsum", {"dim": 1}), ("nansum", {"dim": (1,)})],
)
@pytest.mark.parametrize("in_graph", [False, True])
def test_judge_sum_with_infinity_must_match_special(op: str, attrs: dict[str, object], in_graph: bool) -> None:
    """A sum with an infinity is special, not an overflow that allows any result."""
    drawing = Drawing(torch.tensor([[1.0, math.inf, 2.0], [1.0, 2.0, 3.0]]))
    operand = drawing.build("relu", drawing.values[0]) if in_graph else drawing.values[0]
    reference = drawing.reference(drawing.build(op, operand, **attrs))
    (eager,) = reference.eager
    assert reference.judge([eager]).verdict is Verdict.PASS
    for wrong in (0.0, -math.inf, math.nan, torch.finfo(torch.float32).max):
        changed = torch.where(eager.isinf(), wrong, eager)
        assert reference.judge([changed]).verdict.is_failure, wrong


@pytest.mark.parametrize(
    ("op", "x", "attrs"),
    [
        ("add", torch.tensor([math.inf, 1.0], dtype=torch.float64), {"alpha": 1}),
        ("exp", torch.tensor([1e4, 1.0], dtype=torch.float64), {}),
        ("var", torch.tensor([math.inf, 1.0, 2.0]), {"dim": (0,)}),
        ("std", torch.tensor([math.inf, 1.0, 2.0]), {"dim": (0,)}),
        ("logsumexp", torch.empty(2, 0), {"dim": (1,)}),
    ],
)
def test_judge_number_instead_of_special_fails(op: str, x: torch.Tensor, attrs: dict[str, object]) -> None:
    """No bound lets a finite number pass for a special one."""
    reference = make_call_reference(op, x, *([2.0] if op == "add" else []), **attrs)
    assert reference.judge(reference.eager).verdict is Verdict.PASS
    for index, eager in enumerate(reference.eager):
        for wrong in (0.0, torch.finfo(x.dtype).max):
            changed = [*reference.eager]
            changed[index] = eager.masked_fill(~eager.isfinite(), wrong)
            assert reference.judge(changed).verdict is Verdict.SPECIAL, (index, wrong)


def test_judge_sum_overflow_next_to_infinity_may_be_nan() -> None:
    """A sum whose finite terms may overflow has no limit next to an infinity."""
    largest = torch.finfo(torch.float32).max
    reference = make_call_reference("sum", torch.tensor([math.inf, -largest, -largest]), dim=(0,))
    for right in (math.inf, math.nan):  # the finite terms first: minus infinity, and then no number
        assert reference.judge([torch.tensor(right)]).verdict is Verdict.PASS, right


def test_judge_cancellation_widens_bound_of_its_output() -> None:
    """Cancellation in a graph widens the bound of its own output only."""
    drawing = Drawing(randn(16), torch.full((16,), 1e4))
    x, far = drawing.values
    moved = drawing.build("sub", drawing.build("add", x, far, alpha=1), far, alpha=1)
    reference = drawing.reference(moved, drawing.build("mul", x, far))
    lost, kept = (drawing.inputs[0] + 1e4) - 1e4, drawing.inputs[0] * 1e4
    assert reference.judge([lost, kept]).verdict is Verdict.PASS
    assert reference.judge([drawing.inputs[0], kept]).verdict is Verdict.PASS  # the exact value
    assert reference.judge([lost, lost * 1e4]).verdict is Verdict.VALUE


def test_judge_floor_at_rounding_step_accepts_either_integer() -> None:
    """Where rounding decides, either integer is right and is counted."""
    x = torch.tensor([0.3, 0.7, 5.0])
    drawing = Drawing(x, x + 1.5)
    one = drawing.build("div", drawing.values[0], drawing.values[0], rounding_mode=None)
    two = drawing.build("mul", one, drawing.values[1])
    reference = drawing.reference(drawing.build("floor", one), drawing.build("floor", two))
    eager = reference.eager
    found = reference.judge([torch.tensor([0.0, 1.0, 0.0]), eager[1]])
    assert not found.verdict.is_failure, found
    assert reference.judge([torch.tensor([2.5, 1.0, 1.0]), eager[1]]).verdict is Verdict.VALUE
    assert reference.judge([eager[0], eager[1] + 1]).verdict is Verdict.VALUE


@pytest.mark.parametrize(("clear", "verdict"), [(19, Verdict.PASS), (18, Verdict.NOT_RUN)])
def test_judge_ambiguous_share_above_5_percent_not_run(clear: int, verdict: Verdict) -> None:
    """Nothing passes if rounding decides more than a twentieth of the elements."""
    drawing = Drawing(torch.tensor([0.7]), torch.ones(clear))
    x, y = drawing.values
    reference = drawing.reference(
        drawing.build("floor", drawing.build("div", x, x, rounding_mode=None)), drawing.build("relu", y)
    )
    one, others = reference.eager
    for either in (one, one - 1):
        found = reference.judge([either, others])
        assert (found.verdict, found.ambiguous) == (verdict, 1), found
    assert found.message == (
        "" if verdict is Verdict.PASS else "rounding decides 1 of 19 elements: both results are correct"
    )
    assert reference.judge([one, others + 1]).verdict is Verdict.VALUE, "what is wrong stays wrong"


def test_judge_unbounded_mean_in_graph_passes() -> None:
    """An output without a limit has none inside a graph either."""
    drawing = Drawing(torch.tensor([math.inf, 1.0, 2.0]))
    x = drawing.build("relu", drawing.values[0])
    _, mean = drawing.build("var_mean", x, dim=(0,), correction=1, keepdim=False)
    reference = drawing.reference(mean, x)
    assert reference.eager[0].isnan(), "eager subtracts a mean that is infinite"
    assert not reference.judge([torch.tensor(math.inf), drawing.inputs[0]]).verdict.is_failure
    assert reference.judge([torch.tensor(math.inf), drawing.inputs[0] + 1]).verdict is Verdict.VALUE


def test_judge_argsort_ties_in_graph_leave_order_open() -> None:
    """Ties inside a graph leave the order open."""
    drawing = Drawing(torch.tensor([0.0, -1.0, 0.0, 2.0]))
    order = drawing.build("argsort", drawing.build("relu", drawing.values[0]), dim=0, descending=False, stable=False)
    reference = drawing.reference(order)
    found = reference.judge([torch.tensor([2, 1, 0, 3])])
    assert (found.verdict, found.reason, found.ambiguous) == (Verdict.NOT_RUN, Reason.AMBIGUOUS, 3), found
    assert reference.judge([torch.tensor([3, 1, 0, 2])]).verdict is Verdict.VALUE


@pytest.mark.parametrize("terms", [64, 1024])
def test_judge_tf32_operands_fail(terms: int) -> None:
    """Operands rounded to TF32 are reported."""
    x, weight = randn(16, terms), randn(16, terms, seed=1)
    reference = make_call_reference("linear", x, weight, None)
    found = reference.judge([F.linear(x, weight)])
    assert (found.verdict, found.grade) == (Verdict.PASS, "A"), found
    found = reference.judge([F.linear(round_to_tf32(x), round_to_tf32(weight))])
    assert found.verdict in (Verdict.PRECISION, Verdict.VALUE), found


def test_judge_other_summation_order_passes() -> None:
    """Another order of summation is no error."""
    x, weight = randn(16, 512), randn(16, 512, seed=1)
    backwards = F.linear(x.flip(1), weight.flip(1))
    pairs = (x[:, None] * weight).sum(-1)
    reference = make_call_reference("linear", x, weight, None)
    for other in (backwards, pairs):
        assert reference.judge([other]).verdict is Verdict.PASS


# Step 5


def test_judge_coarse_result_within_worst_case_fails_precision() -> None:
    """A coarse result within the worst case fails for its precision."""
    x, weight = randn(16, 2048), randn(16, 2048, seed=1)
    reference = make_call_reference("linear", x, weight, None)
    found = reference.judge([F.linear(round_to_tf32(x), round_to_tf32(weight))])
    assert found.verdict is Verdict.PRECISION, found
    assert "sum of products" in found.message or "as coarse as eager" in found.message
    assert found.grade == "D"


def test_judge_exact_eager_result_allows_one_ulp() -> None:
    """An eager result that is exact by luck does not make a target coarse."""
    x = torch.ones(8, 32)
    reference = make_call_reference("linear", x, torch.full((8, 32), 0.5), None)
    near = reference.eager[0] * (1 + 2**-23)
    assert reference.judge([near]).verdict is Verdict.PASS
