"""Cases in a dtype that the suite does not judge are skipped, with one sentence as the reason."""

from dataclasses import replace
from random import Random

import pytest
import torch
from broken_passes import Broken
from clika_ref_conformance.cases import Task
from clika_ref_conformance.drawing.calls.covering import draw_covering_calls
from clika_ref_conformance.drawing.eager_builder import EagerGraphBuilder
from clika_ref_conformance.drawing.generation import collect
from clika_ref_conformance.drawing.graphs.pairs import OperatorPairs
from clika_ref_conformance.drawing.graphs.random_graphs import make_graph_case_strategy
from clika_ref_conformance.drawing.motifs.call_generator import CallGenerator
from clika_ref_conformance.drawing.motifs.motif_search import Motifs, build_pass_motifs
from clika_ref_conformance.drawing.sampling import SampleError, draw_call, draw_call_of_any_dtype
from clika_ref_conformance.execution.check_runner import plan_checks, run_check
from clika_ref_conformance.judged_dtypes import JUDGED_DTYPES, check_judged_dtypes, is_judged
from clika_ref_conformance.levels import operators, passes
from clika_ref_conformance.profiles import ALL_DTYPES
from clika_ref_conformance.targets.identity import Identity
from clika_ref_conformance.verdicts import Reason, Verdict
from sampled_operators import make_suite
from torch import Tensor

from clika_ref.core.operators import operator
from clika_ref.core.registry import load_registry
from clika_ref.core.samples import Descriptions, random_draw
from clika_ref.core.types import TensorType

OPERATORS = load_registry().operators


def declare_scale(*dtypes):
    @operator()
    def scale(x: Tensor, *, k: int = 1) -> Tensor:
        """``k * x``."""
        return x * k

    scale.samples(lambda draw, s: s.call(draw(s.tensor(rank=(1, 2), dtype=dtypes)), k=draw(s.choice(1, 2))))
    return scale


def declare_branch():
    @operator()
    def branch(x: Tensor, *, k: int = 1) -> Tensor:
        """``k * x``."""
        return x * k

    @branch.samples
    def _(draw, s):
        dtype = torch.complex64 if draw(s.booleans()) else torch.float32
        return s.call(draw(s.tensor(rank=(1, 2), dtype=dtype)), k=draw(s.choice(1, 2)))

    return branch


def declare_dtype_change(dtype):
    @operator()
    def turn(x: Tensor, *, k: int = 1) -> Tensor:
        """``k * x`` in another dtype."""
        return (x * k).to(dtype)

    turn.samples(lambda draw, s: s.call(draw(s.tensor(rank=(1, 2))), k=draw(s.choice(1, 2))))
    return turn


def declare_dtype_argument():
    @operator()
    def ask(x: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """``x`` in a dtype."""
        return x.to(dtype)

    offered = (torch.complex64, torch.float32, torch.uint16)
    ask.samples(lambda draw, s: s.call(draw(s.tensor(rank=(1, 2))), dtype=draw(s.choice(*offered))))
    return ask


def make_suite_without_target(op, folder):
    return replace(make_suite(op, folder=folder, shape_profiles=14), target=Identity())


def run_checks(task, op, folder):
    return [run_check(check) for check in plan_checks(task, make_suite_without_target(op, folder))]


def messages_of(outcomes):
    return {o.comparison.message for o in outcomes if o.comparison.reason == Reason.UNJUDGED_DTYPE}


def test_judged_dtypes_equal_profile_dtypes_and_int16():
    """The dtypes of the profiles and int16 are judged, and no others."""
    assert {str(d).removeprefix("torch.") for d in JUDGED_DTYPES} == {*ALL_DTYPES, "int16"}
    assert not any(map(is_judged, (torch.complex64, torch.complex128, torch.float8_e5m2, torch.uint16)))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.uint32], ids=str)
@pytest.mark.parametrize("level", ["contract", "operators", "dynamic", "artifacts"])
def test_plan_checks_operator_of_unjudged_dtype_not_run(tmp_path, level, dtype):
    """An operator that takes only unjudged dtypes is not run."""
    op = declare_scale(dtype)
    found = run_checks(Task(level, "scale", str(dtype).removeprefix("torch.")), op, tmp_path)
    (message,) = messages_of(found)
    assert message == (
        f"scale takes or returns {str(dtype).removeprefix('torch.')}, which the suite does not judge. Let its samples "
        "draw calls with only float32, float16, bfloat16, float64, int8, uint8, int32, int64, bool, int16, or compare "
        "it with eager in your own test."
    )
    assert {o.verdict for o in found if o.name != "schema"} == {Verdict.NOT_RUN}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("level", ["contract", "operators", "dynamic", "artifacts"])
def test_plan_checks_unjudged_result_runs_declaration_only(tmp_path, level, dtype):
    """An operator that returns an unjudged dtype has only its declaration checked."""
    found = run_checks(Task(level, "turn", "float32"), declare_dtype_change(dtype), tmp_path)
    (message,) = messages_of(found)
    assert f"turn takes or returns {str(dtype).removeprefix('torch.')}, which the suite does not judge" in message
    passed = {o.name for o in found if o.verdict is Verdict.PASS}
    assert passed == ({"schema", "samples", "unsupported-reason"} if level == "contract" else set())
    assert {o.verdict for o in found if o.name not in passed} == {Verdict.NOT_RUN}


@pytest.mark.parametrize(
    "make", [lambda: declare_scale(torch.complex64, torch.float32), declare_branch], ids=["list", "branch"]
)
def test_plan_checks_mixed_dtypes_draws_judged_ones(tmp_path, make):
    """Of several dtypes, the judged ones are drawn."""
    op = make()
    (task,) = [t for t in operators.tasks(make_suite_without_target(op, tmp_path)) if t.dtype == "float32"]
    assert {o.verdict for o in run_checks(task, op, tmp_path)} == {Verdict.PASS}
    assert {o.verdict for o in run_checks(Task("dynamic", op.name, "float32"), op, tmp_path)} == {Verdict.PASS}
    found = {o.name: o.verdict for o in run_checks(Task("contract", op.name), op, tmp_path)}
    assert found["samples"] is found["sensitivity-k"] is Verdict.PASS


def test_draw_call_unjudged_dtype_loses_no_draw():
    """No draw is lost if a list contains a judged dtype."""
    op = declare_scale(torch.complex64, torch.int64, torch.float32)
    drawn = {draw_call(op, random_draw(Random(seed))).operands[0].dtype for seed in range(20)}
    assert drawn == {torch.int64, torch.float32}


def test_tasks_fixed_unjudged_dtype_named_in_plan(tmp_path):
    """The plan names the unjudged dtype and keeps its checks."""

    @operator()
    def mix(x: Tensor, y: Tensor) -> Tensor:
        """``x + y``."""
        return x + y

    mix.samples(lambda draw, s: s.call(draw(s.tensor(rank=1)), draw(s.tensor(rank=0, dtype=torch.complex64))))
    assert [t.dtype for t in operators.tasks(make_suite_without_target(mix, tmp_path))] == ["complex64"]
    assert [o.name for o in run_checks(Task("dynamic", "mix", "float32"), mix, tmp_path)] == ["sizes-0", "sizes-1"]


def test_dtype_attribute_draws_judged_choices(tmp_path):
    """A dtype attribute takes judged dtypes, and its samples are not blamed."""
    op = declare_dtype_argument()
    assert {row.call.attrs["dtype"] for row in draw_covering_calls(op, torch.float32, 0)} == {torch.float32}
    found = {o.name: o.verdict for o in run_checks(Task("contract", "ask"), op, tmp_path)}
    assert (found["samples"], found["sensitivity-dtype"]) == (Verdict.PASS, Verdict.NOT_RUN)
    assert {o.verdict for o in run_checks(Task("operators", "ask", "float32"), op, tmp_path)} == {Verdict.PASS}


@pytest.mark.parametrize(
    "op", [declare_scale(torch.complex64), declare_scale(torch.float8_e5m2), declare_dtype_change(torch.complex64)]
)
def test_generators_unjudged_operator_left_out(op):
    """Random graphs, motifs and pairs leave out unjudged operators."""
    known = [OPERATORS["neg"], OPERATORS["add"]]
    cases = collect(make_graph_case_strategy([op, *known]), 8, 0)
    assert all(check_judged_dtypes(case.graph) is None for case in cases)
    assert {node.op_type for case in cases for node in case.graph.nodes} == {"neg", "add"}
    growth = EagerGraphBuilder()
    assert CallGenerator(Random(0), growth).call(op) is None
    assert [rejected for rejected, _ in growth.rejected] == [op]
    assert not [*OperatorPairs(op, 0).make_cases(OPERATORS["neg"], fork=True)]
    assert not [*OperatorPairs(OPERATORS["neg"], 0).make_cases(op, fork=False)]


def test_check_motifs_unjudged_operator_of_pass_not_run(tmp_path):
    """A motif of a pass with an unjudged dtype is not run."""
    op = declare_dtype_change(torch.complex64)

    def build_dtype_change(build):
        return build(op, build.graph.add_input(TensorType(torch.float32, (2, 3)), "x"), k=1)

    class Bringing(Broken):
        motifs = (build_dtype_change,)

    trial = passes.PassChecks(Bringing(lambda *_: None, "bringing"), make_suite_without_target(op, tmp_path))
    trial.motifs = Motifs([*build_pass_motifs(trial.p, OPERATORS)])
    found = trial.check(trial.motifs.cases)
    assert (found.verdict, found.comparison.reason) == (Verdict.NOT_RUN, Reason.UNJUDGED_DTYPE)
    assert found.comparison.message.startswith("turn takes or returns complex64, ")


def test_draw_call_unknown_keyword_names_line_of_samples():
    """An unknown argument of a description names the line of the samples."""
    op = declare_scale(torch.float32)
    op.samples(lambda draw, s: s.call(draw(s.tensor(dtypes=torch.float32))))
    with pytest.raises(SampleError) as caught:
        draw_call(op, random_draw(Random(0)))
    assert "in test_judged_dtypes.py, line" in caught.value.details


def test_draw_call_bundled_operators_unchanged():
    """The calls of the bundled operators equal those without the dtype filter."""
    for op in OPERATORS.values():
        for seed in range(4 if op.sampler else 0):
            every = draw_call_of_any_dtype(op, random_draw(Random(seed)), Descriptions())
            here = draw_call(op, random_draw(Random(seed)))
            assert repr(every.attrs) == repr(here.attrs)
            assert repr(every.operands) == repr(here.operands)


def test_draw_call_other_result_raises_with_hint():
    """Samples that return no call raise with the fix."""

    @operator()
    def pairing(x: Tensor) -> Tensor:
        """``x``."""
        return x

    @pairing.samples
    def _(draw, s):
        return (draw(s.tensor()),)

    with pytest.raises(
        SampleError, match=r"the samples of pairing return \(.*\), not a call; end them with `return s\.call"
    ):
        draw_call_of_any_dtype(pairing, random_draw(Random(0)))
