"""L1: a right lowering passes on every row, a wrong one fails small, and whoever is at fault is blamed."""

from dataclasses import replace

import pytest
from clika_ref_conformance.cases import Outcome, Task
from clika_ref_conformance.levels import operators
from clika_ref_conformance.verdicts import Comparison, Verdict
from odd_targets import Beginner
from sampled_operators import named, shift, suite_of
from torch import Tensor

from clika_ref.core.operators import operator
from clika_ref.core.registry import load_registry


def checks(op, folder, dtype="float32", **changes):
    return operators.checks(Task("operators", op.name, dtype), suite_of(op, folder=folder, **changes))


def verdicts(found):
    return {check.name: check.run().verdict for check in found}


def test_every_operator_has_a_task_for_each_dtype_that_it_takes(tmp_path):
    found = operators.tasks(suite_of(shift, folder=tmp_path, dtypes=("float16", "float32", "int64")))
    assert [task.dtype for task in found] == ["float16", "float32", "int64"]


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_a_right_lowering_passes_every_check(tmp_path, dtype):
    found = verdicts(checks(shift, tmp_path, dtype))
    assert {"cover-00", "layouts", "literal-dim-other-end", "empty-0", "drawn-01"} <= found.keys()
    assert set(found.values()) == {Verdict.PASS}


def test_drawn_calls_are_compiled_together_and_by_themselves_where_the_pack_was_not_run(tmp_path, monkeypatch):
    together, alone = checks(shift, tmp_path), checks(shift, tmp_path)
    assert named(together, operators.DRAWN_PACK_CHECK).run().verdict is Verdict.PASS
    monkeypatch.setattr(operators, "run_case", lambda *_: pytest.fail("compiled by itself"))
    assert {c.run().verdict for c in together if c.name.startswith("drawn-0")} == {Verdict.PASS}
    with pytest.raises(pytest.fail.Exception, match="compiled by itself"):
        named(alone, "drawn-00").run()


def test_no_check_of_an_operator_that_a_target_refuses_passes(tmp_path):
    refused = replace(suite_of(shift, folder=tmp_path), target=Beginner())
    found = verdicts(operators.checks(Task("operators", "shift", "float32"), refused))
    assert found[operators.DRAWN_PACK_CHECK] is Verdict.NOT_RUN
    assert set(found.values()) == {Verdict.NOT_RUN, Verdict.UNSUPPORTED}


def test_the_plan_is_the_same_every_time(tmp_path):
    assert [c.name for c in checks(shift, tmp_path)] == [c.name for c in checks(shift, tmp_path)]


def test_an_attribute_that_a_lowering_ignores_fails_and_shrinks(tmp_path, monkeypatch):
    right = shift.lowering
    monkeypatch.setattr(shift, "lowering", lambda op, x, **attrs: right(op, x, **{**attrs, "twice": False}))
    outcomes = [check.run() for check in checks(shift, tmp_path, drawn=30)]
    failed = [o for o in outcomes if o.verdict.is_failure]
    assert failed
    (small,) = [o for o in failed if o.case.graph.inputs[0].type.shape == (1,)][:1]
    (node,) = small.case.graph.nodes
    assert node.attrs == {"by": 1.0, "dim": 0, "twice": True}
    assert small.case.facts["call"] == "shift(float32[1], by=1.0, dim=0, twice=True)"
    (run,) = small.case.runs
    assert run.inputs[0].tolist() in ([0.0], [1.0])
    assert small.comparison.message.endswith(f"; the inputs hold {run.inputs[0].item()} there")


def test_few_calls_are_drawn_in_further_dtypes(tmp_path):
    names = {"drawn": 3, "drawn_further": 1, "dtypes": ("float32", "int64")}
    drawn = {d: [c.name for c in checks(shift, tmp_path, d, **names)] for d in names["dtypes"]}
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


def test_samples_that_draw_what_eager_refuses_are_blamed_with_the_call(tmp_path):
    picky.samples(lambda draw, s: s.call(draw(s.tensor(rank=1)), k=draw(s.choice(1, 2))))
    outcomes = [check.run() for check in checks(picky, tmp_path) if check.name.startswith("cover")]
    assert {o.verdict for o in outcomes} == {Verdict.PASS, Verdict.SAMPLE}
    (message, *_) = [o.comparison.message for o in outcomes if o.verdict is Verdict.SAMPLE]
    assert message.startswith("the samples draw picky(float32[")
    assert "k=2), which eager refuses: ValueError: k must be 1" in message


def test_samples_that_raise_are_blamed(tmp_path):
    picky.samples(lambda draw, s: s.call(draw(s.tensor(rank=1)), k=1 // 0))
    (check,) = checks(picky, tmp_path)
    outcome = check.run()
    assert outcome.verdict is Verdict.SAMPLE
    message = "the samples of picky raise ZeroDivisionError: integer division or modulo by zero; see contract/picky"
    assert outcome.comparison.message == message


def test_a_dtype_for_which_eager_has_no_kernel_is_not_run(tmp_path, monkeypatch):
    picky.samples(lambda draw, s: s.call(draw(s.tensor(rank=1))))

    def refuse(x, **attrs):
        raise NotImplementedError("\"picky\" not implemented for 'Half'")

    monkeypatch.setattr(picky, "reference", refuse)
    outcome = named(checks(picky, tmp_path, "float16"), "cover-00").run()
    assert outcome.verdict is Verdict.NOT_RUN
    assert outcome.comparison.message.startswith("eager has no kernel for picky(float16[")


def test_a_dtype_that_samples_do_not_name_is_not_their_fault(tmp_path, monkeypatch):
    picky.samples(lambda draw, s: s.call(draw(s.tensor(rank=1))))
    monkeypatch.setattr(picky, "reference", lambda x, **attrs: x.nothing)
    outcome = named(checks(picky, tmp_path, "float16"), "cover-00").run()
    assert outcome.verdict is Verdict.NOT_RUN
    assert "a dtype that its samples do not name" in outcome.comparison.message


def test_vectors_that_eager_refuses_are_dropped(tmp_path, monkeypatch):
    picky.samples(lambda draw, s: s.call(draw(s.tensor(rank=1))))

    def finite(x, **attrs):
        if not x.isfinite().all():
            raise ValueError("finite numbers only")
        return x.clone()

    monkeypatch.setattr(picky, "reference", finite)
    outcome = named(checks(picky, tmp_path), "cover-00").run()
    assert outcome.verdict is Verdict.PASS
    assert {"typical", "wide"} <= {run.name for run in outcome.case.runs}
    assert not any(run.name.startswith("nan") for run in outcome.case.runs)


def test_the_first_row_takes_the_places_of_special_values_that_are_left(tmp_path):
    picky.samples(lambda draw, s: s.call(draw(s.tensor(shape=(2,)))))
    (row,) = [check for check in checks(picky, tmp_path) if check.name.startswith("cover")]
    names = {run.name for run in row.run().case.runs}
    assert {"nan-first:x0", "nan-last:x0"} <= names


def test_an_output_type_that_cannot_be_inferred_breaks_the_contract(tmp_path):
    def refuse(x, **attrs):
        raise ValueError("no rule")

    typeless = mute_with(lambda draw, s: s.call(draw(s.tensor(rank=1))))
    typeless.types(refuse)
    outcome = named(checks(typeless, tmp_path), "cover-00").run()
    assert outcome.verdict is Verdict.CONTRACT
    assert "cannot infer the output type: no rule" in outcome.comparison.message


def test_fewer_drawn_calls_than_planned_are_accounted_for(tmp_path, monkeypatch):
    picky.samples(lambda draw, s: s.call(draw(s.tensor(rank=1))))
    monkeypatch.setattr(operators, "collect_without_mutations", lambda *args: [])
    outcome = named(checks(picky, tmp_path), "drawn-00").run()
    assert (outcome.verdict, outcome.comparison.message) == (Verdict.NOT_RUN, "there are only 0 different calls")


def test_operators_without_samples_have_no_task(tmp_path):
    mute = mute_with(None)
    assert operators.tasks(suite_of(mute, folder=tmp_path)) == []


def mute_with(sampler):
    @operator()
    def mute(x: Tensor) -> Tensor:
        """``x``."""
        return x

    mute.sampler = sampler
    return mute


def test_vectors_and_rows_follow_the_profile(tmp_path):
    suite = suite_of(shift, folder=tmp_path)
    few = replace(suite, profile=replace(suite.profile, rows=2, drawn=1))
    names = [check.name for check in operators.checks(Task("operators", "shift", "float32"), few)]
    assert [n for n in names if n.startswith(("cover", "drawn"))] == [
        "cover-00",
        operators.COVER_PACK_CHECK,
        "cover-01",
        operators.DRAWN_PACK_CHECK,
        "drawn-00",
    ]


def test_special_values_come_with_every_row_and_other_vectors_with_every_other(tmp_path, monkeypatch):
    """Of one operand there are two places; each further round of two rows has half of the other vectors, in turn.

    Those near the number of the call come with every row.
    """
    cases = {}
    monkeypatch.setattr(operators, "run_case", lambda case, _: cases.setdefault(case.name, case) and DONE)
    for check in checks(shift, tmp_path, rows=6):
        if check.name.startswith("cover-0"):
            check.run()
    names = [[run.name.partition(":")[0] for run in cases[f"shift-cover-0{i}"].runs] for i in range(6)]
    special = [sorted(n.rpartition("-")[0] for n in row if n.endswith(("-first", "-last"))) for row in names]
    assert special == [["inf", "minus-inf", "minus-zero", "nan"]] * 6
    others = [{n.partition("+")[0].partition("-")[0] for n in row[1:]} - {"nan", "inf", "minus"} for row in names]
    assert others[2] == others[3]
    assert others[2] | others[4] == others[0] > others[4] > others[2] & others[4] == {"around"}


DONE = Outcome("done", Comparison(Verdict.PASS))


def test_a_reference_that_writes_into_its_operand_breaks_the_contract(tmp_path, monkeypatch):
    picky.samples(lambda draw, s: s.call(draw(s.tensor(rank=1))))
    monkeypatch.setattr(picky, "reference", lambda x, **attrs: x.add_(1).clone())
    outcome = named(checks(picky, tmp_path), "cover-00").run()
    assert outcome.verdict is Verdict.CONTRACT
    assert outcome.comparison.message.startswith("the reference writes into operand 0 of picky(float32[")


def test_a_layout_that_eager_refuses_is_dropped(tmp_path, monkeypatch):
    picky.samples(lambda draw, s: s.call(draw(s.tensor(rank=2, side=(2, 3)))))
    monkeypatch.setattr(picky, "reference", lambda x, **attrs: x.view(-1).view(x.shape).clone())
    outcome = named(checks(picky, tmp_path), "layouts").run()
    assert outcome.verdict is Verdict.PASS
    assert [run.name for run in outcome.case.runs] == ["typical", "offset"]


def test_a_call_that_returns_no_tensor_is_no_call_of_the_plan(tmp_path):
    unbind = load_registry().operators["unbind"]
    found = [check.run() for check in checks(unbind, tmp_path) if check.name.startswith("empty")]
    assert all(o.verdict is Verdict.PASS for o in found), found
