"""Whole run: distribute tasks to workers, lose at most one check with a dead worker, collect one result per check."""

from __future__ import annotations

import contextlib
import queue
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clika_ref.core.errors import ClikaError
from clika_ref.core.registry import load_registry
from clika_ref_conformance.cases import Task
from clika_ref_conformance.deviations import Declarations, ExpectedFailure, Scopes, declarations_of
from clika_ref_conformance.execution.accounts import deviation_accounts, doubts_of, problems_of, with_expected_failures
from clika_ref_conformance.execution.checking import BROKEN_PLAN
from clika_ref_conformance.execution.endings import manner_of, verdict_of, was_ended_by_others, was_killed
from clika_ref_conformance.execution.levels import LEVELS, chosen_levels, scopes_of, tasks_of
from clika_ref_conformance.execution.messages import Setup, result_of_json
from clika_ref_conformance.execution.process import (
    PLAN_SECONDS,
    Event,
    Progress,
    WorkerProcess,
    folder_for,
    seconds_to_wait,
)
from clika_ref_conformance.execution.trying import try_target
from clika_ref_conformance.profiles import PROFILES, Profile
from clika_ref_conformance.record import Result, RunRecord
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.targets.loading import folder_of, load_target
from clika_ref_conformance.verdicts import Comparison, Reason, Verdict, not_run

RECYCLE_CHECKS = 20_000
"""Checks after which a worker is replaced, unless its memory required it before: starting one takes 3 s."""

FRUITLESS = 3
"""Limit on workers in a row that die without having run a check of a task, or before they are ready."""


@dataclass(frozen=True)
class RunRequest:
    """Request for a run: target, profile, and selection of tasks."""

    target: str
    """Name of an installed target, or ``package.module:TARGET``."""
    profile: Profile = PROFILES["quick"]
    subjects: Sequence[str] = ()
    """Words to select tasks: the name of a task must contain at least one."""
    levels: Sequence[str] = ()
    """Names of levels; all of them if empty."""
    out: Path | None = None
    """Folder of the report, for reproducers."""
    workers: int = 2
    catalogue: Mapping[str, str] = field(default_factory=lambda: LEVELS)
    """Names and modules of all available levels."""
    arrange: str = ""
    argument: str = ""
    """See `clika_ref_conformance.execution.messages.Setup`."""

    @property
    def part(self) -> str:
        """Requested part of the profile, as options; empty if all of it is requested."""
        asked = [*(("-k", word) for word in self.subjects), *(("--level", name) for name in self.levels)]
        return shlex.join(text for option in asked for text in option)


@dataclass(frozen=True)
class Plan:
    """Validated request: its tasks, and the declarations of the target."""

    request: RunRequest
    levels: Mapping[str, str]
    tasks: Sequence[Task]
    declarations: Declarations
    scopes: Scopes = field(default_factory=dict[ExpectedFailure, frozenset[Task]])
    """Tasks of the failures that are declared as expected."""

    @property
    def is_full(self) -> bool:
        """Whether the run covers all of the profile."""
        return not self.request.subjects and not self.request.levels


def plan_run(request: RunRequest) -> Plan:
    """Resolve a request into a plan, without running any check.

    Raises:
        ClikaError: there is no such target, level or subject, or the target's declarations are invalid.
    """
    try_target(request.target)
    registry = load_registry()
    target = load_target(request.target, registry)
    declarations = declarations_of(target, registry, request.target)
    levels = chosen_levels(request.levels, request.catalogue)
    suite = Suite(registry, target, request.profile, Path(), tuple(request.subjects), declarations.deviations)
    scopes = scopes_of(declarations.xfails, suite, request.catalogue)
    return Plan(request, levels, tasks_of(suite, levels), declarations, scopes)


Notice = Callable[[Result | None, "Execution"], None]
"""Called after each result, and with None when a task ends and when no message arrived for a while."""

QUIET_SECONDS = 5.0
"""Length of that while."""


def execute(plan: Plan, notice: Notice | None = None) -> RunRecord:
    """Run a plan and return its record.

    The record of an interrupted run has the results so far, and proves too little.

    Raises:
        ClikaError: no worker can start.
    """
    start = time.perf_counter()
    with execution(plan, plan.tasks, notice) as running:
        try:
            running.go()
        except KeyboardInterrupt:
            running.abandon("the run was interrupted")
        return running.record(time.perf_counter() - start)


@contextlib.contextmanager
def execution(plan: Plan, tasks: Sequence[Task], notice: Notice | None = None) -> Iterator[Execution]:
    """Start the workers on tasks of a plan, and end them when the block exits."""
    with folder_for() as folder:
        running = Execution(plan, setup_of(plan, folder), tasks, notice)
        try:
            running.start()
            yield running
        finally:
            running.close()


def setup_of(plan: Plan, folder: str = "") -> Setup:
    """Return the setup of a plan's workers."""
    asked, out = plan.request, str(plan.request.out or "")
    places = folder, out, tuple(sys.path)
    return Setup(asked.target, asked.profile, plan.levels, *places, asked.arrange, asked.argument)


class Execution:
    """State of a run in progress."""

    def __init__(self, plan: Plan, setup: Setup, tasks: Sequence[Task], notice: Notice | None) -> None:
        self.plan = plan
        self.setup = setup
        self.notice = notice or (lambda _, __: None)
        self.every = {task: Progress(task) for task in tasks}
        self.waiting = deque(self.every.values())
        self.events: queue.Queue[Event] = queue.Queue()
        self.workers: list[WorkerProcess] = []
        self.environment: dict[str, str] = {}
        self.problems: list[str] = []
        self.doubts: list[str] = []
        self.ended = 0
        """Number of finished tasks."""
        self.stillborn = 0
        """Number of workers in a row that ended before they were ready."""

    def start(self) -> None:
        """Start the workers."""
        for _ in range(min(max(self.plan.request.workers, 1), len(self.every))):
            self._hire()

    def go(self) -> None:
        """Run everything."""
        while self.workers:
            self._wait()

    def results_of(self, task: Task) -> list[Result]:
        """Continue until a task is done, and return its results."""
        progress = self.every[task]
        while not progress.is_ended and self.workers:
            self._wait()
        return with_expected_failures([*progress.results.values()], self.plan.scopes)

    def abandon(self, reason: str) -> None:
        """Enter every missing result as not run, so that the run proves too little."""
        left = sum(not progress.is_ended for progress in self.every.values())
        if left:
            self.doubts.append(f"{left:,} of {len(self.every):,} tasks are not done: {reason}")
        for progress in self.every.values():
            self._give_up(progress, reason)

    def close(self) -> None:
        """Kill the workers at once."""
        for worker in self.workers:
            worker.kill()
            worker.close()

    def _hire(self) -> None:
        self.workers.append(WorkerProcess(self.setup, self.events))

    def _wait(self) -> None:
        """Handle the next message of a worker, or kill the workers that missed their deadline."""
        try:
            worker, kind, content = self.events.get(timeout=seconds_to_wait(self.workers, QUIET_SECONDS))
        except queue.Empty:
            self.notice(None, self)
            for worker in self.workers:
                if worker.deadline <= time.monotonic() and not worker.overdue:
                    worker.overdue = True
                    worker.kill()
            return
        if worker in self.workers and (worker.progress is not None or kind in ("ready", "ended")):
            getattr(self, f"_on_{kind}")(worker, content)

    def _on_ready(self, worker: WorkerProcess, environment: dict[str, str]) -> None:
        worker.is_ready = True
        self.stillborn = 0
        self.environment = environment
        self._next(worker)

    def _next(self, worker: WorkerProcess) -> None:
        worker.progress = None
        if self.waiting:
            worker.give(self.waiting.popleft())
        else:
            self._let_go(worker)

    def _let_go(self, worker: WorkerProcess) -> None:
        """End a worker. It stays in the list until then, so that an interruption meanwhile still kills it."""
        worker.end()
        self.workers.remove(worker)

    def _on_plan(self, worker: WorkerProcess, content: tuple[list[str], str | None]) -> None:
        progress, (names, first) = _progress(worker), content
        self._expect_check(worker, first)
        if progress.plan is None:
            progress.plan = names
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                self.problems.append(f"{progress.task} plans checks twice: {', '.join(twice)}")
        elif progress.plan != names:
            self._give_up(progress, "another worker planned other checks: drawing must be the same in every process")
            self.problems.append(f"{progress.task} is planned differently in different processes")
            self._finish(progress)
            worker.progress = None
            worker.kill()

    def _expect_check(self, worker: WorkerProcess, name: str | None) -> None:
        """Set a worker's deadline for the check that it starts now; None if its task has no more checks."""
        profile = self.plan.request.profile
        _progress(worker).started = name
        worker.expect(PLAN_SECONDS if name is None else profile.case_seconds + profile.shrink_seconds)

    def _on_result(self, worker: WorkerProcess, content: tuple[dict[str, Any], str | None]) -> None:
        progress, (document, following) = _progress(worker), content
        progress.fruitless = 0
        worker.checks += 1
        self._expect_check(worker, following)
        self._enter(progress, result_of_json(document))

    def _enter(self, progress: Progress, result: Result) -> None:
        if result.name in progress.results:
            self.problems.append(f"{progress.task}: {result.name} has two results")
        progress.results[result.name] = result
        self.notice(result, self)

    def _on_done(self, worker: WorkerProcess, resident: int) -> None:
        self._finish(_progress(worker))
        limit = self.plan.request.profile.memory_bytes
        if self.waiting and (worker.checks >= RECYCLE_CHECKS or (limit and resident > limit / 2)):
            self._replace(worker)
        else:
            self._next(worker)

    def _on_full(self, worker: WorkerProcess, _: None) -> None:
        self._put_back(_progress(worker))
        self._replace(worker)

    def _replace(self, worker: WorkerProcess) -> None:
        self._let_go(worker)
        if self.waiting:
            self._hire()

    def _finish(self, progress: Progress) -> None:
        progress.is_ended = True
        self.ended += 1
        self.notice(None, self)

    def _on_ended(self, worker: WorkerProcess, _: None) -> None:
        """Attribute the end of a worker to the check that was running, and let another worker continue after it."""
        self.workers.remove(worker)
        words = worker.close()
        if not worker.is_ready:
            self._hire_again(worker, manner_of(worker) + f":\n{words}" * bool(words))
            return
        progress = worker.progress
        if progress is not None:
            self._blame(progress, worker, words)
        if self.waiting and len(self.workers) < self.plan.request.workers:
            self._hire()

    def _hire_again(self, worker: WorkerProcess, end: str) -> None:
        """Replace a worker that never was ready, unless too many have failed, or none can become ready.

        Raises:
            ClikaError: it exited by itself, and no worker was ready before.
        """
        self.stillborn += 1
        if not self.environment and not was_killed(worker):
            msg = f"a worker ended before it was ready: {end}"
            raise ClikaError(msg)
        if self.stillborn < FRUITLESS:
            self._hire()
        elif not self.workers:
            last = f"the last, process {worker.process.pid}, by {end}"
            self.abandon(f"{self.stillborn} workers in a row ended before they were ready, {last}")

    def _blame(self, progress: Progress, worker: WorkerProcess, words: str) -> None:
        verdict, message = verdict_of(worker, words)
        if progress.started is not None and was_ended_by_others(worker) and progress.started not in progress.spared:
            progress.spared.add(progress.started)
            progress.started = None
        elif progress.started is not None:
            self._enter(progress, _result(progress.task, progress.started, verdict, message))
            progress.started, progress.fruitless = None, 0
        elif progress.plan is None and not progress.fruitless and not worker.overdue:
            progress.fruitless = 1  # may have been killed from outside
        elif progress.plan is None:
            progress.plan = [BROKEN_PLAN]
            self._enter(
                progress, _result(progress.task, BROKEN_PLAN, verdict, f"while the task was planned: {message}")
            )
        else:
            progress.fruitless += 1
            if progress.fruitless >= FRUITLESS:
                self._give_up(progress, f"{FRUITLESS} workers died before they ran a check: {message}")
        self._put_back(progress)

    def _put_back(self, progress: Progress) -> None:
        """Let another worker do the rest of a task, before all other tasks."""
        if progress.plan is not None and set(progress.plan) <= progress.results.keys():
            self._finish(progress)
        else:
            self.waiting.appendleft(progress)

    def _give_up(self, progress: Progress, reason: str) -> None:
        if progress.plan is None:
            progress.plan = [BROKEN_PLAN]
        for name in progress.plan:
            if name not in progress.results:
                self._enter(progress, Result(progress.task, name, not_run(Reason.GIVEN_UP, reason)))

    def record(self, seconds: float) -> RunRecord:
        """Return the record of the run."""
        request = self.plan.request
        every = self.every.values()
        planned = {p.task: tuple(p.plan or ()) for p in every}
        results = [p.results[name] for p in every for name in p.plan or () if name in p.results]
        results += [r for p in every for name, r in p.results.items() if name not in (p.plan or ())]
        is_whole = set(self.plan.tasks) <= self.every.keys()  # pytest selects tasks itself
        is_full = self.plan.is_full and is_whole and not any(r.is_given_up for r in results)
        results = with_expected_failures(results, self.plan.scopes)
        record = RunRecord(
            request.target,
            request.profile.name,
            request.profile.seed,
            self.environment,
            planned,
            results,
            seconds,
            deviation_accounts(self.plan.declarations.deviations, results),
            is_given_up=not all(p.is_ended for p in every),
            part=request.part,
            target_folder=folder_of(request.target),
        )
        gone = problems_of(record, self.plan.declarations, self.plan.scopes, request.profile, is_full=is_full)
        return replace(record, problems=(*self.problems, *gone), doubts=(*self.doubts, *doubts_of(record)))


def _progress(worker: WorkerProcess) -> Progress:
    assert worker.progress is not None
    return worker.progress


def _result(task: Task, name: str, verdict: Verdict, message: str) -> Result:
    return Result(task, name, Comparison(verdict, message))
