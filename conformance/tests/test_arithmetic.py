"""Targets that compute in other formats than their tensors pass only if they declare it."""

import math
from dataclasses import dataclass

import pytest
import torch
from clika_ref_conformance.drawing.calls.call_graphs import build_call_graph
from clika_ref_conformance.execution.case_checks import run_case
from clika_ref_conformance.judging.judge import CaseReference
from clika_ref_conformance.targets.identity import Identity
from clika_ref_conformance.verdicts import Verdict
from small_cases import case_of, suite_for
from torch.nn import functional as F

from clika_ref.core.arithmetic import FLUSHED_FLOAT32, TF32, Arithmetic
from clika_ref.core.errors import TargetError
from clika_ref.core.registry import load_registry

OPERATORS = load_registry().operators
IN_HALVES = Arithmetic(torch.float32, accumulate=torch.float16)
OF_HALVES = Arithmetic(torch.float32, compute=torch.float16, accumulate=torch.float16)
OF_TF32 = Arithmetic(torch.float32, compute=TF32, kinds=("dot",))


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def accumulated(x, weight, dtype):
    """Return ``x @ weight.T`` with every partial sum rounded to ``dtype``."""
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=dtype)
    for column in range(x.shape[1]):
        total = (total.double() + x[:, column, None].double() * weight[None, :, column].double()).to(dtype)
    return total.float()


def tf32(x):
    scale = 2.0 ** (torch.frexp(x).exponent - 11)
    return torch.round(x / scale) * scale


def judged(op, operands, attrs, actual, *arithmetic):
    tensors = [o for o in operands if isinstance(o, torch.Tensor)]
    reference = CaseReference(build_call_graph(OPERATORS[op], list(operands), attrs), tensors, arithmetic=arithmetic)
    return reference.judge([actual])


@pytest.mark.parametrize("terms", [8, 64, 1024])
def test_judge_float16_sums_pass_only_if_declared(terms):
    """Partial sums in float16 fail undeclared and pass declared."""
    x, weight = drawn(16, terms), drawn(16, terms, seed=1)
    halves = accumulated(x, weight, torch.float16)
    assert judged("linear", (x, weight, None), {}, halves).verdict.is_failure
    found = judged("linear", (x, weight, None), {}, halves, IN_HALVES)
    assert found.verdict is Verdict.PASS, found
    brain = accumulated(x.abs(), weight.abs(), torch.bfloat16)
    assert judged("linear", (x.abs(), weight.abs(), None), {}, brain, IN_HALVES).verdict.is_failure, "three bits less"


@pytest.mark.parametrize("terms", [4, 64, 2048])
def test_judge_tf32_operands_pass_only_if_declared(terms):
    """Operands in TF32 fail undeclared and pass declared."""
    x, weight = drawn(16, terms), drawn(16, terms, seed=1)
    coarse = F.linear(tf32(x), tf32(weight))
    assert judged("linear", (x, weight, None), {}, coarse).verdict.is_failure
    found = judged("linear", (x, weight, None), {}, coarse, OF_TF32)
    assert found.verdict is Verdict.PASS, found
    if terms > 100:
        return  # errors that cancel are within what errors that add up may reach
    brain = F.linear(x.bfloat16().float(), weight.bfloat16().float())
    assert judged("linear", (x, weight, None), {}, brain, OF_TF32).verdict.is_failure, "of bfloat16, which is coarser"


def test_arithmetic_other_error_class_or_dtype_has_no_effect():
    """An arithmetic applies only to its error classes and its dtype."""
    x = drawn(64)
    coarse = x.half().float().exp()
    assert judged("exp", (x,), {}, coarse).verdict is Verdict.VALUE
    assert judged("exp", (x,), {}, coarse, OF_HALVES).verdict is Verdict.PASS
    for other in (OF_TF32, Arithmetic(torch.float64, compute=torch.float16), IN_HALVES):
        assert judged("exp", (x,), {}, coarse, other).verdict is Verdict.VALUE, other


def test_judge_declared_float32_sums_reject_float16_sums():
    """Declared float32 partial sums are a stricter claim for float16 tensors."""
    x, weight = drawn(16, 512).half(), drawn(16, 512, seed=1).half()
    halves = accumulated(x, weight, torch.float16).half()
    wide = Arithmetic(torch.float16, accumulate=torch.float32)
    assert judged("linear", (x, weight, None), {}, halves).verdict is Verdict.PASS
    assert judged("linear", (x, weight, None), {}, halves, wide).verdict.is_failure
    right = (x.double() @ weight.double().T).half()
    assert judged("linear", (x, weight, None), {}, right, wide).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("op", "attrs"),
    [
        ("softmax", {"dim": 1, "dtype": None}),
        ("layer_norm", {"normalized_shape": (32,), "eps": 1e-5}),
        ("gelu", {"approximate": "none"}),
        ("mean", {"dim": (1,), "keepdim": False, "dtype": None}),
    ],
)
def test_judge_declared_float16_bounds_each_error_class(op, attrs):
    """Each error class has a bound in the declared format."""
    x = drawn(8, 32)
    operands = (x, None, None) if op == "layer_norm" else (x,)
    coarse = OPERATORS[op](x.half(), *operands[1:], **attrs).float()
    assert judged(op, operands, attrs, coarse).verdict.is_failure
    assert judged(op, operands, attrs, coarse, OF_HALVES).verdict is Verdict.PASS
    wrong = coarse + 0.02 * coarse.abs().amax()
    assert judged(op, operands, attrs, wrong, OF_HALVES).verdict.is_failure


def test_judge_overflow_of_declared_format_may_be_infinite():
    """A result that overflows in the declared format may be infinite."""
    x = torch.tensor([1.0] * 30 + [7e4])
    coarse = torch.tensor([1.0] * 30 + [math.inf])
    assert judged("sqrt", (x,), {}, coarse).verdict is Verdict.SPECIAL
    assert judged("sqrt", (x,), {}, coarse, OF_HALVES).verdict is Verdict.PASS


def test_judge_flushed_subnormals_pass_only_if_declared():
    """Subnormal numbers may become 0 only if the target declares it."""
    x = torch.tensor([[0.0, -75.0, -90.0, -95.0]])
    exact = torch.softmax(x, 1)
    flushed = torch.where(exact < torch.finfo(torch.float32).tiny, 0.0, exact)
    flushing = Arithmetic(torch.float32, compute=FLUSHED_FLOAT32, kinds=("softmax",))
    attrs = {"dim": 1, "dtype": None}
    assert judged("softmax", (x,), attrs, flushed).verdict is Verdict.VALUE
    assert judged("softmax", (x,), attrs, flushed, flushing).verdict is Verdict.PASS
    assert judged("softmax", (x,), attrs, torch.where(x < -70, 0.0, exact), flushing).verdict is Verdict.VALUE


@dataclass(frozen=True)
class Halves(Identity):
    """Eager, with the inputs of elementwise functions rounded to float16."""

    arithmetic: tuple = ()

    def load(self, artifact):
        right = super().load(artifact)
        return lambda inputs: right([t.half().float() for t in inputs])


def test_run_case_declared_arithmetic_reaches_judge(tmp_path):
    """The judge uses the arithmetic that a target declares."""
    case = case_of(("exp", {}), x=drawn(64))
    assert run_case(case, suite_for(tmp_path, target=Halves())).verdict is Verdict.VALUE
    assert run_case(case, suite_for(tmp_path, target=Halves(arithmetic=(OF_HALVES,)))).verdict is Verdict.PASS


def test_arithmetic_non_rounding_format_raises():
    """An error class or dtype that does not round raises TargetError."""
    with pytest.raises(TargetError, match=r"unknown rounding error 'exact'. Choose from ulp, dot"):
        Arithmetic(torch.float32, compute=TF32, kinds=("exact",))
    with pytest.raises(TargetError, match=r"torch\.int8 does not round. Use floating-point dtypes only"):
        Arithmetic(torch.float32, compute=torch.int8)
