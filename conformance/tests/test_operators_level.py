"""L1: a correct lowering passes on every row, a faulty one fails on a small case, and the faulty part is named."""

from dataclasses import replace

import pytest
from clika_ref_conformance.cases import Outcome, Task
from clika_ref_conformance.levels import operators
from clika_ref_conformance.verdicts import Comparison, Verdict
from faulty_targets import PartialTarget
from sampled_operators import find_check, make_suite, shift
from torch import Tensor

from clika_ref.core.operators import operator
from clika_ref.core.registry import load_registry


def plan_checks(op, folder, dtype="float32", **changes):
    return operators.checks(Task("operators", op.name, dtype), make_suite(op, folder=folder, **changes))


def run_verdicts(found):
    return {check.name: check.run().verdict for check in found}


def test_operators_tasks_one_per_dtype(tmp_path):
    """An operator has a task for each dtype that it supports."""
    found = operators.tasks(make_suite(shift, folder=tmp_path, dtypes=("float16", "float32", "int64")))
    assert [task.dtype for task in found] == ["float16", "float32", "int64"]


@pytest.mark.slow_cases("float32")
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_operators_correct_lowering_passes_each_check(tmp_path, dtype):
    """A correct lowering passes every check."""
    found = run_verdicts(plan_checks(shift, tmp_path, dtype))
    assert {"cover-00", "layouts", "literal-dim-other-end", "empty-0", "drawn-01"} <= found.keys()
    assert set(found.values()) == {Verdict.PASS}


def test_operators_drawn_calls_packed_or_run_alone(tmp_path, monkeypatch):
    """Drawn calls are compiled together, or alone if the pack was not run."""
    together, alone = plan_checks(shift, tmp_path), plan_checks(shift, tmp_path)
    assert find_check(together, operators.DRAWN_PACK_CHECK).run().verdict is Verdict.PASS
    monkeypatch.setattr(operators, "run_case", lambda *_: pytest.fail("compiled by itself"))
    assert {c.run().verdict for c in together if c.name.startswith("drawn-0")} == {Verdict.PASS}
    with pytest.raises(pytest.fail.Exception, match="compiled by itself"):
        find_check(alone, "drawn-00").run()


def test_operators_unsupported_operator_passes_no_check(tmp_path):
    """No check of an unsupported operator passes."""
    rejecting = replace(make_suite(shift, folder=tmp_path), target=PartialTarget())
    found = run_verdicts(operators.checks(Task("operators", "shift", "float32"), rejecting))
    assert found[operators.DRAWN_PACK_CHECK] is Verdict.NOT_RUN
    assert set(found.values()) == {Verdict.NOT_RUN, Verdict.UNSUPPORTED}


def test_operators_plan_repeats(tmp_path):
    """The plan is the same each time."""
    assert [c.name for c in plan_checks(shift, tmp_path)] == [c.name for c in plan_checks(shift, tmp_path)]


def test_operators_ignored_attribute_fails_and_shrinks(tmp_path, monkeypatch):
    """An attribute that a lowering ignores fails and shrinks."""
    right = shift.lowering
    monkeypatch.setattr(shift, "lowering", lambda op, x, **attrs: right(op, x, **{**attrs, "twice": False}))
    outcomes = [check.run() for check in plan_checks(shift, tmp_path, drawn=30)]
    failed = [o for o in outcomes if o.verdict.is_failure]
    assert failed
    (small,) = [o for o in failed if o.case.graph.inputs[0].type.shape == (1,)][:1]
    (node,) = small.case.graph.nodes
    assert node.attrs == {"by": 1.0, "dim": 0, "twice": True}
    assert small.case.facts["call"] == "shift(float32[1], by=1.0, dim=0, twice=True)"
    (run,) = small.case.runs
    assert run.inputs[0].tolist() in ([0.0], [1.0])
    assert small.comparison.message.endswith(f"; the inputs are {run.inputs[0].item()} there")


def test_operators_further_dtypes_draw_fewer_calls(tmp_path):
    """Fewer calls are drawn in further dtypes."""
    names = {"drawn": 3, "drawn_further": 1, "dtypes": ("float32", "int64")}
    drawn = {d: [c.name for c in plan_checks(shift, tmp_path, d, **names)] for d in names["dtypes"]}
    assert {d: len([n for n in found if n.startswith("drawn-0")]) for d, found in drawn.items()} == {
        "float32": 3,
        "int64": 1,
    }


@operator()
def picky(x: Tensor, *, k: int = 1) -> Tensor:
    """``x``, where k is 1."""
    if k != 1:
        raise ValueError("k must be 1")
    return x.clone()


@picky.onnx
def _(op, x, *, k):
    return op.Identity(x)


@picky.types
def _(x, *, k):  # tests put other references in place, which fake tensors may not pass
    return x


def test_operators_sample_rejected_by_eager_blamed(tmp_path):
    """Samples that eager rejects are blamed, with the call."""
    picky.samples(lambda draw, s: s.call(draw(s.tensor(rank=1)), k=draw(s.choice(1, 2))))
    outcomes = [check.run() for check in plan_checks(picky, tmp_path) if check.name.startswith("cover")]
    assert {o.verdict for o in outcomes} == {Verdict.PASS, Verdict.SAMPLE}
    (message, *_) = [o.comparison.message for o in outcomes if o.verdict is Verdict.SAMPLE]
    assert message.startswith("the samples draw picky(float32[")
    assert "k=2), which eager rejects: ValueError: k must be 1" in message


def test_operators_sampler_error_blamed(tmp_path):
    """Samples that raise are blamed."""
    picky.samples(lambda draw, s: s.call(draw(s.tensor(rank=1)), k=1 // 0))
    (check,) = plan_checks(picky, tmp_path)
    outcome = check.run()
    assert outcome.verdict is Verdict.SAMPLE
    message = "the samples of picky raise ZeroDivisionError: integer division or modulo by zero; see contract/picky"
    assert outcome.comparison.message == message


def test_operators_dtype_without_eager_kernel_not_run(tmp_path, monkeypatch):
    """A dtype without an eager kernel is not run."""
    picky.samples(lambda draw, s: s.call(draw(s.tensor(rank=1))))

    def reject(x, **attrs):
        raise NotImplementedError("\"picky\" not implemented for 'Half'")

    monkeypatch.setattr(picky, "reference", reject)
    outcome = find_check(plan_checks(picky, tmp_path, "float16"), "cover-00").run()
    assert outcome.verdict is Verdict.NOT_RUN
    assert outcome.comparison.message.startswith("eager has no kernel for picky(float16[")


def test_operators_unlisted_dtype_error_not_run(tmp_path, monkeypatch):
    """An error in a dtype that samples do not list is not their fault."""
    picky.samples(lambda draw, s: s.call(draw(s.tensor(rank=1))))
    monkeypatch.setattr(picky, "reference", lambda x, **attrs: x.nothing)
    outcome = find_check(plan_checks(picky, tmp_path, "float16"), "cover-00").run()
    assert outcome.verdict is Verdict.NOT_RUN
    assert "a dtype that its samples do not list" in outcome.comparison.message


def test_operators_vectors_rejected_by_eager_dropped(tmp_path, monkeypatch):
    """Vectors that eager rejects are dropped."""
    picky.samples(lambda draw, s: s.call(draw(s.tensor(rank=1))))

    def clone_finite(x, **attrs):
        if not x.isfinite().all():
            raise ValueError("finite numbers only")
        return x.clone()

    monkeypatch.setattr(picky, "reference", clone_finite)
    outcome = find_check(plan_checks(picky, tmp_path), "cover-00").run()
    assert outcome.verdict is Verdict.PASS
    assert {"typical", "wide"} <= {run.name for run in outcome.case.runs}
    assert not any(run.name.startswith("nan") for run in outcome.case.runs)


def test_operators_single_row_has_all_special_positions(tmp_path):
    """The first row gets the remaining positions of special elements."""
    picky.samples(lambda draw, s: s.call(draw(s.tensor(shape=(2,)))))
    (row,) = [check for check in plan_checks(picky, tmp_path) if check.name.startswith("cover")]
    names = {run.name for run in row.run().case.runs}
    assert {"nan-first:x0", "nan-last:x0"} <= names


def test_operators_missing_output_type_fails_contract(tmp_path):
    """An output type that cannot be inferred fails the contract."""

    def reject(x, **attrs):
        raise ValueError("no rule")

    typeless = declare_sampled_by(lambda draw, s: s.call(draw(s.tensor(rank=1))))
    typeless.types(reject)
    outcome = find_check(plan_checks(typeless, tmp_path), "cover-00").run()
    assert outcome.verdict is Verdict.CONTRACT
    assert "cannot infer the output type: no rule" in outcome.comparison.message


def test_operators_too_few_drawn_calls_not_run(tmp_path, monkeypatch):
    """Planned draws without a call are reported as not run."""
    picky.samples(lambda draw, s: s.call(draw(s.tensor(rank=1))))
    monkeypatch.setattr(operators, "collect_without_mutations", lambda *args: [])
    outcome = find_check(plan_checks(picky, tmp_path), "drawn-00").run()
    assert (outcome.verdict, outcome.comparison.message) == (Verdict.NOT_RUN, "there are only 0 different calls")


def test_operators_without_samples_have_no_task(tmp_path):
    identity_op = declare_sampled_by(None)
    assert operators.tasks(make_suite(identity_op, folder=tmp_path)) == []


def declare_sampled_by(sampler):
    @operator()
    def identity_op(x: Tensor) -> Tensor:
        """``x``."""
        return x

    identity_op.sampler = sampler
    return identity_op


def test_operators_rows_and_draws_follow_profile(tmp_path):
    """The number of rows and draws follows the profile."""
    suite = make_suite(shift, folder=tmp_path)
    few = replace(suite, profile=replace(suite.profile, rows=2, drawn=1))
    names = [check.name for check in operators.checks(Task("operators", "shift", "float32"), few)]
    assert [n for n in names if n.startswith(("cover", "drawn"))] == [
        "cover-00",
        operators.COVER_PACK_CHECK,
        "cover-01",
        operators.DRAWN_PACK_CHECK,
        "drawn-00",
    ]


def test_operators_special_vectors_in_each_row(tmp_path, monkeypatch):
    """Special elements are in each row; the other vectors alternate."""
    cases = {}
    monkeypatch.setattr(operators, "run_case", lambda case, _: cases.setdefault(case.name, case) and DONE)
    for check in plan_checks(shift, tmp_path, rows=6):
        if check.name.startswith("cover-0"):
            check.run()
    names = [[run.name.partition(":")[0] for run in cases[f"shift-cover-0{i}"].runs] for i in range(6)]
    special = [sorted(n.rpartition("-")[0] for n in row if n.endswith(("-first", "-last"))) for row in names]
    assert special == [["inf", "minus-inf", "minus-zero", "nan"]] * 6
    others = [{n.partition("+")[0].partition("-")[0] for n in row[1:]} - {"nan", "inf", "minus"} for row in names]
    assert others[2] == others[3]
    assert others[2] | others[4] == others[0] > others[4] > others[2] & others[4] == {"around"}


DONE = Outcome("done", Comparison(Verdict.PASS))


def test_operators_reference_writing_operand_fails_contract(tmp_path, monkeypatch):
    """A reference that writes into its operand fails the contract."""
    picky.samples(lambda draw, s: s.call(draw(s.tensor(rank=1))))
    monkeypatch.setattr(picky, "reference", lambda x, **attrs: x.add_(1).clone())
    outcome = find_check(plan_checks(picky, tmp_path), "cover-00").run()
    assert outcome.verdict is Verdict.CONTRACT
    assert outcome.comparison.message.startswith("the reference writes into operand 0 of picky(float32[")


def test_operators_layout_rejected_by_eager_dropped(tmp_path, monkeypatch):
    """A layout that eager rejects is dropped."""
    picky.samples(lambda draw, s: s.call(draw(s.tensor(rank=2, size=(2, 3)))))
    monkeypatch.setattr(picky, "reference", lambda x, **attrs: x.view(-1).view(x.shape).clone())
    outcome = find_check(plan_checks(picky, tmp_path), "layouts").run()
    assert outcome.verdict is Verdict.PASS
    assert [run.name for run in outcome.case.runs] == ["typical", "offset"]


def test_operators_call_without_tensor_left_out(tmp_path):
    """A call that returns no tensor is left out of the plan."""
    unbind = load_registry().operators["unbind"]
    found = [check.run() for check in plan_checks(unbind, tmp_path) if check.name.startswith("empty")]
    assert all(o.verdict is Verdict.PASS for o in found), found
