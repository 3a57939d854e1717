"""Matrix decompositions and selections as simpler calls: equal to PyTorch's kernels with a dynamic batch."""

import pytest
import torch

from clika_ref import ModelError, clika_compile
from clika_ref.capture.forms.selection_forms import SELECTION_FORMS


def make_matrices(batch, rows=4, columns=4):
    return torch.randn(batch, rows, columns, generator=torch.Generator().manual_seed(batch))


def make_positive(batch):
    x = make_matrices(batch)
    return x @ x.mT + torch.eye(4)


SQUARE = {
    "inv": torch.linalg.inv,
    "solve": lambda x: torch.linalg.solve(x, x[..., :2] + 1),
    "solve right": lambda x: torch.linalg.solve(x, x[..., :2, :] + 1, left=False),
    "slogdet": torch.linalg.slogdet,
    "lu": torch.linalg.lu,
    "lu_solve": lambda x: torch.linalg.lu_solve(*torch.linalg.lu_factor(x), x[..., :1] + 1),
    "triangular": lambda x: torch.linalg.solve_triangular(x.triu() + 3 * torch.eye(4), x, upper=True),
    "qr": torch.linalg.qr,
}

POSITIVE = {
    "cholesky": torch.linalg.cholesky,
    "cholesky_solve": lambda x: torch.cholesky_solve(x[..., :2], torch.linalg.cholesky(x)),
    "cholesky_inverse": lambda x: torch.cholesky_inverse(torch.linalg.cholesky(x)),
}

SELECTIONS = {
    "mode": lambda x: torch.mode(x.round(), 1),
    "nanmedian": lambda x: torch.nanmedian(torch.where(x > 1, torch.nan, x), 2),
    "nanmedian of all": lambda x: torch.nanmedian(torch.where(x > 0, torch.nan, x)),
    "index_reduce": lambda x: x.index_reduce(1, torch.tensor([0, 2, 0]), x[:, :3] + 1, "amax"),
    "put": lambda x: x.put(torch.tensor([1, -1]), torch.tensor([5.0, 6.0])),
    "frexp": torch.frexp,
    "nextafter": lambda x: torch.nextafter(x, x.flip(0)),
}

CASES = {
    **{name: (call, make_matrices) for name, call in (SQUARE | SELECTIONS).items()},
    **{name: (call, make_positive) for name, call in POSITIVE.items()},
    "qr of tall": (torch.linalg.qr, lambda batch: make_matrices(batch, 5, 3)),
    "lu of wide": (torch.linalg.lu, lambda batch: make_matrices(batch, 3, 5)),
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.slow_cases("cholesky_inverse", "cholesky_solve", "lu_solve", "qr", "qr of tall", "solve right")
@pytest.mark.parametrize("name", CASES)
def test_call_equals_kernel_at_other_batch_sizes(name, tmp_path):
    call, make = CASES[name]

    def run(x):
        found = call(x)
        return tuple(found) if isinstance(found, tuple) else found

    module = clika_compile(run, tracing_inputs=[make(2), make(3)])
    for batch in (4, 7) if name in POSITIVE else (1, 5):  # PyTorch's shape function of cholesky excludes 1
        torch.testing.assert_close(module(make(batch)), run(make(batch)), rtol=1e-4, atol=1e-4)
    module.clika_export(tmp_path / "model.onnx")  # compares the file with the module


def test_frexp_exact_at_powers_of_two():
    x = torch.cat([2.0 ** torch.arange(-60, 60), torch.tensor([0.0, torch.inf, -3.0])])
    module = clika_compile(lambda x: torch.frexp(x)[:], tracing_inputs=[x])
    for found, expected in zip(module(x), torch.frexp(x), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_nextafter_form_exact(dtype):
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    values = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        2.0,
        0.3,
        largest,
        -largest,
        smallest,
        smallest / 4,
        torch.inf,
        -torch.inf,
        torch.nan,
    ]
    values = torch.tensor(values, dtype=torch.float64).to(dtype)
    x, other = torch.meshgrid(values, values, indexing="ij")
    found = SELECTION_FORMS[torch.ops.aten.nextafter.default](x, other)
    torch.testing.assert_close(found, torch.nextafter(x, other), rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
def test_kernels_in_autocast_region_compute_in_float32():
    def run(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inverse = torch.linalg.inv(x)
            return inverse, torch.lgamma(x.abs() + 1), torch.linalg.solve(x, x[..., :1])

    module = clika_compile(run, tracing_inputs=[make_matrices(2), make_matrices(3)])
    for found, expected in zip(module(make_matrices(5)), run(make_matrices(5)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_decomposition_of_dynamic_size_rejected():
    with pytest.raises(ModelError, match="needs matrices of constant size"):
        clika_compile(torch.linalg.inv, tracing_inputs=[torch.eye(3)[None], torch.eye(4)[None]])
