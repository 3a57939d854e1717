"""Declared deviations: reading, rejection of invalid ones, and cases in which a target deviates as declared."""

import datetime as dt
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from clika_ref_conformance.cases import CaseRun, GraphCase, Task
from clika_ref_conformance.deviations import Declarations, Deviation, ExpectedFailure, is_expired, read_declarations
from clika_ref_conformance.execution.case_checks import run_case
from clika_ref_conformance.execution.check_runner import BROKEN_PLAN_CHECK
from clika_ref_conformance.execution.declaration_accounting import (
    apply_expected_failures,
    count_deviations,
    find_problems,
)
from clika_ref_conformance.execution.levels import LEVELS, find_scopes
from clika_ref_conformance.profiles import PROFILES
from clika_ref_conformance.record import CheckResult, RunRecord
from clika_ref_conformance.targets.loading import load_target
from clika_ref_conformance.verdicts import Comparison, Reason, Verdict, make_not_run
from faulty_targets import FaultyTarget
from small_cases import REGISTRY, make_case, make_suite

from clika_ref.core.errors import TargetError
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph
from clika_ref.core.types import TensorType

NAN, INF = torch.nan, torch.inf
SPECIAL = torch.tensor([[1.5, NAN, -2.0], [INF, -INF, 3.0]])
ALWAYS = {"reason": "it does", "link": "nowhere", "expires": "2999-01-01"}


def make_deviation(**changes):
    return Deviation(**{"id": "d", "operators": ("relu",), **ALWAYS, **changes})


def run_deviating_case(tmp_path, fault, *deviations, calls=(("relu", {}),), run="special", x=SPECIAL):
    case = replace(make_case(*calls, x=x), runs=[CaseRun(run, (x,))])
    return run_case(case, make_suite(tmp_path, fault, deviations=deviations))


def test_run_case_undeclared_difference_fails(tmp_path):
    """A declared difference is a deviation; an undeclared one fails."""
    declared = make_deviation(replace={"nan": "0"})
    outcome = run_deviating_case(tmp_path, "no-nan", declared)
    assert (outcome.verdict, outcome.deviations, outcome.applicable) == (Verdict.DEVIATION, ["d"], ["d"])
    assert outcome.comparison.message == "d: it does"
    for other in (
        make_deviation(replace={"inf": "max"}),
        make_deviation(replace={"nan": "inf"}),
        make_deviation(operators=("exp",), replace={"nan": "0"}),
        make_deviation(dtypes=("float64",), replace={"nan": "0"}),
        make_deviation(runs=("typical",), replace={"nan": "0"}),
        make_deviation(attributes={"dim": 1}, replace={"nan": "0"}),
        make_deviation(dynamic=True, replace={"nan": "0"}),
    ):
        assert run_deviating_case(tmp_path, "no-nan", other).verdict is Verdict.SPECIAL, other
    also = make_deviation(dtypes=("float32",), runs=("typ*", "spec*"), dynamic=False, replace={"nan": "0"})
    assert run_deviating_case(tmp_path, "no-nan", also).verdict is Verdict.DEVIATION


def test_run_case_deviation_propagates_through_nodes(tmp_path):
    """A deviation shows through the nodes that follow it."""
    calls = (("relu", {}), ("neg", {}), ("sum", {"dim": (1,), "keepdim": False}))
    declared = make_deviation(operators=("sum",), replace={"nan": "0"})
    assert run_deviating_case(tmp_path, "no-nan", calls=calls).verdict is Verdict.SPECIAL
    assert run_deviating_case(tmp_path, "no-nan", declared, calls=calls).verdict is Verdict.DEVIATION


def test_run_case_deviation_without_effect_not_applicable(tmp_path):
    """A deviation that would not show is not applicable."""
    outcome = run_deviating_case(tmp_path, "", make_deviation(replace={"nan": "0"}), x=torch.ones(3))
    assert (outcome.verdict, outcome.applicable) == (Verdict.PASS, [])


def test_run_case_deviation_of_integers_not_applicable(tmp_path):
    """Integers have no special values to replace."""
    outcome = run_deviating_case(tmp_path, "", make_deviation(replace={"-inf": "-max"}), x=torch.tensor([1, -2]))
    assert (outcome.verdict, outcome.applicable) == (Verdict.PASS, [])


def test_run_case_fixed_deviation_only_applicable(tmp_path):
    """A deviation that no longer occurs is applicable, and did not occur."""
    outcome = run_deviating_case(tmp_path, "", make_deviation(replace={"nan": "0"}))
    assert (outcome.verdict, outcome.deviations, outcome.applicable) == (Verdict.PASS, [], ["d"])


def test_run_case_free_elements_excuse_no_others(tmp_path):
    """Elements declared free may have any result; no others may."""
    free = make_deviation(free=("nan", "inf", "-inf"))
    assert run_deviating_case(tmp_path, "no-nan", free).verdict is Verdict.DEVIATION
    assert run_deviating_case(tmp_path, "no-inf", free).verdict is Verdict.DEVIATION
    assert run_deviating_case(tmp_path, "no-inf", make_deviation(free=("nan",))).verdict is Verdict.SPECIAL
    assert run_deviating_case(tmp_path, "sevens", free).verdict is Verdict.VALUE
    calls = (("relu", {}), ("sum", {"dim": (1,), "keepdim": False}))
    x = torch.tensor([[1.0, NAN], [1.0, 2.0]])
    assert run_deviating_case(tmp_path, "no-nan", free, calls=calls, x=x).verdict is Verdict.DEVIATION
    assert (
        run_deviating_case(tmp_path, "value", free, calls=calls, x=x).verdict is Verdict.VALUE
    )  # the second row is not free


def test_run_case_free_maximum_frees_its_index(tmp_path):
    """An index is free if its maximum is free."""
    graph = Graph("pool")
    x = graph.add_input(TensorType(torch.float32, (1, 1, 4)), "x")
    pool = REGISTRY.operators["adaptive_max_pool1d"]
    for value in Builder(graph, REGISTRY.operators)(pool, x, output_size=(2,)):
        graph.add_output(value)
    case = GraphCase("pool", graph, [CaseRun("nan", (torch.tensor([[[1.0, NAN, 2.0, 3.0]]]),))])
    free = make_deviation(operators=(pool.name,), free=("nan",))
    for fault, verdict in (("first-index-wrong", Verdict.DEVIATION), ("last-index-wrong", Verdict.SPECIAL)):
        assert run_case(case, make_suite(tmp_path, fault, deviations=(free,))).verdict is verdict


def test_run_case_free_special_operand_frees_all_outputs(tmp_path):
    """If so declared, a special value in an operand makes all outputs free."""
    calls = (("argmax", {"dim": None, "keepdim": False}),)
    free = make_deviation(operators=("argmax",), free=("operand-nan",))
    x = torch.tensor([1.0, NAN, 3.0])
    assert run_deviating_case(tmp_path, "value", free, calls=calls, x=x).verdict is Verdict.DEVIATION
    assert run_deviating_case(tmp_path, "value", free, calls=calls, x=x.nan_to_num()).verdict is Verdict.VALUE
    other = make_deviation(operators=("argmax",), free=("operand-inf",))
    assert run_deviating_case(tmp_path, "value", other, calls=calls, x=x).verdict is Verdict.VALUE


def test_run_case_several_deviations_combine(tmp_path):
    """Several deviations may occur together."""
    x = torch.tensor([NAN, INF, 1.0])
    nan, inf = make_deviation(id="nan", replace={"nan": "0"}), make_deviation(id="inf", replace={"inf": "7"}, free=())
    inf = replace(inf, replace={"inf": "max"})
    assert run_deviating_case(tmp_path, "no-nan", nan, inf, x=x).deviations == ["nan"]
    both = [replace(nan, operators=("relu",)), replace(inf, operators=("relu",))]
    outcome = run_deviating_case(tmp_path, "finite", *both, x=x)
    assert (outcome.verdict, outcome.deviations) == (Verdict.DEVIATION, ["inf", "nan"])


def test_run_case_replica_computes_expected_result(tmp_path):
    """A replica computes the expected result of a deviation."""
    outcome = run_deviating_case(tmp_path, "sevens", make_deviation(replica="faulty_targets:fill_with_sevens"))
    assert outcome.verdict is Verdict.DEVIATION
    assert (
        run_deviating_case(tmp_path, "value", make_deviation(replica="faulty_targets:fill_with_sevens")).verdict
        is not Verdict.DEVIATION
    )


@pytest.mark.parametrize("fault", ["compile-raises", "load-raises", "run-raises"])
def test_run_case_error_deviation_matches_text(tmp_path, fault):
    """A deviation may declare an error by its text."""
    words = {"compile-raises": "no such k.rnel", "load-raises": "damaged", "run-raises": "illegal"}[fault]
    outcome = run_deviating_case(tmp_path, fault, make_deviation(error=words))
    assert (outcome.verdict, outcome.deviations, outcome.applicable) == (Verdict.DEVIATION, ["d"], ["d"])
    assert run_deviating_case(tmp_path, fault, make_deviation(error="other words")).verdict.is_failure
    assert run_deviating_case(tmp_path, "", make_deviation(error=words)).applicable == ["d"]


GOOD = """
[[deviation]]
id = "relu-nan"
operators = ["relu"]
replace = { nan = "0" }
runs = ["nan-*"]
reason = "NaN is lost"
link = "https://example.org/1"
expires = "2999-01-01"

[[deviation]]
id = "of-another"
operators = ["relu"]
targets = ["onnxruntime"]
error = "x"
reason = "r"
link = "l"
expires = "onnxruntime>=99"

[[xfail]]
task = "operators/sort/*"
reason = "r"
link = "l"
expires = "2999-01-01"
"""


def read_declarations_of(tmp_path, text):
    path = tmp_path / "deviations.toml"
    path.write_text(text, encoding="utf-8")
    return read_declarations(FaultyTarget(deviations=str(path)), REGISTRY)


def test_read_declarations_reads_entries_of_target(tmp_path):
    """The entries of the target are read; without a file there are none."""
    found = read_declarations_of(tmp_path, GOOD)
    assert [d.id for d in found.deviations] == ["relu-nan"]  # the other is for another target
    assert found.deviations[0].runs == ("nan-*",)
    assert [x.task for x in found.xfails] == ["operators/sort/*"]
    assert read_declarations(FaultyTarget(), REGISTRY) == Declarations()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('id = "relu-nan"', 'id = "relu-nan', r"cannot read the declarations in .*deviations\.toml"),
        ('id = "relu-nan"', "", r"an entry without id: id is missing"),
        (
            'operators = ["relu"]\nreplace',
            'operators = ["rellu"]\nreplace',
            r"no plugin declares the operator 'rellu'; did you mean relu",
        ),
        ('replace = { nan = "0" }', "", r"relu-nan: an entry needs one of replace, free, replica, error, and has none"),
        ('replace = { nan = "0" }', 'replace = { nan = "0" }\nerror = "x"', "and has replace and error"),
        ('{ nan = "0" }', '{ NaN = "0" }', r"unknown kind of element 'NaN'. Use one of nan, inf"),
        ('{ nan = "0" }', '{ nan = "zero" }', r"unknown replacement 'zero'. Use one of nan, inf"),
        ('runs = ["nan-*"]', 'runs = "nan-*"', r"relu-nan: runs = 'nan-\*' must be an array of strings$"),
        ('runs = ["nan-*"]', "runs = [1]", r"relu-nan: runs = \[1\] must be an array of strings$"),
        ('{ nan = "0" }', '"nan"', r"relu-nan: replace = 'nan' must be a table$"),
        ('runs = ["nan-*"]', 'dynamic = "no"', r"relu-nan: dynamic = 'no' must be true or false$"),
        ('task = "operators/sort/*"', 'task = ["a"]', r"\['a'\]: task = \['a'\] must be a string$"),
        ('runs = ["nan-*"]', 'run = ["nan-*"]', r"relu-nan: unknown key 'run'; did you mean runs"),
        ('link = "https://example.org/1"', "", r"relu-nan: link is missing"),
        ('"2999-01-01"\n\n[[dev', '"soon"\n\n[[dev', r"relu-nan: expires = 'soon' is neither a date"),
        ('id = "of-another"', 'id = "relu-nan"', r"relu-nan: several entries have this id"),
        ('id = "of-another"', 'id = ["relu-nan"]', r"id = \['relu-nan'\] must be a string$"),
        ('error = "x"', 'error = "("', r"of-another: error = '\(' is not a regular expression"),
        ('error = "x"', 'replica = "module.function"', r"replica = 'module\.function' is not of the form"),
        ('error = "x"', 'replica = "nowhere:sevens"', r"of-another: replica = 'nowhere:sevens' cannot be imported"),
        ('error = "x"', 'replica = "faulty_targets:__name__"', r"is 'faulty_targets', which is not callable"),
        (
            'error = "x"',
            'replica = "faulty_targets:eights"',
            r"'faulty_targets:eights' cannot be imported: AttributeError",
        ),
        ('runs = ["nan-*"]', 'dtypes = ["float23"]', r"relu-nan: there is no dtype 'float23'; did you mean float32"),
        ('runs = ["nan-*"]', "attributes = { dimm = 1 }", r"relu-nan: relu has no attribute 'dimm'"),
        ('runs = ["nan-*"]', 'targets = ["identiti"]', r"relu-nan: there is no target 'identiti'"),
        ("[[xfail]]", "[[xfial]]", r"unknown key 'xfial'; did you mean xfail"),
        (
            "[[xfail]]",
            "[xfail]",
            r"xfail is a single table, not an array of tables. Begin each entry with \[\[xfail\]\]",
        ),
        (
            GOOD,
            'deviation = ["a", 3]',
            r"deviation is \['a', 3\], not an array of tables. Begin each entry with \[\[deviation\]\]",
        ),
    ],
)
def test_read_declarations_invalid_file_raises(tmp_path, old, new, message):
    """An invalid file raises TargetError."""
    assert old in GOOD
    with pytest.raises(TargetError, match=re.compile(message, re.DOTALL)):
        read_declarations_of(tmp_path, GOOD.replace(old, new, 1))


def test_read_declarations_finds_file_next_to_loaded_module(tmp_path, monkeypatch):
    """The file is next to the module that the target was loaded from."""
    (tmp_path / "borrowing.py").write_text("from faulty_targets import FaultyTarget\nTARGET = FaultyTarget()\n")
    (tmp_path / "deviations.toml").write_text(GOOD, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    given = "borrowing:TARGET"
    assert [d.id for d in read_declarations(load_target(given, REGISTRY), REGISTRY, given).deviations] == ["relu-nan"]


def test_read_declarations_missing_file_raises(tmp_path):
    """A declared file must exist."""
    with pytest.raises(TargetError, match=r"cannot read the declarations in .*nowhere\.toml: "):
        read_declarations(FaultyTarget(deviations=str(tmp_path / "nowhere.toml")), REGISTRY)


@pytest.mark.slow
def test_find_scopes_unknown_task_raises(tmp_path):
    """An xfail of an unknown task raises; one of another profile is known."""
    suite = make_suite(tmp_path, "")
    entries = [
        make_expected_failure(task="operators/relu66/float32"),
        make_expected_failure(task="nothing/*"),
        make_expected_failure(task="operators/relu/*"),
    ]
    said = (
        r"matches no task of any level and profile: 'operators/relu66/float32' \(did you mean '\S+'\?\), 'nothing/\*'$"
    )
    with pytest.raises(TargetError, match=said):
        find_scopes(entries, suite, LEVELS)
    relu, half, late = (
        *entries[2:],
        make_expected_failure(task="operators/abs/float16"),
        make_expected_failure(task="graphs/graphs-399"),
    )
    scopes = find_scopes([relu, half, late], suite, LEVELS)  # quick has neither float16 nor so many graphs
    assert {task.dtype for task in scopes[relu]} > {"float32", "float16"}
    assert scopes[half] == {Task("operators", "abs", "float16")}
    assert Task("graphs", "graphs-399") in scopes[late]


def test_find_scopes_no_xfails_imports_no_level(tmp_path):
    """Without expected failures, no tasks are listed."""
    assert find_scopes([], make_suite(tmp_path, ""), {"nothing": "there.is.no.such.module"}) == {}


@pytest.mark.slow_cases("0")
@pytest.mark.parametrize("seed", range(4))
def test_find_scopes_artifact_xfail_known_for_any_seed(tmp_path, seed):
    """An xfail of an artifact is known for each seed."""
    suite = make_suite(tmp_path, "")
    suite = replace(suite, profile=replace(suite.profile, seed=seed))
    find_scopes(
        [make_expected_failure(task="artifacts/abs"), make_expected_failure(task="artifacts/softmax")], suite, LEVELS
    )


def test_is_expired_accepts_date_or_version():
    """Expiry is a date or a version."""
    assert is_expired("2026-01-31", dt.date(2026, 2, 1))
    assert not is_expired("2026-01-31", dt.date(2026, 1, 31))
    assert is_expired("torch>=1.0")
    assert not is_expired("torch>=99")
    assert not is_expired("a-distribution-that-nobody-installs>=1")


TASK = Task("operators", "relu", "float32")


def record_of(results, declarations):
    plan = {TASK: tuple(r.name for r in results)}
    return RunRecord(
        "faulty", "quick", 0, {}, plan, results, deviations=count_deviations(declarations.deviations, results)
    )


def find_problems_of(declarations, *results, is_full=False, profile="quick", scopes=None):
    record = record_of(results, declarations)
    return find_problems(record, declarations, scopes or {}, PROFILES[profile], is_full=is_full)


def make_passed_result(name="first", **changes):
    return CheckResult(TASK, name, Comparison(Verdict.PASS), **changes)


def test_find_problems_unseen_deviation_in_full_run_only():
    """Only a full run reports a deviation that was applicable and never occurred."""
    declared = Declarations((make_deviation(replace={"nan": "0"}),))
    seen = make_passed_result(deviations=("d",), applicable=("d",))
    assert find_problems_of(declared, make_passed_result("second", applicable=("d",)), seen, is_full=True) == []
    unseen = make_passed_result(applicable=("d",)), make_passed_result("second", applicable=("d",))
    (problem,) = find_problems_of(declared, *unseen, is_full=True)
    assert "xpass: the deviation d occurred in none of 2 applicable checks" in problem
    assert find_problems_of(declared, *unseen) == []


def test_find_problems_unmatched_deviation_in_full_run_only():
    """Only a full run that could match a deviation reports that it matches nothing."""
    declared = Declarations((make_deviation(replace={"nan": "0"}),))
    assert find_problems_of(declared, make_passed_result(), is_full=True) == [
        "the deviation d matches no check of the plan. Correct its conditions, or remove it."
    ]
    half = Declarations((make_deviation(dtypes=("float16",), replace={"nan": "0"}),))
    assert find_problems_of(half, make_passed_result(), is_full=True) == []  # the profile has no float16
    never = Declarations((make_deviation(dtypes=("complex64",), replace={"nan": "0"}),))
    (problem,) = find_problems_of(never, make_passed_result(), is_full=True)  # no profile has it
    assert "matches no check of the plan" in problem


def test_find_problems_expired_entries_reported():
    """Expired entries are problems."""
    declared = Declarations(
        (make_deviation(error="x", expires="2020-01-01"),), (make_expected_failure(expires="2020-01-01"),)
    )
    assert [p.split(" expired")[0] for p in find_problems_of(declared, make_passed_result())] == [
        "d",
        "xfail operators/relu/* *",
    ]


def make_expected_failure(**changes):
    return ExpectedFailure(**{"task": "operators/relu/*", **ALWAYS, **changes})


def test_apply_expected_failures_passing_check_reports_xpass():
    """Expected failures are reported as xfail, and as xpass if they pass."""
    failed = CheckResult(TASK, "second", Comparison(Verdict.VALUE, "off by 3"))
    entry = make_expected_failure()
    here, more = {entry: frozenset({TASK})}, {entry: frozenset({TASK, Task("operators", "relu", "float16")})}
    found = apply_expected_failures([make_passed_result(), failed], here)
    assert [r.verdict for r in found] == [Verdict.PASS, Verdict.XFAIL]
    assert "off by 3" in found[1].comparison.message
    (found,) = apply_expected_failures([make_passed_result()], here)
    assert found.verdict is Verdict.XPASS
    assert "expected to fail (it does, nowhere), but passes" in found.comparison.message
    assert apply_expected_failures([make_passed_result()], more) == [
        make_passed_result()
    ]  # it may fail in what was not run
    assert apply_expected_failures([failed], {make_expected_failure(check="first"): frozenset({TASK})}) == [failed]


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("profile", ["quick", "ci", "nightly"])
def test_find_problems_unmatched_xfail_in_nightly_only(is_full, profile):
    """Only the nightly profile reports an xfail that matches no check."""
    third, other = (
        make_expected_failure(check="third"),
        make_expected_failure(task="operators/*/float16", check="third"),
    )
    scopes = {third: frozenset({TASK}), other: frozenset({TASK, replace(TASK, dtype="float16")})}
    declared = Declarations((), (third, other))
    expected = ["xfail operators/relu/* third matches no check of the plan. Correct its patterns, or remove it."]
    found = find_problems_of(declared, make_passed_result(), is_full=is_full, profile=profile, scopes=scopes)
    assert found == (expected if profile == "nightly" else [])  # others may lack the check, and this run lacks a task


def test_apply_expected_failures_other_draw_or_left_out_kept():
    """Numbered draws and checks left out are no reason to remove an xfail."""
    scope = frozenset({TASK})
    assert apply_expected_failures(
        [make_passed_result("drawn-03")], {make_expected_failure(check="drawn-57"): scope}
    ) == [make_passed_result("drawn-03")]
    left = CheckResult(TASK, "second", make_not_run(Reason.ENOUGH_FAILURES, "after 5 failures of one kind"))
    assert apply_expected_failures([make_passed_result(), left], {make_expected_failure(): scope}) == [
        make_passed_result(),
        left,
    ]
    found = apply_expected_failures([make_passed_result(), left], {make_expected_failure(check="first"): scope})
    assert [r.verdict for r in found] == [Verdict.XPASS, Verdict.NOT_RUN]


@pytest.mark.parametrize(
    "undone",
    [
        CheckResult(TASK, "second", make_not_run(Reason.ABANDONED, "the run was interrupted")),
        CheckResult(TASK, BROKEN_PLAN_CHECK, Comparison(Verdict.HANG, "while the task was planned")),
    ],
)
def test_apply_expected_failures_unfinished_task_unchanged(undone):
    """An unfinished task proves nothing about an expected failure."""
    entry = make_expected_failure(check="first")
    assert apply_expected_failures([make_passed_result(), undone], {entry: frozenset({TASK})}) == [
        make_passed_result(),
        undone,
    ]
    third = make_expected_failure(check="third")
    assert (
        find_problems_of(Declarations((), (third,)), undone, profile="nightly", scopes={third: frozenset({TASK})}) == []
    )


@pytest.mark.parametrize(
    ("pattern", "name", "is_meant"),
    [
        ("drawn-17", "drawn-03", True),
        ("drawn-17", "drawn-117", True),
        ("drawn-17", "cover-17", False),
        ("*-17", "drawn-03", True),
        ("drawn-1*", "drawn-03", False),
        ("drawn-1?", "drawn-03", False),
        ("cover-0[0-4]", "cover-03", True),
        ("cover-0[0-4]", "cover-05", False),
        ("graph-03, passes", "graph-11, passes", True),
        ("graph-03", "graph-03, passes", False),
        ("relu->conv2d", "relu->conv3d", False),
        ("literal-x0-float", "literal-x1-float", False),
        ("int4-7", "int4-16", False),
    ],
)
def test_expected_failure_draw_number_matches_any_number(pattern, name, is_meant):
    """Numbers that count draws match any number; other numbers match themselves."""
    assert make_expected_failure(check=pattern).concerns(TASK, name) is is_meant


def test_expected_failure_task_number_matches_itself():
    """Numbered tasks match only their own number."""
    assert not make_expected_failure(task="graphs/graphs-012").matches_task(Task("graphs", "graphs-013"))


def test_read_declarations_bundled_files_valid():
    """The declarations of the bundled targets are valid."""
    for target in REGISTRY.targets.values():
        found = read_declarations(target, REGISTRY)
        assert all(len(d.reason) > 10 for d in found.deviations)
    assert (Path(__file__).parents[2] / "plugins/onnxruntime/clika_ref_onnxruntime/deviations.toml").exists()
