"""Singular values and what is computed from them: equal to PyTorch's kernels with a dynamic batch, and in the file."""

import pytest
import torch

from clika_ref import ModelError, clika_compile
from clika_ref.capture.forms.singular_values import SINGULAR_VALUE_FORMS

aten = torch.ops.aten


def make_matrices(batch, rows=4, columns=4):
    return torch.randn(batch, rows, columns, generator=torch.Generator().manual_seed(batch))


def make_tall(batch):
    return make_matrices(batch, 5, 3)


def make_wide(batch):
    return make_matrices(batch, 3, 5)


def multiply_svd(x, *, full_matrices=False):
    u, s, vh = torch.linalg.svd(x, full_matrices=full_matrices)
    k = s.shape[-1]
    return (u[..., :k] * s[..., None, :]) @ vh[..., :k, :], s, u.mT @ u, vh @ vh.mT


def multiply_eigh(x, uplo="L"):
    values, vectors = torch.linalg.eigh(x, uplo)
    return (vectors * values[..., None, :]) @ vectors.mT, values


def solve_least_squares(x, driver):
    found = torch.linalg.lstsq(x, x[..., :2] + 1, driver=driver)
    return tuple(t for t in found if t.numel())


def invert(x):
    return (
        torch.linalg.pinv(x),
        torch.linalg.pinv(x @ x.mT),  # of lower rank
        torch.linalg.pinv(x, atol=1.0, rtol=0.1),
        torch.linalg.pinv(x[:, :3] + x[:, :3].mT, hermitian=True),
        torch.linalg.matrix_rank(x @ x.mT),
    )


def find_norms(x):
    return (
        torch.linalg.norm(x, "nuc", dim=(1, 2)),
        torch.linalg.matrix_norm(x, 2, keepdim=True),
        torch.linalg.matrix_norm(x, -1, dim=(0, 1)),
        torch.linalg.norm(x, float("inf"), dim=(0, 2), keepdim=True),
        torch.linalg.norm(x, 3, dim=1),
        torch.linalg.cond(x),
    )


CASES = {
    "svdvals": (torch.linalg.svdvals, make_matrices),
    "svd of tall": (multiply_svd, make_tall),
    "svd of wide, full": (lambda x: multiply_svd(x, full_matrices=True), make_wide),
    "eigh": (lambda x: (*multiply_eigh(x), *multiply_eigh(x, "U"), torch.linalg.eigvalsh(x)), make_matrices),
    "pinv": (invert, make_tall),
    "norms": (find_norms, make_tall),
    "matrix_exp": (lambda x: torch.linalg.matrix_exp(3 * x), make_matrices),
    "lstsq": (lambda x: torch.linalg.lstsq(x, x[..., :1] + 1).solution, make_tall),
    "lstsq with residuals": (lambda x: solve_least_squares(x, "gelsd"), make_tall),
    "lstsq of lower rank": (lambda x: solve_least_squares(x @ x.mT, "gelss"), make_tall),
}


@pytest.mark.slow_cases("svd of tall", "lstsq of lower rank", "pinv", "norms", "svd of wide, full", "svdvals")
@pytest.mark.parametrize("name", CASES)
def test_call_equals_kernel_at_other_batch_sizes(name, tmp_path):
    call, make = CASES[name]
    module = clika_compile(call, tracing_inputs=[make(2), make(3)])
    for batch in (1, 5):
        torch.testing.assert_close(module(make(batch)), call(make(batch)), rtol=1e-4, atol=1e-4)
    module.clika_export(tmp_path / "model.onnx")  # compares the file with the module


def make_special_matrices(rows, columns):
    x = torch.randn(4, rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[1, 1:] = x[1, :1]  # rank 1
    x[2] = torch.eye(rows, columns)  # equal singular values
    x[3] = 0
    return x


@pytest.mark.parametrize("size", [1, 2, 3, 8, 17, 40])
@pytest.mark.parametrize("full", [False, True])
def test_svd_form_of_special_matrices_equals_kernel(size, full):
    """Vectors are orthonormal at any rank, and values equal those of the kernel to 1e-13 of the largest."""
    for x in (make_special_matrices(size + 1, size), make_special_matrices(size, size + 1)):
        u, s, vh = SINGULAR_VALUE_FORMS[aten._linalg_svd.default](x, full)
        expected = torch.linalg.svd(x, full_matrices=full)
        assert (u.shape, vh.shape) == (expected.U.shape, expected.Vh.shape)
        torch.testing.assert_close(s, expected.S, rtol=1e-13, atol=1e-12)
        torch.testing.assert_close((u[..., :size] * s[..., None, :]) @ vh[..., :size, :], x, rtol=0, atol=1e-12)
        torch.testing.assert_close(u.mT @ u, torch.eye(u.shape[-1]).double().expand(4, -1, -1), rtol=0, atol=1e-12)
        torch.testing.assert_close(vh @ vh.mT, torch.eye(vh.shape[-2]).double().expand(4, -1, -1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 5, 16, 33])
def test_eigh_form_of_special_matrices_equals_kernel(size):
    x = make_special_matrices(size, size)
    values, vectors = SINGULAR_VALUE_FORMS[aten._linalg_eigh.default](x)
    torch.testing.assert_close(values, torch.linalg.eigvalsh(x), rtol=1e-13, atol=1e-12)
    symmetric = x.tril() + x.tril(-1).mT
    torch.testing.assert_close((vectors * values[..., None, :]) @ vectors.mT, symmetric, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 30.0, -300.0])
def test_matrix_exp_form_equals_kernel(scale):
    x = scale * torch.eye(3, dtype=torch.float64) + make_matrices(2, 3, 3).double().triu(1)
    found, expected = SINGULAR_VALUE_FORMS[aten.linalg_matrix_exp.default](x), torch.linalg.matrix_exp(x)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=0)


def test_empty_matrices_exported(tmp_path):
    module = clika_compile(lambda x: (*torch.linalg.svd(x), *torch.linalg.eigh(x)), tracing_inputs=[torch.ones(0, 0)])
    assert [t.shape for t in module(torch.ones(0, 0))] == [(0, 0), (0,), (0, 0), (0,), (0, 0)]
    module.clika_export(tmp_path / "model.onnx")


@pytest.mark.slow
def test_gradients_of_singular_values_equal_eager():
    def call(x):
        return torch.linalg.svdvals(x).sum(-1) + torch.linalg.matrix_exp(x).sum((-2, -1))

    module = clika_compile(call, tracing_inputs=[make_matrices(2), make_matrices(3)]).train()
    x, y = make_matrices(5).requires_grad_(), make_matrices(5).requires_grad_()
    module(x).sum().backward()
    call(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda n: torch.ones(2, 3, n + 1), "needs matrices of constant size"),
        (lambda _: torch.ones(300, 300), "at most 256 are possible"),
    ],
)
def test_singular_values_of_unsupported_size_rejected(make, reason):
    with pytest.raises(ModelError, match=reason):
        clika_compile(torch.linalg.svdvals, tracing_inputs=[make(2), make(3)])


@pytest.mark.slow
def test_signs_of_vectors_are_not_those_of_the_kernel():
    """A model that returns the vectors themselves is rejected, as their signs are arbitrary."""
    with pytest.raises(ModelError, match="disagrees with eager"):
        clika_compile(lambda x: torch.linalg.eigh(x @ x.mT)[1], tracing_inputs=[make_matrices(6), make_matrices(9)])
