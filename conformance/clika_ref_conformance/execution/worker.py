"""Worker process: reads tasks, plans each before running it, and reports the start and end of every check.

Standard output is the channel to the run; output of a target goes to standard error instead.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import torch

from clika_ref.core.registry import load_registry
from clika_ref_conformance.cases import Check, Outcome, Task
from clika_ref_conformance.deviations import read_declarations
from clika_ref_conformance.execution.check_runner import plan_checks, run_check
from clika_ref_conformance.execution.environment import collect_environment
from clika_ref_conformance.execution.error_attribution import exceptions_to_catch, reset_sigint
from clika_ref_conformance.execution.failure_counts import TaskFailures
from clika_ref_conformance.execution.messages import WorkerSetup, result_to_json
from clika_ref_conformance.record import CheckResult
from clika_ref_conformance.reproducing.repro_script import limit_memory
from clika_ref_conformance.reproducing.reproducers import write_reproducer
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.targets.identity import Identity
from clika_ref_conformance.targets.loading import load_target
from clika_ref_conformance.verdicts import Reason, Verdict, make_not_run

GC_MEMORY_SHARE = 0.25
"""Share of the memory limit above which a task ends with a garbage collection; below it, the interpreter decides."""

GC_THRESHOLD = 100_000
"""Allocations between garbage collections. With the interpreter's default of 700, they take a twentieth of the time."""


def main() -> None:
    """Read the setup, then one task per line, until standard input ends."""
    faulthandler.enable()
    reset_sigint()
    channel = open_channel()
    setup, suite = start_suite(json.loads(sys.stdin.readline()))
    limit_memory(setup.profile.memory_bytes)
    gc.freeze()  # loaded modules stay: scanning them for garbage took a twentieth of the time
    gc.set_threshold(GC_THRESHOLD)
    worker = Worker(suite, setup, channel)
    worker.send("ready", collect_environment(suite))
    for line in sys.stdin:
        request = json.loads(line)
        worker.run_task(Task.of_json(request["task"]), request["done"])


def open_channel() -> TextIO:
    """Reserve standard output for messages to the run, and redirect the descriptor to standard error."""
    kept = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(kept, "w", encoding="utf-8", buffering=1)


def start_suite(document: Mapping[str, Any]) -> tuple[WorkerSetup, Suite]:
    """Prepare this process as a setup in JSON describes; return the setup and its suite."""
    setup = WorkerSetup.of_json(document)
    sys.path[:] = [*setup.path, *(p for p in sys.path if p not in setup.path)]
    torch.set_num_threads(1)  # two workers share the cores, and the split of work affects rounding
    return setup, make_suite(setup)


def make_suite(setup: WorkerSetup) -> Suite:
    """Return the suite that a setup describes."""
    registry = load_registry()
    target = load_target(setup.target, registry)
    folder = Path(tempfile.mkdtemp(dir=setup.folder))
    declared = read_declarations(target, registry, setup.target)
    trusts_eager = setup.profile.trusts_eager and not isinstance(target, Identity)  # eager itself is under test there
    profile = replace(setup.profile, trusts_eager=trusts_eager)
    suite = Suite(registry, target, profile, folder, (), declared.deviations, declared.xfails, setup.as_json())
    if setup.modify_suite:
        module_name, _, name = setup.modify_suite.partition(":")
        suite = getattr(importlib.import_module(module_name), name)(suite, setup.argument)
    return suite


class Worker:
    """Runs the tasks that it receives, one after the other."""

    def __init__(self, suite: Suite, setup: WorkerSetup, channel: TextIO) -> None:
        self.suite = suite
        self.setup = setup
        self.channel = channel
        self.number = os.getpid()

    def send(self, kind: str, content: Any = None) -> None:
        """Send one line to the run. A process that a target forked and that returns here exits instead."""
        if os.getpid() != self.number:
            os._exit(0)
        self.channel.write(json.dumps([kind, content]) + "\n")

    def run_task(self, task: Task, done: Mapping[str, str]) -> None:
        """Plan a task, report the plan, and run the checks that are not done yet.

        Each report of a result names the next check. If memory ran out, report that instead, and leave the rest to
        another worker: memory that is not freed would fail it.

        Args:
            task: task to run.
            done: verdicts of the checks that other workers have run.
        """
        checks = plan_checks(task, self.suite, self.setup.levels)
        left = [check for check in checks if check.name not in done]
        started = [*(check.name for check in left), None]
        self.send("plan", [[check.name for check in checks], started[0]])
        failures = TaskFailures(task, self.suite.xfails, {name: Verdict(text) for name, text in done.items()})
        for check, following in zip(left, started[1:], strict=True):
            outcome = self._skip_after_failures(check, failures) or run_check(check)
            is_news = failures.add(check.name, outcome.verdict)
            is_full = outcome.verdict is Verdict.MEMORY
            result = self._make_result(task, outcome, is_reproduced=is_news)
            self.send("result", [result_to_json(result), None if is_full else following])
            if is_full:
                self.send("full")
                return
        self.send("done", self._collect_garbage())

    def _skip_after_failures(self, check: Check, failures: TaskFailures) -> Outcome | None:
        """Return a not-run outcome if the task has failed often enough."""
        most = self.setup.profile.most_failures
        verdict, count = failures.most_frequent(check.name)
        if not most or count < most:
            return None
        return Outcome(
            check.name,
            make_not_run(Reason.ENOUGH_FAILURES, f"skipped after {count} failures of the task with {verdict}"),
        )

    def _collect_garbage(self) -> int:
        """Free memory if much is in use, and return the bytes that are still in use.

        A garbage collection takes a sixth of a second, as long as most tasks.
        """
        resident, limit = _measure_resident_bytes(), self.setup.profile.memory_bytes
        if limit and resident > GC_MEMORY_SHARE * limit:
            gc.collect()
            resident = _measure_resident_bytes()
        return resident

    def _make_result(self, task: Task, outcome: Outcome, *, is_reproduced: bool) -> CheckResult:
        """Return the result of an outcome, with a reproducer if one is requested and there is a folder for it."""
        path = ""
        if self.setup.out and is_reproduced:
            try:
                path = write_reproducer(outcome, task, self.suite, self.setup.target, Path(self.setup.out))
            except exceptions_to_catch() as error:  # report a failure even if its reproducer cannot be written
                comparison = outcome.comparison
                message = f"{comparison.message}\n(no reproducer: {type(error).__name__}: {error})"
                outcome = replace(outcome, comparison=replace(comparison, message=message))
        return CheckResult.of(task, outcome, path)


def _measure_resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return 0


if __name__ == "__main__":
    main()
