"""Lowerings at inputs far from zero or close to it, where a mathematically correct formula loses its digits."""

from __future__ import annotations

import pytest
import torch
from clika_ref_aten.activation import celu
from clika_ref_aten.cumulative import diff
from clika_ref_aten.layer_normalization import rms_norm
from clika_ref_aten.loss import REDUCE_NONE, binary_cross_entropy, soft_margin_loss
from clika_ref_aten.scattering import scatter_reduce
from clika_ref_aten.trigonometry import cosh, sinh
from clika_ref_aten.vector_norms import linalg_vector_norm
from one_operator import Case, build_case_graph, run_onnx

ULPS = 2**-20  # 8 ulp of float32, what the suite allows an elementwise function


def test_rms_norm_float64_avoids_epsilon_fusion() -> None:
    """rms_norm in float64 avoids a fusion that misreads its epsilon."""
    x, weight = torch.tensor([0.005, -0.3], dtype=torch.float64), torch.tensor([2.0, 0.7], dtype=torch.float64)
    expected = x / (x.square().mean() + 0.1).sqrt() * weight
    actual = run_lowering(rms_norm, x, weight, normalized_shape=(2,), eps=0.1)
    assert ((actual - expected).abs() <= 2**-49 * expected.abs()).all(), actual  # 8 ulp of float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("op", [sinh, cosh])
def test_sinh_cosh_many_elements_do_not_overflow_early(op, dtype) -> None:
    """Many elements do not overflow sooner than one."""
    many = torch.full((64,), 89, dtype=dtype)
    assert op(many).isfinite().all()
    assert torch.equal(op(many)[:1], op(many[:1]))
    assert op(many).dtype == torch.cosh(many).dtype


def test_diff_wider_prepend_promotes_dtype() -> None:
    """Differences with a wider operand have its dtype."""
    x, before = torch.tensor([1.5, 3.0]), torch.tensor([0.1], dtype=torch.float64)
    actual = run_lowering(diff, x, before, n=1)
    assert torch.equal(actual, torch.diff(x, prepend=before)), actual


def run_lowering(op, *operands, **attrs):
    call = op.call(*operands, **attrs)
    (result,) = run_onnx(build_case_graph(Case(op, list(call.operands), call.attrs)), list(operands))
    return result


def test_binary_cross_entropy_tiny_probability_keeps_digits() -> None:
    """The loss of a tiny probability keeps its digits."""
    x, target = torch.tensor([1e-6, 3e-4]), torch.zeros(2)
    expected = -torch.log1p(-x.double())
    actual = run_lowering(binary_cross_entropy, x, target, reduction=REDUCE_NONE)
    assert ((actual - expected).abs() <= ULPS * expected).all(), actual


def test_soft_margin_loss_far_margin_stays_positive() -> None:
    """The loss far beyond the margin is small but not zero."""
    x, target = torch.tensor([20.0, 50.0]), torch.ones(2)
    expected = torch.log1p(torch.exp(-x.double()))
    actual = run_lowering(soft_margin_loss, x, target, reduction=REDUCE_NONE)
    assert ((actual - expected).abs() <= ULPS * expected).all(), actual


@pytest.mark.parametrize("x", [-8.5, -30.0])
def test_celu_negative_alpha_equals_exponential(x: float) -> None:
    """celu with a negative alpha grows as its exponential."""
    expected = -1.5 * torch.expm1(torch.tensor(x, dtype=torch.float64) / -1.5)
    actual = run_lowering(celu, torch.tensor([x]), alpha=-1.5)
    assert actual.item() == pytest.approx(expected.item(), rel=ULPS * -x)  # the error of x / alpha is multiplied by x


def test_vector_norm_of_one_element_exact() -> None:
    """The norm of one element is exact."""
    x = torch.tensor([[3.9e-4], [-7.1e8]])
    assert torch.equal(run_lowering(linalg_vector_norm, x, ord=3, dim=(1,)), x.abs().flatten())
    assert run_lowering(linalg_vector_norm, torch.tensor(-3.9e-4), ord=0.5).item() == torch.tensor(3.9e-4).item()


def test_scatter_reduce_integer_mean_does_not_overflow() -> None:
    """A scattered mean of integers rounds down without overflow."""
    x, index = torch.tensor([torch.iinfo(torch.int64).min, 5]), torch.tensor([0, 1, 0, 1])
    src = torch.tensor([0, -20, 0, 1])
    actual = run_lowering(scatter_reduce, x, index, src, dim=0, reduce="mean")
    assert torch.equal(actual, torch.scatter_reduce(x, 0, index, src, "mean"))
