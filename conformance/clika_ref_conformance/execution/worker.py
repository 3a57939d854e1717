"""A worker process: reads tasks, plans each before it runs it, and reports every check as it starts and ends.

Standard output is the channel to the run; what a target prints there goes to standard error instead.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import json
import os
import resource
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import torch

from clika_ref.core.registry import load_registry
from clika_ref_conformance.cases import Check, Outcome, Task
from clika_ref_conformance.deviations import declarations_of
from clika_ref_conformance.execution.blaming import blamed, heed_no_keyboard
from clika_ref_conformance.execution.checking import planned, run_check
from clika_ref_conformance.execution.environment import environment_of
from clika_ref_conformance.execution.kinds import FailuresOfTask
from clika_ref_conformance.execution.messages import Setup, result_to_json, task_of_json
from clika_ref_conformance.record import Result
from clika_ref_conformance.reproducing.reproducers import write_reproducer
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.targets.identity import Identity
from clika_ref_conformance.targets.loading import load_target
from clika_ref_conformance.verdicts import Reason, Verdict, not_run

COLLECTED_SHARE = 0.25
"""Of the memory limit; below it the interpreter decides itself when it looks for garbage."""

GARBAGE = 100_000
"""Objects made after which the interpreter looks for garbage; at its own 700, that takes a twentieth of all time."""


def main() -> None:
    """Read the setup, then one task a line, until standard input ends."""
    faulthandler.enable()
    heed_no_keyboard()
    channel = _channel()
    setup = Setup.of_json(json.loads(sys.stdin.readline()))
    sys.path[:] = [*setup.path, *(p for p in sys.path if p not in setup.path)]
    torch.set_num_threads(1)  # two workers share the cores, and kernels round by how they split work
    suite = make_suite(setup)
    limit_memory(setup.profile.memory_bytes)
    gc.freeze()  # what is loaded stays: to search it for garbage time and again took a twentieth of all time
    gc.set_threshold(GARBAGE)
    worker = Worker(suite, setup, channel)
    worker.say("ready", environment_of(suite))
    for line in sys.stdin:
        request = json.loads(line)
        worker.do(task_of_json(request["task"]), request["done"])


def limit_memory(limit: int) -> None:
    """Refuse this process more memory of its own than so many bytes; 0 sets no limit.

    Addresses that a runtime reserves and cannot write to are none; those of GPUs reserve more than any machine has.
    Source: getrlimit(2), RLIMIT_DATA: private writable mappings since Linux 4.7.
    """
    if limit:
        most = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


def _channel() -> TextIO:
    """Take standard output for the run alone, and point the descriptor at standard error."""
    kept = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(kept, "w", encoding="utf-8", buffering=1)


def make_suite(setup: Setup) -> Suite:
    """Return the suite that a setup describes."""
    registry = load_registry()
    target = load_target(setup.target, registry)
    folder = Path(tempfile.mkdtemp(dir=setup.folder))
    declared = declarations_of(target, registry, setup.target)
    trusts_eager = setup.profile.trusts_eager and not isinstance(target, Identity)  # eager is what is on trial there
    profile = replace(setup.profile, trusts_eager=trusts_eager)
    suite = Suite(registry, target, profile, folder, (), declared.deviations, declared.xfails, setup.as_json())
    if setup.arrange:
        place, _, name = setup.arrange.partition(":")
        suite = getattr(importlib.import_module(place), name)(suite, setup.argument)
    return suite


class Worker:
    """Does the tasks that it is given, one after the other."""

    def __init__(self, suite: Suite, setup: Setup, channel: TextIO) -> None:
        self.suite = suite
        self.setup = setup
        self.channel = channel
        self.number = os.getpid()

    def say(self, kind: str, content: Any = None) -> None:
        """Send one line to the run; a process that a target has forked off and that comes back here ends instead."""
        if os.getpid() != self.number:
            os._exit(0)
        self.channel.write(json.dumps([kind, content]) + "\n")

    def do(self, task: Task, done: Mapping[str, str]) -> None:
        """Plan a task, say the plan, and run those of its checks that are not done yet; with each say which is next.

        Where memory ran out, say so instead, and leave the rest to another: what is not given back would fail it.

        Args:
            task: what to do.
            done: the verdicts of its checks that other workers have run.

        """
        checks = planned(task, self.suite, self.setup.levels)
        left = [check for check in checks if check.name not in done]
        started = [*(check.name for check in left), None]
        self.say("plan", [[check.name for check in checks], started[0]])
        failures = FailuresOfTask(task, self.suite.xfails, {name: Verdict(text) for name, text in done.items()})
        for check, following in zip(left, started[1:], strict=True):
            outcome = self._enough(check, failures) or run_check(check)
            is_news = failures.add(check.name, outcome.verdict)
            is_full = outcome.verdict is Verdict.MEMORY
            result = self._result(task, outcome, is_reproduced=is_news)
            self.say("result", [result_to_json(result), None if is_full else following])
            if is_full:
                self.say("full")
                return
        self.say("done", self._settle())

    def _enough(self, check: Check, failures: FailuresOfTask) -> Outcome | None:
        """Return why a check is not run, where its task has failed often enough."""
        most = self.setup.profile.most_failures
        verdict, count = failures.most(check.name)
        if not most or count < most:
            return None
        return Outcome(check.name, not_run(Reason.ENOUGH_FAILURES, f"after {count} failures of one kind, {verdict}"))

    def _settle(self) -> int:
        """Free memory where much is in use, and return how many bytes still are.

        Looking through all objects takes a sixth of a second, as long as most tasks do.
        """
        resident, limit = _resident_bytes(), self.setup.profile.memory_bytes
        if limit and resident > COLLECTED_SHARE * limit:
            gc.collect()
            resident = _resident_bytes()
        return resident

    def _result(self, task: Task, outcome: Outcome, *, is_reproduced: bool) -> Result:
        """Return what becomes of an outcome, with a reproducer where one is wanted and there is a folder for it."""
        path = ""
        if self.setup.out and is_reproduced:
            try:
                path = write_reproducer(outcome, task, self.suite, self.setup.target, Path(self.setup.out))
            except blamed() as error:  # a failure is reported even where it cannot be written down
                comparison = outcome.comparison
                message = f"{comparison.message}\n(no reproducer: {type(error).__name__}: {error})"
                outcome = replace(outcome, comparison=replace(comparison, message=message))
        return Result.of(task, outcome, path)


@functools.cache
def _page() -> int:
    return os.sysconf("SC_PAGE_SIZE")


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _page()
    except OSError:  # not Linux
        return 0


if __name__ == "__main__":
    main()
