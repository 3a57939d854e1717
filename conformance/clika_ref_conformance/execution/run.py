"""Run a plan: distribute tasks to worker processes, and collect one result per check.

If a worker dies, at most one check is lost: another worker continues after it.
"""

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
from clika_ref_conformance.deviations import Declarations, ExpectedFailure, ExpectedFailureScopes, read_declarations
from clika_ref_conformance.execution.check_runner import BROKEN_PLAN_CHECK
from clika_ref_conformance.execution.declaration_accounting import (
    apply_expected_failures,
    count_deviations,
    find_inconclusive_reasons,
    find_problems,
)
from clika_ref_conformance.execution.levels import LEVELS, find_scopes, list_tasks, select_levels
from clika_ref_conformance.execution.messages import WorkerSetup, result_of_json
from clika_ref_conformance.execution.target_probe import probe_target
from clika_ref_conformance.execution.worker_process import (
    PLAN_TIMEOUT_S,
    TaskProgress,
    WorkerEvent,
    WorkerProcess,
    compute_wait_seconds,
    make_run_folder,
)
from clika_ref_conformance.profiles import PROFILES, Profile
from clika_ref_conformance.record import CheckResult, RunRecord
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.targets.loading import find_module_folder, load_target
from clika_ref_conformance.verdicts import Comparison, Reason, make_not_run

CHECKS_PER_WORKER = 20_000
"""Checks after which a worker is replaced, unless its memory use required that before. A start takes 3 s."""

MAX_FRUITLESS_WORKERS = 3
"""Limit on workers in a row that die without having run a check of a task, or before they are ready."""


@dataclass(frozen=True)
class RunRequest:
    """Request for a run: target, profile, and selection of tasks."""

    target: str
    """Name of an installed target, or ``package.module:TARGET``."""
    profile: Profile = PROFILES["quick"]
    subjects: Sequence[str] = ()
    """Selection of tasks: the name of a task must contain at least one of these words; all tasks if empty."""
    levels: Sequence[str] = ()
    """Names of levels; all of them if empty."""
    out: Path | None = None
    """Folder of the report, for reproducers."""
    workers: int = 2
    available_levels: Mapping[str, str] = field(default_factory=lambda: LEVELS)
    """Modules of all available levels, by name."""
    modify_suite: str = ""
    """``package.module:function`` that changes the suite before planning (`WorkerSetup.modify_suite`)."""
    argument: str = ""
    """Argument of ``modify_suite``, after the suite."""

    @property
    def part(self) -> str:
        """The options that select a part of the profile, as in a command; empty for the whole profile."""
        asked = [*(("-k", word) for word in self.subjects), *(("--level", name) for name in self.levels)]
        return shlex.join(text for option in asked for text in option)


@dataclass(frozen=True)
class RunPlan:
    """Validated request: its tasks, and the declarations of the target."""

    request: RunRequest
    levels: Mapping[str, str]
    tasks: Sequence[Task]
    declarations: Declarations
    scopes: ExpectedFailureScopes = field(default_factory=dict[ExpectedFailure, frozenset[Task]])
    """Tasks of the failures that are declared as expected."""

    @property
    def is_full(self) -> bool:
        """Whether the run covers all of the profile."""
        return not self.request.subjects and not self.request.levels


def plan_run(request: RunRequest) -> RunPlan:
    """Resolve a request into a plan, without running any check.

    Raises:
        ClikaError: there is no such target, level or subject, or the target's declarations are invalid.
    """
    probe_target(request.target)
    registry = load_registry()
    target = load_target(request.target, registry)
    declarations = read_declarations(target, registry, request.target)
    levels = select_levels(request.levels, request.available_levels)
    suite = Suite(registry, target, request.profile, Path(), tuple(request.subjects), declarations.deviations)
    scopes = find_scopes(declarations.xfails, suite, request.available_levels)
    return RunPlan(request, levels, list_tasks(suite, levels), declarations, scopes)


ProgressCallback = Callable[[CheckResult | None, "Execution"], None]
"""Called after each result, and with None when a task ends or no message arrived for `PROGRESS_INTERVAL_S`."""

PROGRESS_INTERVAL_S = 5.0


def execute_plan(plan: RunPlan, on_progress: ProgressCallback | None = None) -> RunRecord:
    """Run a plan and return its record.

    The record of an interrupted run has the results so far, and is inconclusive.

    Raises:
        ClikaError: no worker can start.
    """
    start = time.perf_counter()
    with start_execution(plan, plan.tasks, on_progress) as execution:
        try:
            execution.run()
        except KeyboardInterrupt:
            execution.abandon("the run was interrupted")
        return execution.record(time.perf_counter() - start)


@contextlib.contextmanager
def start_execution(
    plan: RunPlan, tasks: Sequence[Task], on_progress: ProgressCallback | None = None
) -> Iterator[Execution]:
    """Start workers on tasks of a plan; kill them when the block exits."""
    with make_run_folder() as folder:
        execution = Execution(plan, make_setup(plan, folder), tasks, on_progress)
        try:
            execution.start()
            yield execution
        finally:
            execution.close()


def make_setup(plan: RunPlan, folder: str = "") -> WorkerSetup:
    """Return the setup of a plan's workers."""
    request = plan.request
    folders = folder, str(request.out or ""), tuple(sys.path)
    return WorkerSetup(request.target, request.profile, plan.levels, *folders, request.modify_suite, request.argument)


class Execution:
    """State of a run in progress."""

    def __init__(
        self, plan: RunPlan, setup: WorkerSetup, tasks: Sequence[Task], on_progress: ProgressCallback | None
    ) -> None:
        self.plan = plan
        self.setup = setup
        self.on_progress = on_progress or (lambda _, __: None)
        self.progress_by_task = {task: TaskProgress(task) for task in tasks}
        self.waiting = deque(self.progress_by_task.values())
        self.events: queue.Queue[WorkerEvent] = queue.Queue()
        self.workers: list[WorkerProcess] = []
        self.environment: dict[str, str] = {}
        self.problems: list[str] = []
        self.inconclusive_reasons: list[str] = []
        self.ended_tasks = 0
        """Number of finished tasks."""
        self.failed_starts = 0
        """Number of workers in a row that ended before they were ready."""

    def start(self) -> None:
        """Start the workers."""
        for _ in range(min(max(self.plan.request.workers, 1), len(self.progress_by_task))):
            self._start_worker()

    def run(self) -> None:
        """Run all tasks to their end."""
        while self.workers:
            self._handle_next_event()

    def results_of(self, task: Task) -> list[CheckResult]:
        """Run until a task is done; return its results."""
        progress = self.progress_by_task[task]
        while not progress.is_ended and self.workers:
            self._handle_next_event()
        return apply_expected_failures([*progress.results.values()], self.plan.scopes)

    def abandon(self, reason: str) -> None:
        """Record every missing result as not run, so that the run is inconclusive."""
        left = sum(not progress.is_ended for progress in self.progress_by_task.values())
        if left:
            self.inconclusive_reasons.append(f"{left:,} of {len(self.progress_by_task):,} tasks did not end: {reason}")
        for progress in self.progress_by_task.values():
            self._abandon_task(progress, reason)

    def close(self) -> None:
        """Kill the workers at once."""
        for worker in self.workers:
            worker.kill()
            worker.close()

    def _start_worker(self) -> None:
        self.workers.append(WorkerProcess(self.setup, self.events))

    def _handle_next_event(self) -> None:
        """Handle the next message of a worker, or kill the workers that exceeded their deadline."""
        try:
            worker, kind, content = self.events.get(timeout=compute_wait_seconds(self.workers, PROGRESS_INTERVAL_S))
        except queue.Empty:
            self.on_progress(None, self)
            for worker in self.workers:
                if worker.deadline <= time.monotonic() and not worker.overdue:
                    worker.overdue = True
                    worker.kill()
            return
        if worker in self.workers and (worker.progress is not None or kind in ("ready", "ended")):
            getattr(self, f"_on_{kind}")(worker, content)

    def _on_ready(self, worker: WorkerProcess, environment: dict[str, str]) -> None:
        worker.is_ready = True
        self.failed_starts = 0
        self.environment = environment
        self._assign_next(worker)

    def _assign_next(self, worker: WorkerProcess) -> None:
        worker.progress = None
        if self.waiting:
            worker.assign(self.waiting.popleft())
        else:
            self._end_worker(worker)

    def _end_worker(self, worker: WorkerProcess) -> None:
        """End a worker. It is removed from the list afterwards, so that `close` kills it after an interrupt."""
        worker.end()
        self.workers.remove(worker)

    def _on_plan(self, worker: WorkerProcess, content: tuple[list[str], str | None]) -> None:
        progress, (names, first) = _progress_of(worker), content
        self._expect_check(worker, first)
        if progress.plan is None:
            progress.plan = names
            duplicates = sorted({name for name in names if names.count(name) > 1})
            if duplicates:
                self.problems.append(f"{progress.task} plans several checks of one name: {', '.join(duplicates)}")
        elif progress.plan != names:
            self._abandon_task(progress, "another worker planned other checks. Draw the same in every process.")
            self.problems.append(f"{progress.task} is planned differently in different processes")
            self._finish(progress)
            worker.progress = None
            worker.kill()

    def _expect_check(self, worker: WorkerProcess, name: str | None) -> None:
        """Set a worker's deadline for the check that it starts now; None if its task has no more checks."""
        profile = self.plan.request.profile
        _progress_of(worker).started = name
        worker.set_deadline(PLAN_TIMEOUT_S if name is None else profile.case_seconds + profile.shrink_seconds)

    def _on_result(self, worker: WorkerProcess, content: tuple[dict[str, Any], str | None]) -> None:
        progress, (document, following) = _progress_of(worker), content
        progress.fruitless_workers = 0
        worker.checks += 1
        self._expect_check(worker, following)
        self._add_result(progress, result_of_json(document))

    def _add_result(self, progress: TaskProgress, result: CheckResult) -> None:
        if result.name in progress.results:
            self.problems.append(f"{progress.task}: {result.name} has two results")
        progress.results[result.name] = result
        self.on_progress(result, self)

    def _on_done(self, worker: WorkerProcess, resident: int) -> None:
        self._finish(_progress_of(worker))
        limit = self.plan.request.profile.memory_bytes
        if self.waiting and (worker.checks >= CHECKS_PER_WORKER or (limit and resident > limit / 2)):
            self._replace(worker)
        else:
            self._assign_next(worker)

    def _on_full(self, worker: WorkerProcess, _: None) -> None:
        self._requeue(_progress_of(worker))
        self._replace(worker)

    def _replace(self, worker: WorkerProcess) -> None:
        self._end_worker(worker)
        if self.waiting:
            self._start_worker()

    def _finish(self, progress: TaskProgress) -> None:
        progress.is_ended = True
        self.ended_tasks += 1
        self.on_progress(None, self)

    def _on_ended(self, worker: WorkerProcess, _: None) -> None:
        """Record the end of a worker as the result of its running check; another worker continues after that check."""
        self.workers.remove(worker)
        output = worker.close()
        if not worker.is_ready:
            self._replace_failed_start(worker, worker.describe_exit() + f":\n{output}" * bool(output))
            return
        progress = worker.progress
        if progress is not None:
            self._record_death(progress, worker, output)
        if self.waiting and len(self.workers) < self.plan.request.workers:
            self._start_worker()

    def _replace_failed_start(self, worker: WorkerProcess, end: str) -> None:
        """Replace a worker that ended before it was ready, unless too many in a row did.

        Raises:
            ClikaError: it exited by itself, and no worker was ready before.
        """
        self.failed_starts += 1
        if not self.environment and not worker.is_killed_by_signal:
            raise ClikaError(f"a worker ended before it was ready: {end}")
        if self.failed_starts < MAX_FRUITLESS_WORKERS:
            self._start_worker()
        elif not self.workers:
            last = f"the last (process {worker.process.pid}): {end}"
            self.abandon(f"{self.failed_starts} workers in a row ended before they were ready; {last}")

    def _record_death(self, progress: TaskProgress, worker: WorkerProcess, output: str) -> None:
        verdict, message = worker.judge_exit(output)
        if progress.started is not None and worker.is_ended_externally and progress.started not in progress.retried:
            progress.retried.add(progress.started)
            progress.started = None
        elif progress.started is not None:
            self._add_result(progress, CheckResult(progress.task, progress.started, Comparison(verdict, message)))
            progress.started, progress.fruitless_workers = None, 0
        elif progress.plan is None and not progress.fruitless_workers and not worker.overdue:
            progress.fruitless_workers = 1  # may have been killed from outside
        elif progress.plan is None:
            progress.plan = [BROKEN_PLAN_CHECK]
            comparison = Comparison(verdict, f"while planning the task: {message}")
            self._add_result(progress, CheckResult(progress.task, BROKEN_PLAN_CHECK, comparison))
        else:
            progress.fruitless_workers += 1
            if progress.fruitless_workers >= MAX_FRUITLESS_WORKERS:
                self._abandon_task(progress, f"{MAX_FRUITLESS_WORKERS} workers died before they ran a check: {message}")
        self._requeue(progress)

    def _requeue(self, progress: TaskProgress) -> None:
        """Put a task with missing results first in the queue; otherwise finish it."""
        if progress.plan is not None and set(progress.plan) <= progress.results.keys():
            self._finish(progress)
        else:
            self.waiting.appendleft(progress)

    def _abandon_task(self, progress: TaskProgress, reason: str) -> None:
        if progress.plan is None:
            progress.plan = [BROKEN_PLAN_CHECK]
        for name in progress.plan:
            if name not in progress.results:
                self._add_result(progress, CheckResult(progress.task, name, make_not_run(Reason.ABANDONED, reason)))

    def record(self, seconds: float) -> RunRecord:
        """Return the record of the run."""
        request = self.plan.request
        every = self.progress_by_task.values()
        planned = {p.task: tuple(p.plan or ()) for p in every}
        results = [p.results[name] for p in every for name in p.plan or () if name in p.results]
        results += [r for p in every for name, r in p.results.items() if name not in (p.plan or ())]
        is_whole = set(self.plan.tasks) <= self.progress_by_task.keys()  # pytest selects tasks itself
        is_full = self.plan.is_full and is_whole and not any(r.is_abandoned for r in results)
        results = apply_expected_failures(results, self.plan.scopes)
        record = RunRecord(
            request.target,
            request.profile.name,
            request.profile.seed,
            self.environment,
            planned,
            results,
            seconds,
            count_deviations(self.plan.declarations.deviations, results),
            is_abandoned=not all(p.is_ended for p in every),
            part=request.part,
            target_folder=find_module_folder(request.target),
        )
        problems = find_problems(record, self.plan.declarations, self.plan.scopes, request.profile, is_full=is_full)
        return replace(
            record,
            problems=(*self.problems, *problems),
            inconclusive_reasons=(*self.inconclusive_reasons, *find_inconclusive_reasons(record)),
        )


def _progress_of(worker: WorkerProcess) -> TaskProgress:
    assert worker.progress is not None
    return worker.progress
