"""Orthogonal polynomials: equal to PyTorch's kernels for all degrees, in the module and in the file."""

import pytest
import torch

from clika_ref import clika_compile
from clika_ref.capture.forms.orthogonal_polynomials import POLYNOMIAL_FORMS

DEGREES = [-1, 0, 1, 2, 3, 4.7, 6, 7, 8, 9, 12, 40]


def make_grid(degrees=DEGREES):
    x = torch.linspace(-2.5, 2.5, 200, dtype=torch.float64)
    x = torch.cat([x, torch.tensor([-1.0, 1.0, 0.0, -0.0, 0.5, 30.0, -30.0])])
    return torch.meshgrid(x, torch.tensor(degrees, dtype=torch.float64), indexing="ij")


@pytest.mark.parametrize("overload", [o for o in POLYNOMIAL_FORMS if str(o).endswith("default")], ids=str)
def test_polynomial_equals_kernel(overload):
    """Equal up to 1e-9: kernels lose digits at degree 40 near 1."""
    x, n = make_grid()
    found, expected = POLYNOMIAL_FORMS[overload](x, n), overload(x, n)
    assert bool(((found - expected).abs() <= 1e-9 * (1 + expected.abs())).all())
    for degree in (0, 5, 9):
        assert torch.equal(POLYNOMIAL_FORMS[overload](x, degree), POLYNOMIAL_FORMS[overload](x, torch.tensor(degree)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hermite_polynomial_of_high_degree_is_nan(dtype):
    x, n = torch.tensor([0.5, 0.5], dtype=dtype), torch.tensor([129, 513])
    found = POLYNOMIAL_FORMS[torch.ops.aten.special_hermite_polynomial_he.default](x, n)
    assert torch.equal(found.isnan(), torch.special.hermite_polynomial_he(x, n).isnan())


@pytest.mark.slow
def test_polynomials_compiled_and_exported(tmp_path):
    """The degrees of the file are inputs, larger than those of the trace."""

    def call(x, n):
        special = torch.special
        return (
            special.chebyshev_polynomial_u(x, n),
            special.legendre_polynomial_p(x, n.float()),
            special.hermite_polynomial_h(x, 4),
            special.laguerre_polynomial_l(0.5, n),
        )

    module = clika_compile(call, tracing_inputs=[(torch.rand(size), torch.arange(size)) for size in (3, 4)])
    x, n = torch.linspace(-2, 2, 9), torch.arange(9)
    for found, expected in zip(module(x, n), call(x, n), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    module.clika_export(tmp_path / "model.onnx")  # compares the file with the module
