"""The judge: what it must not let pass, what it must not blame, and what it says."""

from __future__ import annotations

import math
import re

import pytest
import torch
from clika_ref_conformance.judging import exact_arithmetic
from clika_ref_conformance.judging.judge import Reference
from clika_ref_conformance.verdicts import Verdict
from torch.nn import functional as F

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph
from clika_ref.core.registry import load_registry
from clika_ref.core.types import TensorType

OPERATORS = load_registry().operators


class Drawing:
    """A graph under construction, with its inputs."""

    def __init__(self, *inputs: torch.Tensor) -> None:
        self.graph = Graph("drawing")
        self.inputs = inputs
        self.values = [self.graph.add_input(TensorType(t.dtype, tuple(t.shape)), f"x{i}") for i, t in enumerate(inputs)]
        self.build = Builder(self.graph, OPERATORS)

    def reference(self, *outputs: object) -> Reference:
        for value in outputs:
            self.graph.add_output(value)
        return Reference(self.graph, self.inputs)


def single(op: str, *operands: object, **attrs: object) -> Reference:
    """Return the reference of a graph of one node."""
    drawing = Drawing(*(o for o in operands if isinstance(o, torch.Tensor)))
    values = iter(drawing.values)
    found = drawing.build(op, *(next(values) if isinstance(o, torch.Tensor) else o for o in operands), **attrs)
    return drawing.reference(*(found if isinstance(found, tuple) else (found,)))


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tf32(x: torch.Tensor) -> torch.Tensor:
    """Round to 10 bits of fraction, as tensor cores read their operands."""
    scale = 2.0 ** (torch.frexp(x).exponent - 11)
    return torch.round(x / scale) * scale


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
def test_structure_comes_before_values(actual, message: str) -> None:
    found = single("relu", torch.ones(2)).judge(actual)
    assert found.verdict is Verdict.STRUCTURE
    assert re.fullmatch(message, found.message)


def test_who_trusts_eager_asks_for_no_exact_arithmetic_where_a_target_returns_its_bits(monkeypatch) -> None:
    drawing = Drawing(x := randn(5))
    drawing.graph.add_output(drawing.build("exp", drawing.values[0]))
    reference = Reference(drawing.graph, [x], trusting=True)
    assert reference.judge([x.exp() + 1]).verdict is Verdict.VALUE
    monkeypatch.setattr(Reference, "_expect", None)
    found = reference.judge([x.exp()])
    assert (found.verdict, found.quality, found.elements) == (Verdict.PASS, 1.0, 5)
    with pytest.raises(TypeError):
        Reference(drawing.graph, [x]).judge([x.exp()])  # who does not, looks at eager as at any target


def test_who_trusts_eager_computes_exactly_what_other_outputs_need() -> None:
    drawing = Drawing(x := randn(5))
    exp = drawing.build("exp", drawing.values[0])
    for output in (drawing.build("sin", exp), drawing.build("cos", exp), exp):
        drawing.graph.add_output(output)
    nodes = list(drawing.graph.nodes)
    assert exact_arithmetic.needed_for(drawing.graph, drawing.graph.outputs[1:2]) == {nodes[0], nodes[2]}
    reference = Reference(drawing.graph, [x], trusting=True)
    right = [x.exp().sin(), x.exp().cos(), x.exp()]
    near = [right[0].nextafter(torch.tensor(2.0)), *right[1:]]
    found = reference.judge(near)
    assert (found.verdict, found.elements, found.quality) == (Verdict.PASS, 15, max(1.0, found.quality))
    assert found.error > 0
    assert reference.judge([right[0], right[1] + 1, right[2]]).message.startswith("output 1[")


# Step 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["exp", "gelu", "sigmoid", "softmax", "layer_norm", "linear", "var", "cumsum", "mean"])
def test_eager_passes_its_own_judge(name: str, dtype: torch.dtype) -> None:
    x = randn(6, 16, dtype=dtype)
    extra = {
        "softmax": {"dim": -1},
        "layer_norm": {"normalized_shape": (16,), "eps": 1e-5},
        "cumsum": {"dim": 1},
        "mean": {"dim": (1,)},
    }
    operands = (x, randn(8, 16, seed=1, dtype=dtype)) if name == "linear" else (x,)
    reference = single(name, *operands, **extra.get(name, {}))
    found = reference.judge(reference.eager)
    assert (found.verdict, found.unstable) == (Verdict.PASS, 0), found


def test_where_eager_overflows_only_eager_or_the_exact_value_is_right() -> None:
    reference = single("soft_margin_loss", torch.tensor([-200.0, 1.0]), torch.tensor([1.0, 1.0]), reduction=0)
    finite = float(torch.log1p(torch.exp(torch.tensor(-1.0, dtype=torch.float64))))
    assert reference.eager[0][0].item() == math.inf
    for first, verdict in ((math.inf, Verdict.PASS), (200.0, Verdict.PASS), (190.0, Verdict.SPECIAL)):
        found = reference.judge([torch.tensor([first, finite])])
        assert (found.verdict, found.unstable) == (verdict, 1), found


def test_a_case_in_which_eager_is_off_everywhere_judges_nobody() -> None:
    reference = single("soft_margin_loss", torch.tensor([-200.0]), torch.tensor([1.0]), reduction=0)
    assert reference.judge([torch.tensor([7.0])]).verdict is Verdict.UNSTABLE


# Step 2


def test_copies_may_only_differ_in_the_sign_of_zero() -> None:
    reference = single("relu", torch.tensor([-0.0, 1.0]))
    assert reference.judge([torch.tensor([-0.0, 1.0])]).verdict is Verdict.PASS
    found = reference.judge([torch.tensor([0.0, 1.0 + 2**-23])])
    assert found.verdict is Verdict.VALUE
    assert found.message == "output 0[1] is 1.0000001192092896 instead of 1.0; 1 of 2 elements are wrong"


def test_an_integer_is_right_or_wrong() -> None:
    reference = single("add", torch.tensor([2**40]), torch.tensor([1]), alpha=1)
    assert reference.judge([torch.tensor([2**40 + 1])]).verdict is Verdict.PASS
    assert reference.judge([torch.tensor([2**40])]).verdict is Verdict.VALUE


def test_topk_may_choose_among_ties_but_not_twice() -> None:
    reference = single("topk", torch.tensor([1.0, 3.0, 3.0, 3.0]), k=2, dim=-1, largest=True, sorted=True)
    values = torch.tensor([3.0, 3.0])
    assert reference.judge([values, torch.tensor([3, 1])]).verdict is Verdict.PASS
    for wrong in ([1, 1], [0, 1], [1, 4]):
        assert reference.judge([values, torch.tensor(wrong)]).verdict is Verdict.VALUE, wrong


def test_argmax_must_choose_the_first() -> None:
    reference = single("argmax", torch.tensor([1.0, 3.0, 3.0]), dim=0, keepdim=False)
    assert reference.judge([torch.tensor(2)]).verdict is Verdict.VALUE


def test_a_stable_sort_has_no_choice() -> None:
    for stable, verdict in ((False, Verdict.PASS), (True, Verdict.VALUE)):
        reference = single("argsort", torch.tensor([2.0, 2.0, 1.0]), dim=0, descending=False, stable=stable)
        swapped = torch.tensor([2, 1, 0])
        assert reference.judge([swapped]).verdict is verdict


# Step 3


@pytest.mark.parametrize(
    ("x", "wrong"), [(math.nan, 0.0), (math.nan, math.inf), (math.inf, 3.4e38), (math.inf, -math.inf), (1.0, math.nan)]
)
def test_special_values_must_be_the_same(x: float, wrong: float) -> None:
    reference = single("sqrt", torch.tensor([x, 1.0]))
    assert reference.judge(reference.eager).verdict is Verdict.PASS
    found = reference.judge([torch.tensor([wrong, 1.0])])
    assert found.verdict is Verdict.SPECIAL, found
    assert found.message.startswith("output 0[0] is ")


def test_at_the_threshold_of_overflow_the_largest_number_and_infinity_are_both_right() -> None:
    largest = torch.finfo(torch.float32).max
    reference = single("mul", torch.tensor([largest]), torch.tensor([1 - 2**-23]))
    for right in (largest, math.inf, float(reference.eager[0])):
        assert reference.judge([torch.tensor([right])]).verdict is Verdict.PASS, right
    assert reference.judge([torch.tensor([-math.inf])]).verdict is Verdict.SPECIAL


# Step 4


def test_gelu_by_tanh_is_not_gelu_by_erf() -> None:
    x = randn(64)
    reference = single("gelu", x, approximate="none")
    assert reference.judge([F.gelu(x)]).verdict is Verdict.PASS
    assert reference.judge([F.gelu(x, approximate="tanh")]).verdict is Verdict.VALUE


@pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16])
def test_a_pair_of_casts_must_round(cast: torch.dtype) -> None:
    drawing = Drawing(randn(32))
    narrow = drawing.build("to", drawing.build("exp", drawing.values[0]), dtype=cast)
    reference = drawing.reference(drawing.build("to", narrow, dtype=torch.float32))
    assert reference.judge([drawing.inputs[0].exp().to(cast).float()]).verdict is Verdict.PASS
    assert reference.judge([drawing.inputs[0].exp()]).verdict is Verdict.VALUE


def test_epsilon_belongs_under_the_root() -> None:
    x = randn(4, 16)
    reference = single("layer_norm", x, None, None, normalized_shape=(16,), eps=1e-5)
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, correction=0, keepdim=True)
    assert reference.judge([(x - mean) / (variance + 1e-5).sqrt()]).verdict is Verdict.PASS
    assert reference.judge([(x - mean) / (variance.sqrt() + 1e-5)]).verdict is Verdict.VALUE


def test_a_factor_rounded_to_half_precision_is_another_factor() -> None:
    x = randn(8)
    reference = single("mul", x, 1 / 3)
    assert reference.judge([x * (1 / 3)]).verdict is Verdict.PASS
    assert reference.judge([x * float(torch.tensor(1 / 3).half())]).verdict is Verdict.VALUE


def test_a_composition_is_held_to_what_its_parts_allow() -> None:
    x, target = randn(16), randn(16, seed=1)
    reference = single("mse_loss", x, target, reduction=1)
    right = ((x - target) ** 2).mean()
    assert reference.judge([right]).verdict is Verdict.PASS
    assert reference.judge([right * (1 + 2**-13)]).verdict is Verdict.VALUE


def test_cancellation_in_a_graph_widens_its_bound_and_nothing_else_does() -> None:
    drawing = Drawing(randn(16), torch.full((16,), 1e4))
    x, far = drawing.values
    moved = drawing.build("sub", drawing.build("add", x, far, alpha=1), far, alpha=1)
    reference = drawing.reference(moved, drawing.build("mul", x, far))
    lost, kept = (drawing.inputs[0] + 1e4) - 1e4, drawing.inputs[0] * 1e4
    assert reference.judge([lost, kept]).verdict is Verdict.PASS
    assert reference.judge([drawing.inputs[0], kept]).verdict is Verdict.PASS  # the exact value
    assert reference.judge([lost, lost * 1e4]).verdict is Verdict.VALUE


def test_where_rounding_decides_either_integer_is_right_and_counted() -> None:
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
def test_nothing_passes_where_rounding_decides_more_than_a_twentieth(clear: int, verdict: Verdict) -> None:
    drawing = Drawing(torch.tensor([0.7]), torch.ones(clear))
    x, y = drawing.values
    reference = drawing.reference(
        drawing.build("floor", drawing.build("div", x, x, rounding_mode=None)), drawing.build("relu", y)
    )
    one, others = reference.eager
    for either in (one, one - 1):
        found = reference.judge([either, others])
        assert (found.verdict, found.ambiguous) == (verdict, 1), found
    assert found.message == ("" if verdict is Verdict.PASS else "rounding decides 1 of 19 elements: either is right")
    assert reference.judge([one, others + 1]).verdict is Verdict.VALUE, "what is wrong stays wrong"


def test_what_has_no_limit_by_itself_has_none_in_a_graph() -> None:
    drawing = Drawing(torch.tensor([math.inf, 1.0, 2.0]))
    x = drawing.build("relu", drawing.values[0])
    _, mean = drawing.build("var_mean", x, dim=(0,), correction=1, keepdim=False)
    reference = drawing.reference(mean, x)
    assert reference.eager[0].isnan(), "eager subtracts a mean that is infinite"
    assert not reference.judge([torch.tensor(math.inf), drawing.inputs[0]]).verdict.is_failure
    assert reference.judge([torch.tensor(math.inf), drawing.inputs[0] + 1]).verdict is Verdict.VALUE


def test_ties_inside_a_graph_leave_the_order_open() -> None:
    drawing = Drawing(torch.tensor([0.0, -1.0, 0.0, 2.0]))
    order = drawing.build("argsort", drawing.build("relu", drawing.values[0]), dim=0, descending=False, stable=False)
    reference = drawing.reference(order)
    found = reference.judge([torch.tensor([2, 1, 0, 3])])
    assert (found.verdict, found.ambiguous) == (Verdict.NOT_RUN, 3), found
    assert reference.judge([torch.tensor([3, 1, 0, 2])]).verdict is Verdict.VALUE


@pytest.mark.parametrize("terms", [64, 1024])
def test_operands_rounded_to_tf32_are_caught(terms: int) -> None:
    x, weight = randn(16, terms), randn(16, terms, seed=1)
    reference = single("linear", x, weight, None)
    found = reference.judge([F.linear(x, weight)])
    assert (found.verdict, found.grade) == (Verdict.PASS, "A"), found
    found = reference.judge([F.linear(tf32(x), tf32(weight))])
    assert found.verdict in (Verdict.PRECISION, Verdict.VALUE), found


def test_another_order_of_summation_is_no_error() -> None:
    x, weight = randn(16, 512), randn(16, 512, seed=1)
    backwards = F.linear(x.flip(1), weight.flip(1))
    pairs = (x[:, None] * weight).sum(-1)
    reference = single("linear", x, weight, None)
    for other in (backwards, pairs):
        assert reference.judge([other]).verdict is Verdict.PASS


# Step 5


def test_a_coarse_result_within_the_worst_case_fails_for_its_precision() -> None:
    x, weight = randn(16, 2048), randn(16, 2048, seed=1)
    reference = single("linear", x, weight, None)
    found = reference.judge([F.linear(tf32(x), tf32(weight))])
    assert found.verdict is Verdict.PRECISION, found
    assert "sum of products" in found.message or "as coarse as eager" in found.message
    assert found.grade == "D"


def test_luck_of_eager_does_not_make_a_target_coarse() -> None:
    x = torch.ones(8, 32)
    reference = single("linear", x, torch.full((8, 32), 0.5), None)
    near = reference.eager[0] * (1 + 2**-23)
    assert reference.judge([near]).verdict is Verdict.PASS


# The rest


def test_what_depends_on_chance_is_held_to_its_structure_only() -> None:
    drawing = Drawing(torch.full((4,), 0.5))
    drawn = drawing.build("bernoulli", drawing.values[0])
    reference = drawing.reference(drawing.build("mul", drawn, 3.0))
    assert reference.judge([torch.full((4,), 7.0)]).verdict is Verdict.PASS
    assert reference.judge([torch.full((3,), 7.0)]).verdict is Verdict.STRUCTURE


@pytest.mark.parametrize(
    ("x", "right"), [(math.nan, True), (math.inf, True), (300.0, True), (255.5, False), (-0.5, False)]
)
def test_a_cast_to_an_integer_that_does_not_exist_may_give_any(x: float, right: bool) -> None:
    drawing = Drawing(torch.tensor([x, 2.5]))
    reference = drawing.reference(drawing.build("to", drawing.values[0], dtype=torch.uint8), drawing.values[0])
    found = reference.judge([torch.tensor([77, 2], dtype=torch.uint8), drawing.inputs[0]])
    assert (found.verdict is Verdict.PASS) == right, found


def test_what_dequantize_is_asked_for_is_not_what_it_computes_in() -> None:
    x, scale = torch.arange(200, 210, dtype=torch.uint8)[None], torch.tensor([0.0333])
    reference = single("dequantize", x, scale, None, dtype=torch.float16, axis=0)
    found = reference.judge(reference.eager)
    assert (found.verdict, found.unstable) == (Verdict.PASS, 0), found
    exact = x.double() * scale.double()  # its reference itself rounds to float32
    assert ((reference.expected[0].exact - exact).abs() <= 2**-22 * exact).all()


def test_quantize_saturates_so_that_only_nan_is_open() -> None:
    for x, verdict in ((1e9, Verdict.VALUE), (math.inf, Verdict.VALUE), (math.nan, Verdict.PASS)):
        reference = single("quantize", torch.tensor([x]), 0.1, 0, dtype=torch.int8)
        assert reference.judge([torch.tensor([5], dtype=torch.int8)]).verdict is verdict


def test_empty_outputs_pass() -> None:
    reference = single("exp", torch.ones(0, 3))
    assert reference.judge([torch.ones(0, 3)]).verdict is Verdict.PASS


def test_the_same_seed_gives_the_same_bounds() -> None:
    x = randn(3, 8)
    bounds = [single("layer_norm", x, None, None, normalized_shape=(8,), eps=1e-5).expected[0].bound for _ in range(2)]
    assert torch.equal(*bounds)


def test_a_message_says_where_what_and_how_much_was_allowed() -> None:
    found = single("exp", torch.zeros(2, 2)).judge([torch.tensor([[1.0, 1.0], [1.5, 1.0]])])
    assert found.message == (
        "output 0[1, 0] is 1.5 instead of 1.0 (exact 1.0, allowed 9.54e-07 by ulp(8, None)); 1 of 4 elements are wrong"
    )
    assert found.error == 0.5
    assert found.ratio == pytest.approx(0.5 * 2**20)


def test_inputs_are_copied_so_that_a_target_may_spoil_them() -> None:
    x = torch.ones(2)
    reference = single("neg", x)
    x.zero_()
    assert reference.judge([-torch.ones(2)]).verdict is Verdict.PASS


def test_a_missing_nan_is_blamed_and_not_an_element_that_is_right():
    x = torch.tensor([[[1.0, 2.0, 3.0, math.nan]]])
    found = single("adaptive_avg_pool1d", x, output_size=(2,)).judge([torch.tensor([[[1.5, 3.0]]])])
    assert found.verdict is Verdict.SPECIAL
    assert "output 0[0, 0, 1] is 3.0 instead of nan" in found.message


def test_integers_that_are_summed_to_floats_weigh_as_floats() -> None:
    x = torch.tensor([-(2**53), 3, 2**53 - 1])
    reference = single("sum", x, dim=None, keepdim=False, dtype=torch.float32)
    assert reference.judge([torch.tensor(3.0)]).verdict is Verdict.PASS  # 2^53 - 1 is 2^53 in float32
    assert reference.judge([torch.tensor(2.0**33)]).verdict is Verdict.VALUE


@pytest.mark.parametrize("seed", range(4))
def test_a_variance_drowned_in_the_rounding_of_its_mean_is_no_step(seed: int) -> None:
    x = 30 + 0.003 * randn(5, 5, 4, seed=seed)
    mean, square = x.mean(-1, keepdim=True), (x * x).mean(-1, keepdim=True)
    in_one_pass = (x - mean) / ((square - mean * mean).clamp(min=0) + 1e-5).sqrt()
    found = single("layer_norm", x, None, None, normalized_shape=(4,), eps=1e-5).judge([in_one_pass])
    assert not found.verdict.is_failure, found.message
