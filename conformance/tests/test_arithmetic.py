"""Targets that compute in other formats than their tensors pass only if they declare it."""

import math
from dataclasses import dataclass

import pytest
import torch
from case_references import randn, round_to_tf32
from clika_ref_conformance.drawing.calls.call_graphs import build_call_graph
from clika_ref_conformance.execution.case_checks import run_case
from clika_ref_conformance.judging.judge import CaseReference
from clika_ref_conformance.targets.identity import Identity
from clika_ref_conformance.verdicts import Verdict
from small_cases import make_case, make_suite
from torch.nn import functional as F

from clika_ref.core.arithmetic import FLUSHED_FLOAT32, TF32, Arithmetic
from clika_ref.core.errors import TargetError
from clika_ref.core.registry import load_registry

OPERATORS = load_registry().operators
IN_HALVES = Arithmetic(torch.float32, accumulate=torch.float16)
OF_HALVES = Arithmetic(torch.float32, compute=torch.float16, accumulate=torch.float16)
OF_TF32 = Arithmetic(torch.float32, compute=TF32, kinds=("dot",))


def matmul_with_rounded_sums(x, weight, dtype):
    """Return ``x @ weight.T`` with every partial sum rounded to ``dtype``."""
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=dtype)
    for column in range(x.shape[1]):
        total = (total.double() + x[:, column, None].double() * weight[None, :, column].double()).to(dtype)
    return total.float()


def judge_output(op, operands, attrs, actual, *arithmetic):
    tensors = [o for o in operands if isinstance(o, torch.Tensor)]
    reference = CaseReference(build_call_graph(OPERATORS[op], list(operands), attrs), tensors, arithmetic=arithmetic)
    return reference.judge([actual])


@pytest.mark.parametrize("terms", [8, 64, 1024])
def test_judge_float16_sums_pass_only_if_declared(terms):
    """Partial sums in float16 fail undeclared and pass declared."""
    x, weight = randn(16, terms), randn(16, terms, seed=1)
    halves = matmul_with_rounded_sums(x, weight, torch.float16)
    assert judge_output("linear", (x, weight, None), {}, halves).verdict.is_failure
    found = judge_output("linear", (x, weight, None), {}, halves, IN_HALVES)
    assert found.verdict is Verdict.PASS, found
    brain = matmul_with_rounded_sums(x.abs(), weight.abs(), torch.bfloat16)
    assert judge_output("linear", (x.abs(), weight.abs(), None), {}, brain, IN_HALVES).verdict.is_failure, (
        "three bits less"
    )


@pytest.mark.parametrize("terms", [4, 64, 2048])
def test_judge_tf32_operands_pass_only_if_declared(terms):
    """Operands in TF32 fail undeclared and pass declared."""
    x, weight = randn(16, terms), randn(16, terms, seed=1)
    coarse = F.linear(round_to_tf32(x), round_to_tf32(weight))
    assert judge_output("linear", (x, weight, None), {}, coarse).verdict.is_failure
    found = judge_output("linear", (x, weight, None), {}, coarse, OF_TF32)
    assert found.verdict is Verdict.PASS, found
    if terms > 100:
        return  # errors that cancel are within what errors that add up may reach
    brain = F.linear(x.bfloat16().float(), weight.bfloat16().float())
    assert judge_output("linear", (x, weight, None), {}, brain, OF_TF32).verdict.is_failure, (
        "of bfloat16, which is coarser"
    )


def test_arithmetic_other_error_class_or_dtype_has_no_effect():
    """An arithmetic applies only to its error classes and its dtype."""
    x = randn(64)
    coarse = x.half().float().exp()
    assert judge_output("exp", (x,), {}, coarse).verdict is Verdict.VALUE
    assert judge_output("exp", (x,), {}, coarse, OF_HALVES).verdict is Verdict.PASS
    for other in (OF_TF32, Arithmetic(torch.float64, compute=torch.float16), IN_HALVES):
        assert judge_output("exp", (x,), {}, coarse, other).verdict is Verdict.VALUE, other


def test_judge_declared_float32_sums_reject_float16_sums():
    """Declared float32 partial sums are a stricter claim for float16 tensors."""
    x, weight = randn(16, 512).half(), randn(16, 512, seed=1).half()
    halves = matmul_with_rounded_sums(x, weight, torch.float16).half()
    wide = Arithmetic(torch.float16, accumulate=torch.float32)
    assert judge_output("linear", (x, weight, None), {}, halves).verdict is Verdict.PASS
    assert judge_output("linear", (x, weight, None), {}, halves, wide).verdict.is_failure
    right = (x.double() @ weight.double().T).half()
    assert judge_output("linear", (x, weight, None), {}, right, wide).verdict is Verdict.PASS


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
    x = randn(8, 32)
    operands = (x, None, None) if op == "layer_norm" else (x,)
    coarse = OPERATORS[op](x.half(), *operands[1:], **attrs).float()
    assert judge_output(op, operands, attrs, coarse).verdict.is_failure
    assert judge_output(op, operands, attrs, coarse, OF_HALVES).verdict is Verdict.PASS
    wrong = coarse + 0.02 * coarse.abs().amax()
    assert judge_output(op, operands, attrs, wrong, OF_HALVES).verdict.is_failure


def test_judge_overflow_of_declared_format_may_be_infinite():
    """A result that overflows in the declared format may be infinite."""
    x = torch.tensor([1.0] * 30 + [7e4])
    coarse = torch.tensor([1.0] * 30 + [math.inf])
    assert judge_output("sqrt", (x,), {}, coarse).verdict is Verdict.SPECIAL
    assert judge_output("sqrt", (x,), {}, coarse, OF_HALVES).verdict is Verdict.PASS


def test_judge_flushed_subnormals_pass_only_if_declared():
    """Subnormal numbers may become 0 only if the target declares it."""
    x = torch.tensor([[0.0, -75.0, -90.0, -95.0]])
    exact = torch.softmax(x, 1)
    flushed = torch.where(exact < torch.finfo(torch.float32).tiny, 0.0, exact)
    flushing = Arithmetic(torch.float32, compute=FLUSHED_FLOAT32, kinds=("softmax",))
    attrs = {"dim": 1, "dtype": None}
    assert judge_output("softmax", (x,), attrs, flushed).verdict is Verdict.VALUE
    assert judge_output("softmax", (x,), attrs, flushed, flushing).verdict is Verdict.PASS
    assert judge_output("softmax", (x,), attrs, torch.where(x < -70, 0.0, exact), flushing).verdict is Verdict.VALUE


@dataclass(frozen=True)
class Float16Inputs(Identity):
    """Eager, with the inputs of elementwise functions rounded to float16."""

    arithmetic: tuple = ()

    def load(self, artifact):
        right = super().load(artifact)
        return lambda inputs: right([t.half().float() for t in inputs])


def test_run_case_declared_arithmetic_reaches_judge(tmp_path):
    """The judge uses the arithmetic that a target declares."""
    case = make_case(("exp", {}), x=randn(64))
    assert run_case(case, make_suite(tmp_path, target=Float16Inputs())).verdict is Verdict.VALUE
    assert run_case(case, make_suite(tmp_path, target=Float16Inputs(arithmetic=(OF_HALVES,)))).verdict is Verdict.PASS


def test_arithmetic_non_rounding_format_raises():
    """An error class or dtype that does not round raises TargetError."""
    with pytest.raises(TargetError, match=r"unknown rounding error 'exact'. Choose from ulp, dot"):
        Arithmetic(torch.float32, compute=TF32, kinds=("exact",))
    with pytest.raises(TargetError, match=r"torch\.int8 does not round. Use floating-point dtypes only"):
        Arithmetic(torch.float32, compute=torch.int8)
