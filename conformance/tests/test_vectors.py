"""The mandatory vectors: their positions, and exclusions by a domain."""

import math
from dataclasses import replace

import pytest
import torch
from clika_ref_conformance.drawing.calls.vectors import SPECIAL_VALUES, count_special_positions, make_runs

from clika_ref.core.samples import TensorSample


def make_sample(dtype=torch.float32, shape=(3, 4), low=-3.0, **more):
    return TensorSample(dtype, shape, low, low + 6.0, **more)


def make_all_runs(*samples):
    rows = max(count_special_positions(samples), 1)
    return [run for row in range(rows) for run in make_runs(samples, 0, row)]


def test_make_runs_special_element_first_and_last_alone():
    """Each special element is first and last in each operand, and alone."""
    samples = [make_sample(), make_sample(torch.float64)]
    found = set()
    for run in make_all_runs(*samples):
        for index, tensor in enumerate(run.inputs):
            flat = tensor.reshape(-1)
            special = [i for i, v in enumerate(flat) if not math.isfinite(v) or (v == 0 and v.signbit())]
            if run.name.split(":")[0].rsplit("-", 1)[0] in SPECIAL_VALUES and special:
                assert len(special) == 1
                found.add((run.name, index, special[0]))
            assert len(special) <= 1 or run.name == "crossed"
    assert {(index, at) for _, index, at in found} == {(0, 0), (0, 11), (1, 0), (1, 11)}
    assert len(found) == len(SPECIAL_VALUES) * 4


def test_make_runs_floats_wide_ties_tiny_and_shifted():
    """Floats get wide, tie, tiny and shifted elements."""
    runs = {run.name: run.inputs[0].double() for row in (0, 1) for run in make_runs([make_sample(shape=(50,))], 0, row)}
    assert runs["wide"].abs().max() > 64 > 1 / 64 > runs["wide"].abs().min()
    assert ((runs["ties"] * 8) % 1 == 0).all()
    assert {0.0, 0.5, 0.25, 0.125} <= set((runs["ties"] % 1).tolist())
    assert ((runs["ties"] % 10).abs() == 5).any()  # what rounds either way to tens
    assert runs["tiny"].abs().max() <= 3.001e-3
    assert (runs["offset+30"] > 28).all()
    assert (runs["offset-50"] < -48).all()


def test_make_runs_ties_stay_in_domain():
    """Ties are in the domain, and not only at its limits."""
    (ties,) = (
        run.inputs[0] for run in make_runs([make_sample(shape=(50,), domain=(0.0, 1.0))], 0) if run.name == "ties"
    )
    assert ((ties >= 0) & (ties <= 1)).all()
    assert {0.5, 0.25, 1.0} <= set(ties.tolist())


def test_make_runs_every_magnitude_overflows_squares():
    """With every magnitude, every other row has elements whose squares overflow."""
    for dtype in (torch.float32, torch.float16, torch.float64):
        rows = [make_runs([make_sample(dtype, shape=(90,))], 0, row, every_magnitude=True) for row in (0, 1)]
        tame, vast = (next(run.inputs[0] for run in row if run.name == "wide") for row in rows)
        assert tame.square().isfinite().all()
        assert vast.isfinite().all()
        assert vast.square().isinf().any() == (dtype != torch.float64)  # of which no wider reference could judge
        assert (vast != 0).all()


def test_make_runs_special_elements_cross_at_one_index():
    """Each pair of special elements occurs at one index of two operands."""
    met = set()
    for row in range(8):
        (crossed,) = (
            run
            for run in make_runs([make_sample(shape=(20,)), make_sample(shape=(20,))], 0, row)
            if run.name == "crossed"
        )
        here = [(repr(a), repr(b)) for a, b in zip(*(t.tolist() for t in crossed.inputs), strict=True)]
        kinds = {a for a, _ in here}
        assert {(a, a) for a in kinds} <= set(here)
        met |= set(here)
    assert kinds == {"nan", "inf", "-inf", "0.0", "-0.0", "1.0", "-1.0"}
    assert met == {(a, b) for a in kinds for b in kinds}


def test_make_runs_crossed_needs_two_operands_and_domain():
    """Special elements do not cross in one operand or outside a domain."""
    assert not any(run.name == "crossed" for run in make_runs([make_sample(), make_sample(unique=True)], 0))
    for row in range(8):
        positive = make_sample(shape=(20,), low=0.5, domain=(0.5, 4.0))
        (crossed,) = (run for run in make_runs([make_sample(), positive], 0, row) if run.name == "crossed")
        elements = crossed.inputs[1]
        assert set(elements[~elements.isnan()].tolist()) == {1.0}
        assert elements.isnan().any()
        (crossed,) = (
            r for r in make_runs([make_sample(), replace(positive, nan=False)], 0, row) if r.name == "crossed"
        )
        assert set(crossed.inputs[1].tolist()) == {1.0}


def test_make_runs_integers_cover_limits_and_signs():
    """Integers get their limits, sums beyond 32 bits and both signs."""
    runs = {run.name: run.inputs[0] for run in make_runs([make_sample(torch.int64, (40,))], 0)}
    assert set(runs["small:x0"].tolist()) == {-1, 0, 1}
    assert runs["extremes:x0"][0] == -(2**63)
    assert runs["extremes:x0"][-1] == 2**63 - 1
    assert runs["large:x0"][:2].sum() > 2**31 - 1
    assert (runs["signed:x0"] != 0).all()
    assert (runs["signed:x0"] < 0).any()
    assert (runs["far:x0"][::2].long() - 2**40).abs().max() < 9
    assert (runs["far:x0"][1::2].long() - 2**31).abs().max() < 9
    unsigned = {run.name for run in make_runs([make_sample(torch.uint8, (40,))], 0)}
    assert unsigned == {"typical", "small:x0", "extremes:x0", "large:x0"}


def test_make_runs_integers_with_domain_get_its_limits():
    """Integers with a domain get only its limits."""
    for low in (-4, 0):
        index = TensorSample(torch.int64, (6,), low, 3, domain=(low, 3))
        runs = {run.name: run.inputs[0] for run in make_runs([index], 0)}
        assert runs.keys() == {"typical", "lowest", "highest"} | ({"minus-one"} if low < 0 else set())
        assert (runs["lowest"] == low).all()
        assert (runs["highest"] == 3).all()


def test_make_runs_domain_excludes_special_elements():
    """A domain excludes special and other elements."""
    runs = make_all_runs(make_sample(low=0.0, domain=(0.0, 6.0), nan=False))
    for run in runs:
        assert ((run.inputs[0] >= 0) & (run.inputs[0] <= 6)).all(), run.name
    assert not any(run.name.startswith(("nan", "inf", "offset")) for run in runs)
    with_nan = make_all_runs(make_sample(low=0.0, domain=(0.0, 6.0)))
    assert {run.name[:3] for run in with_nan} - {run.name[:3] for run in runs} == {"nan"}
    assert any(run.name.startswith("inf") for run in make_all_runs(make_sample(low=0.0, domain=(0.0, math.inf))))


def test_make_runs_around_numbers_of_call():
    """Elements are near the numbers of a call."""
    (run,) = (run for run in make_runs([make_sample(shape=(8,)), 2.5], 0) if run.name == "around")
    assert set(run.inputs[0].sign().tolist()) == {1.0, -1.0}
    assert run.inputs[0].unique().tolist() == [-2.5, *(2.5 + step * 2.0**-22 for step in (-1, 0, 1)), 7.5]
    (run,) = (run for run in make_runs([make_sample(torch.int32, (8,)), 2**31, math.nan], 0) if run.name == "around")
    assert run.inputs[0].unique().tolist() == [-(2**31), 2**31 - 1]
    half = [run for run in make_runs([make_sample(torch.float16, (4,)), 70000.0], 0) if run.name == "around"]
    assert half[0].inputs[0].abs().max() == math.inf
    (run,) = (
        r for r in make_runs([make_sample(shape=(8,))], 0, attributes=[0.3, 0, True, "mean"]) if r.name == "around"
    )
    assert run.inputs[0].abs().double().unique().tolist() == pytest.approx([0.3, 0.3, 0.3, 0.9])
    assert (run.inputs[0] == torch.tensor(0.3)).any()
    assert not any(
        run.name == "around" for run in make_runs([make_sample(), make_sample()], 0, attributes=[0, True, math.inf])
    )


def test_make_runs_around_attributes_in_turn():
    """Elements are near integers among the attributes and numbers in tuples, in turn."""
    runs = [r for seed in range(9) for r in make_runs([make_sample(shape=(5,))], seed, attributes=[3, (0.5, (7,))])]
    middles = {r.inputs[0][0].item() for r in runs if r.name == "around"}
    assert middles == {3.0, 0.5, 7.0}


def test_make_runs_integers_equal_in_float64():
    """Integers that are equal in float64 occur together in all operands."""
    operands = [make_sample(torch.int64, (40,)), make_sample(torch.int64, (40,), unique=True)]
    (run,) = (run for run in make_runs(operands, 0) if run.name == "nearly equal")
    x, y = run.inputs
    assert (x == y).any()
    assert (x != y).any()
    assert torch.equal(x.double(), y.double())
    assert len(set(y.tolist())) == 40
    assert not any(run.name == "nearly equal" for run in make_runs([make_sample(torch.int32, (40,))], 0))


def test_make_runs_masks_all_true_and_false_row():
    """Masks are all true, or have a false row."""
    runs = {run.name: run.inputs[0] for run in make_runs([make_sample(torch.bool)], 0)}
    assert runs["all-true"].all()
    assert not runs["false-row"][0].any()
    assert runs["false-row"][1:].all()


def test_make_runs_unique_elements_stay_unique():
    """Elements that must differ stay different."""
    for run in make_all_runs(make_sample(shape=(9,), unique=True), make_sample(torch.int64, (9,), unique=True)):
        assert run.inputs[1].unique().numel() > 6, run.name
        assert run.name != "ties"


def test_make_runs_empty_tensor_typical_only():
    """Tensors without elements get typical runs only."""
    assert [run.name for run in make_runs([make_sample(shape=(0, 3)), make_sample(torch.int64, (0,))], 0)] == [
        "typical"
    ]
    assert [run.name for run in make_runs([2, None], 0)] == ["typical"]


def test_make_runs_same_seed_repeats():
    """The same seed gives the same elements."""
    one, again, other = (make_runs([make_sample()], seed)[0].inputs[0] for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_make_runs_given_tensor_unchanged():
    """A tensor that the sampler made stays unchanged."""
    given = torch.tensor([1, 5])
    for run in make_runs([make_sample(), given, make_sample()], 0, 3):
        assert run.inputs[1] is given
        assert len(run.inputs) == 3
    assert "nan-last:x2" in {run.name for run in make_runs([make_sample(), given, make_sample()], 0, 2)}


def find_run_inputs(samples, name):
    return next((run.inputs for run in make_runs(samples, 0) if run.name == name), None)


def test_make_runs_elements_equal_after_rounding():
    """Elements that are equal only when rounded occur in operands of several dtypes."""
    half, single = find_run_inputs([make_sample(dtype=torch.float16), make_sample()], "equal after rounding")
    assert torch.equal(half, single.half())
    assert not torch.equal(half.float(), single)
    half, whole = find_run_inputs(
        [make_sample(dtype=torch.float16), make_sample(dtype=torch.int64)], "equal after rounding"
    )
    assert torch.equal(half, whole.half())
    assert not torch.equal(half.long(), whole)
    assert find_run_inputs([make_sample(), make_sample()], "equal after rounding") is None
