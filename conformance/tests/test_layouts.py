"""Other forms of one call: equal elements in other memory layouts, and equivalent literals."""

import torch
from clika_ref_conformance.cases import CaseRun
from clika_ref_conformance.drawing.calls.layouts import make_layout_runs, make_literal_variants
from torch.types import Number

from clika_ref.core.operators import operator
from clika_ref.core.samples import Call, TensorSample


def make_sample(*shape, unique=False):
    return TensorSample(torch.float32, shape, -3, 3, unique=unique)


def test_make_layout_runs_hold_same_elements():
    """Layouts have the same elements, except the expanded one."""
    x = torch.arange(48.0).reshape(2, 3, 4, 2)
    runs = {run.name: run.inputs[0] for run in make_layout_runs(CaseRun("typical", (x,)), [make_sample(2, 3, 4, 2)])}
    assert set(runs) == {"strided", "offset", "channels-last", "expanded"}
    for name in ("strided", "offset", "channels-last"):
        assert torch.equal(runs[name], x), name
    assert not runs["strided"].is_contiguous()
    assert runs["offset"].storage_offset() == 3
    assert runs["channels-last"].is_contiguous(memory_format=torch.channels_last)
    assert runs["expanded"].stride(0) == 0
    assert torch.equal(runs["expanded"][1], x[0])


def test_make_layout_runs_unchanged_layout_skipped():
    """A layout that changes nothing is no run."""
    names = {run.name for run in make_layout_runs(CaseRun("typical", (torch.ones(3, 4),)), [make_sample(3, 4)])}
    assert names == {"strided", "offset", "expanded"}
    assert {run.name for run in make_layout_runs(CaseRun("typical", (torch.ones(()),)), [make_sample()])} == {"offset"}


def test_make_layout_runs_unique_elements_not_expanded():
    """Elements that must differ are not expanded."""
    names = {
        run.name for run in make_layout_runs(CaseRun("typical", (torch.arange(3.0),)), [make_sample(3, unique=True)])
    }
    assert names == {"strided", "offset"}


@operator()
def literal(x: torch.Tensor, y: float | torch.Tensor, *, alpha: float, k: int, dim: int, dims: tuple[int, ...]) -> None:
    """Return nothing."""


def test_literal_variants_change_type_and_dim_sign():
    """Literals change between integers and floats, and dims count from the other end."""
    call = Call((make_sample(2, 3, 4), 2), {"alpha": 1.0, "k": 3, "dim": 1, "dims": (0, -1)})
    forms = dict(make_literal_variants(literal, call, torch.float32))
    assert set(forms) == {"alpha-integer", "dim-other-end", "dims-other-end", "x1-float"}
    assert type(forms["alpha-integer"].attrs["alpha"]) is int
    assert forms["dim-other-end"].attrs == {**call.attrs, "dim": -2}
    assert forms["dims-other-end"].attrs["dims"] == (-3, 2)
    assert type(forms["x1-float"].operands[1]) is float


def test_literal_variants_fraction_or_bad_dim_has_none():
    """A float with a fraction and a dim out of bounds have no other form."""
    call = Call((make_sample(2), 0.5), {"alpha": 1.5, "k": 3, "dim": 4, "dims": ()})
    assert list(make_literal_variants(literal, call, torch.float32)) == []


@operator()
def scalar(x: torch.Tensor, y: Number) -> torch.Tensor:
    """``x + y``."""
    return torch.add(x, y)


def test_literal_variants_scalar_may_exceed_narrow_dtypes():
    """A scalar may be True, or a number that narrower dtypes cannot hold."""

    def operands(dtype):
        found = make_literal_variants(scalar, Call((make_sample(2), 0.5)), dtype)
        return {name.removeprefix("x1-"): call.operands[1] for name, call in found}

    assert operands(torch.float32).keys() == {"boolean", "nan", "inf", "minus-inf", "beyond-single"}
    assert operands(torch.float16).keys() - operands(torch.float32).keys() == {"beyond-half", "below-half"}
    of_integers = operands(torch.int64)
    assert of_integers["boolean"] is True
    for name, narrow in (("beyond-double", torch.float64), ("32-bits", torch.float16), ("40-bits", torch.float32)):
        assert torch.tensor(of_integers[name], dtype=narrow).item() != of_integers[name]
