"""Special functions as series: equal to PyTorch's kernels on their domains, in the module and in the file."""

import pytest
import torch
from torch import nn

from clika_ref import clika_compile
from clika_ref.capture.forms.special_functions import SPECIAL_FUNCTIONS

aten = torch.ops.aten

BOUND = 1e-6
"""Relative error; several float32 roundings of PyTorch's own kernels."""

SPECIAL_VALUES = [0.0, -0.0, 1.0, 2.0, -1.0, -2.0, 0.5, -0.5, float("inf"), float("-inf"), float("nan")]

UNARY = [overload for overload in SPECIAL_FUNCTIONS if len(overload._schema.arguments) == 1]


SCALES = {aten.special_bessel_y1.default: 1.0, aten.special_airy_ai.default: 4.0}
"""Scales of errors for functions with inexact kernels, as mpmath shows: y1 by 8.7e-7 above 5, Ai by 3e-6 at -2.1."""


def make_values(overload):
    bounded = overload in (aten.erfinv.default, aten.special_ndtri.default)
    largest = 1.0 if bounded else 40.0
    grid = torch.linspace(-largest, largest, 4001, dtype=torch.float64)
    small = torch.logspace(-30, 0, 200, dtype=torch.float64)
    return torch.cat([grid, small, -small, torch.tensor(SPECIAL_VALUES, dtype=torch.float64)]).float()


def assert_equal(found, expected, scale):
    """Compare where finite, by a bound that grows near the zeros of oscillating functions; else exactly."""
    is_finite = expected.isfinite() & found.isfinite()
    assert torch.equal(found[~is_finite].nan_to_num(7.0), expected[~is_finite].nan_to_num(7.0))
    error = (found - expected).abs()[is_finite]
    allowed = BOUND * (expected.abs() + scale)[is_finite]
    assert bool((error <= allowed).all()), float((error / allowed).max())


@pytest.mark.parametrize("overload", UNARY, ids=str)
def test_special_function_equals_kernel(overload):
    x = make_values(overload)
    # Kernels in float64 are the reference. They round positions of poles in the same way.
    expected = overload(x.double()).float()
    assert_equal(SPECIAL_FUNCTIONS[overload](x), expected, torch.full_like(x, SCALES.get(overload, 0.3)))


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_polygamma_equals_kernel(order):
    x = torch.linspace(0.05, 30, 600)
    found, expected = SPECIAL_FUNCTIONS[aten.polygamma.default](order, x), torch.polygamma(order, x.double()).float()
    assert_equal(found, expected, torch.full_like(x, 1e-3))


def test_zeta_equals_kernel():
    x, q = torch.meshgrid(torch.linspace(1.1, 12, 40), torch.linspace(0.1, 20, 50), indexing="ij")
    found = SPECIAL_FUNCTIONS[aten.special_zeta.default](x, q)
    assert_equal(found, torch.special.zeta(x.double(), q.double()).float(), torch.zeros_like(x))


@pytest.mark.parametrize("overload", [aten.igamma.default, aten.igammac.default], ids=str)
def test_incomplete_gamma_equals_kernel(overload):
    special = torch.tensor([0.0, -1.0, float("inf"), float("nan")])
    a = torch.cat([torch.logspace(-3, 4, 60), special])
    a, x = torch.meshgrid(a, torch.cat([torch.logspace(-4, 4.2, 80), special]), indexing="ij")
    found, expected = SPECIAL_FUNCTIONS[overload](a, x), overload(a.double(), x.double()).float()
    assert_equal(found, expected, torch.full_like(expected, 1e-6))


class SpecialFunctions(nn.Module):
    def forward(self, x):
        special = torch.special
        return (
            *(torch.lgamma(x), torch.digamma(x), torch.erfinv(x / 40), torch.special.i0e(x), special.bessel_y0(x)),
            *(special.log_ndtr(-x), special.airy_ai(x - 9), torch.igamma(x, x + 1), torch.igammac(2 * x, x)),
        )


@pytest.mark.slow
def test_special_functions_compiled_and_exported(tmp_path):
    torch.manual_seed(0)
    model = SpecialFunctions()
    module = clika_compile(model, tracing_inputs=[torch.rand(2, 5) * 30, torch.rand(3, 5) * 30])
    x = torch.rand(7, 5) * 30
    for found, expected in zip(module(x), model(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-6)
    module.clika_export(tmp_path / "model.onnx")  # compares the file with the module
