"""A run: a check that ends its worker loses only its own result, and all counts add up."""

import fcntl
import math
import os
import re
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
from clika_ref_conformance.cases import Task
from clika_ref_conformance.deviations import Declarations, Deviation, ExpectedFailure
from clika_ref_conformance.execution import run
from clika_ref_conformance.execution.declaration_accounting import find_inconclusive_reasons
from clika_ref_conformance.execution.run import RunRequest, execute_plan, plan_run, start_execution
from clika_ref_conformance.execution.worker_process import compute_wait_seconds
from clika_ref_conformance.profiles import select_profile
from clika_ref_conformance.record import CheckResult, RunRecord
from clika_ref_conformance.verdicts import Comparison, Verdict

from clika_ref.core.errors import ClikaError


def make_request(*subjects, **changes):
    profile = replace(select_profile("quick"), case_seconds=changes.pop("case_seconds", 60.0), shrink_seconds=0.0)
    return RunRequest("identity", profile, subjects, workers=1, available_levels={"faulty": "faulty_level"}, **changes)


def read_verdicts(record, subject):
    return [(r.name, r.verdict) for r in record.results if r.task.subject == subject]


AROUND = {
    "exit": Verdict.CRASH,
    "segfault": Verdict.CRASH,
    "kills-itself": Verdict.CRASH,
    "memory": Verdict.MEMORY,
    "raise": Verdict.CONTRACT,
    "interrupts": Verdict.CONTRACT,
    "leaves": Verdict.CONTRACT,
    "flush": Verdict.CONTRACT,
    "dtype": Verdict.CONTRACT,
    "print": Verdict.PASS,
    "reserves": Verdict.PASS,
}


@pytest.mark.slow
def test_execute_plan_fatal_check_costs_itself_only():
    """A check that ends or disturbs its worker affects no other check."""
    record = execute_plan(plan_run(make_request("fine", "plan-", *AROUND)))
    assert record.part.startswith("-k fine -k plan- -k exit ")
    for subject, verdict in AROUND.items():
        expected = [("first", Verdict.PASS), ("middle", verdict), ("last", Verdict.PASS)]
        assert read_verdicts(record, subject) == expected, [r.comparison.message for r in record.failures]
    messages = {r.task.subject: r.comparison.message for r in record.results if r.name in ("middle", "plan")}
    assert "exit status 3" in messages["exit"]
    assert "SIGSEGV" in messages["segfault"]
    assert "somebody killed it" in messages["kills-itself"]
    assert "die_of_segfault" in messages["segfault"]  # the traceback of faulthandler
    assert "a check that raises" in messages["raise"]
    assert messages["interrupts"].endswith("KeyboardInterrupt")
    assert messages["leaves"].endswith("SystemExit")
    assert "flush-to-zero" in messages["flush"]
    assert "set another default dtype and switched on flush-to-zero" in messages["dtype"]
    assert read_verdicts(record, "plan-raises") == [("plan", Verdict.CONTRACT)]
    assert "the sampler is broken" in messages["plan-raises"]
    assert read_verdicts(record, "plan-interrupts") == [("plan", Verdict.CONTRACT)]
    assert messages["plan-interrupts"].endswith("KeyboardInterrupt")
    assert read_verdicts(record, "plan-dies") == [("plan", Verdict.CRASH)]
    assert record.planned == len(record.results) == 3 * (len(AROUND) + 1) + 3
    assert not record.find_accounting_errors()
    assert record.exit_code == 1
    assert record.environment["torch"]


@pytest.mark.slow
def test_execute_plan_repeated_failures_skip_rest_of_task():
    """After failures of one type, the rest of a task is not run."""
    request = make_request("fails-always", "dies-always")
    record = execute_plan(plan_run(replace(request, profile=replace(request.profile, most_failures=2))))
    for subject, verdict in {"fails-always": Verdict.VALUE, "dies-always": Verdict.CRASH}.items():
        assert [v for _, v in read_verdicts(record, subject)] == [verdict] * 2 + [Verdict.NOT_RUN] * 2
        reasons = {
            r.comparison.message for r in record.results if r.task.subject == subject and not r.verdict.is_failure
        }
        assert reasons == {f"skipped after 2 failures of the task with {verdict}"}
    assert not record.find_accounting_errors()


@pytest.mark.slow
def test_execute_plan_hanging_check_killed_with_notices(monkeypatch):
    """A check that hangs is killed, and notices arrive meanwhile."""
    monkeypatch.setattr(run, "PROGRESS_INTERVAL_S", 0.1)
    notices = []
    record = execute_plan(plan_run(make_request("hang", case_seconds=2.0)), lambda result, _: notices.append(result))
    assert notices.count(None) > 5
    assert read_verdicts(record, "hang") == [("first", Verdict.PASS), ("middle", Verdict.HANG), ("last", Verdict.PASS)]
    assert re.match(
        r"no result within \d+ s \(--case-seconds, .*; the worker was killed", record.failures[0].comparison.message
    )


@pytest.mark.slow
def test_execute_plan_killed_worker_costs_nothing():
    """A worker killed from outside costs no result."""
    killed = []

    def notice(result, run):
        if result is not None and not killed:
            killed.append(run.workers[0].process.pid)
            os.kill(killed[0], signal.SIGKILL)

    record = execute_plan(plan_run(make_request("fine", "print")), notice)
    assert killed
    assert not record.find_accounting_errors()
    assert not record.failures, "what it was running is run again"
    assert record.planned == len(record.results) == 6


@pytest.mark.slow
def test_execute_plan_killed_planner_costs_nothing():
    """A worker killed while it plans costs no result."""
    record = execute_plan(plan_run(make_request("planned-twice")))
    assert [v for _, v in read_verdicts(record, "planned-twice")] == [Verdict.PASS] * 3
    assert record.exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("subject", "verdict"),
    [("helper-left", Verdict.PASS), ("helper-stuck", Verdict.HANG), ("helper-orphaned", Verdict.CRASH)],
)
def test_execute_plan_child_processes_end_with_worker(subject, verdict, monkeypatch, tmp_path):
    """Processes that a target starts end with the worker and cause no delay."""
    monkeypatch.setenv("MARKS_FOLDER", str(tmp_path))
    record = execute_plan(plan_run(make_request(subject, case_seconds=3.0)))
    expected = [("first", Verdict.PASS), ("middle", verdict), ("last", Verdict.PASS)]
    assert read_verdicts(record, subject) == expected
    with (tmp_path / "lock").open() as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)  # until all that hold it are gone
    assert not (tmp_path / "lived").exists(), "it ended by itself"


def test_seconds_to_wait_overdue_worker_uses_default():
    """An overdue worker causes no busy loop."""
    late, due = (SimpleNamespace(deadline=0.0, overdue=overdue) for overdue in (True, False))
    assert compute_wait_seconds([late], 5.0) == 5.0
    assert compute_wait_seconds([late, due], 5.0) == 0.0
    assert compute_wait_seconds([late, SimpleNamespace(deadline=math.inf, overdue=False)], 5.0) == 5.0


@pytest.mark.slow
def test_execute_plan_returning_fork_has_no_effect():
    """A fork that returns into the worker reports nothing."""
    record = execute_plan(plan_run(make_request("doubles", case_seconds=5.0)))
    assert {v for _, v in read_verdicts(record, "doubles")} == {Verdict.PASS}
    assert (record.problems, record.exit_code) == ((), 0)


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "verdict"), [(2**29, Verdict.MEMORY), (2**30, Verdict.PASS), (0, Verdict.PASS)])
def test_execute_plan_memory_limit_set_by_user(limit, verdict):
    """A worker may use the memory that the user allows."""
    request = make_request("roomy")  # half a gibibyte
    record = execute_plan(plan_run(replace(request, profile=replace(request.profile, memory_bytes=limit))))
    assert [v for _, v in read_verdicts(record, "roomy")] == [Verdict.PASS, verdict, Verdict.PASS]
    assert record.environment["limits"] == f"60 s, {limit / 2**30:g} GiB"


@pytest.mark.slow
def test_execute_plan_leaked_memory_costs_no_other_check():
    """Memory that is not released costs no other check and no other task."""
    record = execute_plan(plan_run(make_request("hoards", "roomy")))
    expected = [("first", Verdict.MEMORY), ("middle", Verdict.PASS), ("last", Verdict.MEMORY)]
    assert read_verdicts(record, "hoards") == expected
    assert [v for _, v in read_verdicts(record, "roomy")] == [Verdict.PASS] * 3
    assert not record.find_accounting_errors()


@pytest.mark.slow
def test_execute_plan_unstable_plan_reported():
    """A plan that differs between processes is reported and not run."""
    record = execute_plan(plan_run(make_request("unsure")))
    assert [v for _, v in read_verdicts(record, "unsure")] == [Verdict.PASS, Verdict.CRASH, Verdict.NOT_RUN]
    assert record.problems == ("faulty/unsure is planned differently in different processes",)
    assert not record.find_accounting_errors()
    assert record.exit_code == 1


@pytest.mark.slow
def test_execute_plan_interrupted_rest_not_run():
    """The unfinished part of an interrupted run is not run."""
    interrupts = iter([KeyboardInterrupt()])

    def notice(result, run):
        if result is not None:  # nor is it the silence in which workers start
            for interrupt in interrupts:
                raise interrupt

    record = execute_plan(plan_run(make_request("fine", "print")), notice)
    assert not record.find_accounting_errors()
    not_run = [r for r in record.results if r.verdict is Verdict.NOT_RUN]
    assert not_run
    assert {r.comparison.message for r in not_run} == {"the run was interrupted"}
    assert record.counts[Verdict.PASS]
    assert record.inconclusive_reasons == ("2 of 2 tasks did not end: the run was interrupted",)
    assert record.exit_code == 3


KNOWN = {"reason": "it does", "link": "nowhere", "expires": "2999-01-01"}
DECLARED = Declarations(
    (Deviation("idle", ("relu",), **KNOWN), Deviation("unseen", ("relu",), **KNOWN)),
    (ExpectedFailure("faulty/fine", **KNOWN), ExpectedFailure("faulty/print", check="last", **KNOWN)),
)


@pytest.mark.slow
@pytest.mark.parametrize("is_interrupted", [False, True])
def test_execute_plan_full_run_reports_declarations(is_interrupted):
    """Only a full run that was not interrupted reports problems of declarations."""

    def notice(result, running):
        if result is not None and result.verdict is Verdict.PASS:  # nor is it one of those that were given up
            running.progress_by_task[result.task].results[result.name] = replace(result, applicable=("unseen",))
            if is_interrupted:
                raise KeyboardInterrupt

    tasks = [Task("faulty", "fine"), Task("faulty", "print")]
    scopes = {entry: frozenset(filter(entry.matches_task, tasks)) for entry in DECLARED.xfails}
    request = replace(make_request(), profile=replace(make_request().profile, name="nightly"))
    plan = replace(plan_run(request), tasks=tasks, declarations=DECLARED, scopes=scopes)
    assert plan.is_full
    record = execute_plan(plan, notice)
    said = " ".join(record.problems)
    counts = (
        record.counts.get(Verdict.XPASS, 0),
        said.count("idle matches no check"),
        said.count("unseen occurred in none"),
    )
    assert counts == ((0, 0, 0) if is_interrupted else (4, 1, 1))
    assert len(record.problems) == (0 if is_interrupted else 2), said


@pytest.mark.slow
def test_start_execution_results_by_task():
    """Results are available task by task."""
    plan = plan_run(make_request("fine", "exit"))
    with start_execution(plan, plan.tasks) as running:
        assert [r.verdict for r in running.results_of(Task("faulty", "exit"))] == [
            Verdict.PASS,
            Verdict.CRASH,
            Verdict.PASS,
        ]
        assert [r.verdict for r in running.results_of(Task("faulty", "fine"))] == [Verdict.PASS] * 3


@pytest.mark.slow
def test_execute_plan_worker_start_error_raises():
    """A worker that cannot start ends the run."""
    with pytest.raises(ClikaError, match=r"a worker ended before it was ready: exit status 1:\n(.|\n)*no_such_module"):
        execute_plan(plan_run(make_request("fine", modify_suite="no_such_module:function")))


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 3])
def test_execute_plan_killed_replacement_costs_no_result(monkeypatch, lost):
    """A replacement that is killed early costs no result; three end the run."""
    start_worker, workers = run.Execution._start_worker, []

    def start_and_kill(self):
        start_worker(self)
        workers.append(self.workers[-1])
        if 1 < len(workers) <= 1 + lost:
            workers[-1].kill()

    monkeypatch.setattr(run.Execution, "_start_worker", start_and_kill)
    record = execute_plan(plan_run(make_request("exit", "print")))
    assert not record.find_accounting_errors()
    assert record.exit_code == (1 if lost < 3 else 3)
    done = [v for _, v in read_verdicts(record, "exit")]
    assert done[:2] == [Verdict.PASS, Verdict.CRASH]
    if lost < 3:
        assert (done[2], record.inconclusive_reasons) == (Verdict.PASS, ())
    else:
        assert done[2] is Verdict.NOT_RUN
        assert re.match(DOUBT, record.inconclusive_reasons[0])


DOUBT = (
    r"2 of 2 tasks did not end: 3 workers in a row ended before they were ready; the last \(process \d+\): SIGKILL: "
    "the system ran out of memory, or somebody killed it"
)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 3])
def test_execute_plan_killed_first_workers_replaced(monkeypatch, lost):
    """The first workers may be killed early too; three end the run."""
    start_worker, workers = run.Execution._start_worker, []

    def start_and_kill(self):
        start_worker(self)
        workers.append(self.workers[-1])
        if len(workers) <= lost:
            workers[-1].kill()

    monkeypatch.setattr(run.Execution, "_start_worker", start_and_kill)
    record = execute_plan(plan_run(make_request("fine", "print")))
    assert not record.find_accounting_errors()
    assert {r.verdict for r in record.results} == {Verdict.PASS if lost < 3 else Verdict.NOT_RUN}
    assert record.exit_code == (0 if lost < 3 else 3)
    assert lost < 3 or re.match(DOUBT, record.inconclusive_reasons[0])


@pytest.mark.slow
def test_execute_plan_sampler_error_in_full_once():
    """A sampler error is reported in full once, and in one line elsewhere."""
    request = RunRequest("identity", select_profile("quick"), ("celu", "artifacts/random graphs"), workers=1)
    record = execute_plan(
        plan_run(replace(request, modify_suite="bad_samples:put_bad_sampler", argument="celu raises"))
    )
    assert {r.verdict for r in record.failures} == {Verdict.SAMPLE}
    messages = {str(r.task): r.comparison.message for r in record.failures}
    assert "(in bad_samples.py, line " in messages.pop("contract/celu")
    assert set(messages) >= {"operators/celu/float32", "dynamic/celu/float32/dynamic"}
    (short,) = set(messages.values())
    assert short.endswith("raise ZeroDivisionError: integer division or modulo by zero; see contract/celu")


def make_record(*comparisons, level="operators"):
    task = Task(level, "sin", "int64")
    results = [CheckResult(task, f"{i}", comparison) for i, comparison in enumerate(comparisons)]
    return RunRecord("mine", "quick", 0, {}, {task: [r.name for r in results]}, results)


def test_find_doubts_eager_outside_bound_reported():
    """A task where eager leaves its bound too often is a fault of the suite."""
    fine, off = (
        Comparison(Verdict.PASS, elements=990),
        Comparison(Verdict.PASS, elements=10, unstable=10, unstable_finite=10),
    )
    assert find_inconclusive_reasons(make_record(fine, off)) == []
    (doubt,) = find_inconclusive_reasons(make_record(fine, off, off))
    assert doubt.startswith("sin in int64: eager itself exceeds the bound in 20 of 1,010 elements, more than 1%")
    assert replace(make_record(fine), inconclusive_reasons=(doubt,)).exit_code == 3
    overflows = Comparison(Verdict.PASS, elements=10, unstable=10)
    assert find_inconclusive_reasons(make_record(fine, overflows, overflows)) == []
    assert find_inconclusive_reasons(make_record(off)) == [], "few of few"


@pytest.mark.parametrize("verdict", [Verdict.UNSUPPORTED, Verdict.NOT_RUN, Verdict.UNSTABLE, Verdict.XFAIL])
def test_find_doubts_nothing_proven_reported(verdict):
    """A run that proves nothing of its target reports so."""
    not_run = make_record(*[Comparison(verdict)] * 3)
    assert find_inconclusive_reasons(not_run) == [f"no check proves anything about mine: 3 {verdict}"]
    proven = [make_record(Comparison(other), Comparison(verdict)) for other in (Verdict.PASS, Verdict.DEVIATION)]
    failed = make_record(Comparison(Verdict.VALUE), Comparison(verdict))
    without = make_record(Comparison(verdict), level="passes")
    assert [find_inconclusive_reasons(record) for record in (*proven, failed, without)] == [[], [], [], []]


@pytest.mark.slow
def test_execute_plan_unsupported_target_exits_3():
    """A target that supports nothing does not pass."""
    request = RunRequest(
        "faulty_targets:REJECTING", select_profile("quick"), ("relu/float32", "contract/relu"), workers=1
    )
    record = execute_plan(plan_run(request))
    ran = {r.verdict for r in record.results if r.task.level == "operators"}
    assert ran == {Verdict.UNSUPPORTED, Verdict.NOT_RUN}
    assert Verdict.PASS in record.counts
    (doubt,) = record.inconclusive_reasons
    assert doubt.startswith("no check proves anything about faulty_targets:REJECTING: ")
    assert record.exit_code == 3


def test_exit_code_missing_results_gives_3():
    """Results that do not match the plan give exit status 3."""
    task = Task("faulty", "fine")
    passed = CheckResult(task, "first", Comparison(Verdict.PASS))
    fine = RunRecord("identity", "quick", 0, {}, {task: ("first",)}, [passed])
    assert fine.exit_code == 0
    assert replace(fine, problems=("a deviation is gone",)).exit_code == 1
    assert replace(fine, results=[]).find_accounting_errors() == ["faulty/fine: first: planned 1 times, 0 results"]
    assert replace(fine, results=[passed, passed]).exit_code == 3
    assert replace(fine, plan={task: ("first", "second")}).exit_code == 3
    assert replace(fine, plan={}).exit_code == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"levels": ("faulti",)}, r"there is no level 'faulti'; did you mean faulty\?"),
        ({"subjects": ("fin",), "levels": ()}, None),
        ({"subjects": ("finne",)}, r"no task of the levels faulty contains finne; did you mean fine\?"),
    ],
)
def test_plan_run_unknown_level_or_subject_raises(changes, message):
    """A request with an unknown level or subject raises ClikaError."""
    request = replace(make_request("fine"), **changes)
    if message is None:
        assert [t.subject for t in plan_run(request).tasks] == ["fine"]
        return
    with pytest.raises(ClikaError, match=message):
        plan_run(request)


def test_select_profile_unknown_raises_and_nightly_draws_seed():
    """An unknown profile raises; nightly draws its seed."""
    with pytest.raises(ClikaError, match=r"there is no profile 'slow'; profiles are quick, ci, nightly"):
        select_profile("slow")
    assert select_profile("quick").seed == 0
    assert select_profile("ci", 7).seed == 7
    assert len({select_profile("nightly").seed for _ in range(3)}) > 1
