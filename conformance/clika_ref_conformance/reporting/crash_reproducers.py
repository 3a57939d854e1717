"""Create reproducers of checks that killed their worker, by running them again on a recording target.

A process that dies leaves no outcome. So the check runs again in a separate process, with a target that writes down its
inputs before it passes them on. The last record is the case that killed the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from clika_ref.core.artifacts import Artifact
from clika_ref.core.ir import Graph
from clika_ref.core.targets import Target
from clika_ref.reporting.console import is_quiet, progress_console
from clika_ref.serialization.atomic_files import write_atomically
from clika_ref_conformance.cases import CaseRun, GraphCase, Outcome, Task
from clika_ref_conformance.execution.levels import import_level
from clika_ref_conformance.execution.messages import WorkerSetup
from clika_ref_conformance.execution.run import RunPlan, make_setup
from clika_ref_conformance.execution.worker import start_suite
from clika_ref_conformance.execution.worker_process import START_TIMEOUT_S
from clika_ref_conformance.record import CheckResult, RunRecord
from clika_ref_conformance.reproducing.repro_script import limit_memory
from clika_ref_conformance.reproducing.reproducers import CASES_FOLDER, make_case_name, make_reproducer
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.verdicts import Comparison, Verdict

END_VERDICTS = frozenset({Verdict.CRASH, Verdict.HANG, Verdict.MEMORY})
"""Verdicts on a worker that has ended."""

MAX_REPRODUCERS = 20
"""Maximum number of such reproducers per run: each takes as long as the check took to die."""


@dataclass(frozen=True)
class RecordingTarget:
    """Target that records each call before passing it on to another target."""

    inner: Target
    write: Callable[[Graph, Sequence[torch.Tensor]], None]
    graphs: list[Graph] = field(default_factory=list[Graph])
    """Graph of the last compilation."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def compile(self, graph: Graph, path: Path, **options: Any) -> Artifact:
        """Record the graph, then compile it."""
        self.graphs[:] = [graph.clone()]
        self.write(self.graphs[0], ())
        return self.inner.compile(graph, path, **options)

    def load(self, artifact: Artifact) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
        """Load an artifact; return a runner that records the inputs before running it."""
        graph, runner = self.graphs[0], self.inner.load(artifact)

        def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            self.write(graph, inputs)
            return runner(inputs)

        return run


def add_crash_reproducers(record: RunRecord, plan: RunPlan) -> RunRecord:
    """Add reproducers to a record, for the first check of each task and verdict that killed a worker.

    There are none if the run has no folder for a report, or if it was interrupted: the user should not have to wait.

    Args:
        record: record of the run.
        plan: plan of the run.
    """
    if plan.request.out is None or record.is_abandoned:
        return record
    wanted: dict[tuple[Task, Verdict], CheckResult] = {}
    for result in record.results:
        if result.verdict in END_VERDICTS and result.name in record.plan.get(result.task, ()):
            wanted.setdefault((result.task, result.verdict), result)
    chosen = [result for result in wanted.values() if not result.reproducer][:MAX_REPRODUCERS]
    made: dict[tuple[Task, str], str] = {}
    for number, r in enumerate(chosen, 1):
        _announce(f"Repeating a check that ended its worker ({number} of {len(chosen)}): {r.task}: {r.name}")
        made[r.task, r.name] = record_crash(r, make_setup(plan))
    results = [replace(r, reproducer=made.get((r.task, r.name)) or r.reproducer) for r in record.results]
    return replace(record, results=results)


def _announce(line: str) -> None:
    if not is_quiet():
        progress_console().print(line, markup=False, soft_wrap=True)


def record_crash(result: CheckResult, setup: WorkerSetup) -> str:
    """Run a check again until it dies; return the path of its reproducer, or nothing if it survives or wrote none."""
    path = f"{CASES_FOLDER}/{make_case_name(result.task, f'{result.task} {result.name}'.encode())}"
    file = Path(setup.out) / path
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        request = {
            "setup": replace(setup, folder=folder).as_json(),
            "task": asdict(result.task),
            "check": result.name,
            "verdict": str(result.verdict),
            "message": result.comparison.message,
            "file": str(file),
        }
        _run_in_process(json.dumps(request).encode(), START_TIMEOUT_S + setup.profile.case_seconds)
    return path if file.exists() else ""


def _run_in_process(request: bytes, seconds: float) -> None:
    """Run this module on a request; after a timeout, kill it and all processes that the target has started."""
    command = [sys.executable, "-m", "clika_ref_conformance.reporting.crash_reproducers"]
    process = subprocess.Popen(  # noqa: S603 - this interpreter on this module
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(request, timeout=seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> None:
    """Read a request, run its check, and write each case before it is run."""
    request = json.load(sys.stdin)
    setup, suite = start_suite(request["setup"])
    task = Task.of_json(request["task"])
    limit_memory(setup.profile.memory_bytes)
    comparison = Comparison(Verdict(request["verdict"]), request["message"])

    def write(outcome: Outcome) -> None:
        content = make_reproducer(outcome, task, suite, setup.target)
        with write_atomically(request["file"]) as file:
            file.write(content)
        faulthandler.dump_traceback_later(setup.profile.case_seconds, exit=True)  # a hang ends like a crash

    def write_case(graph: Graph, inputs: Sequence[torch.Tensor]) -> None:
        case = GraphCase(
            request["check"], graph, [CaseRun("last", tuple(inputs))] if inputs or not graph.inputs else []
        )
        write(Outcome(request["check"], comparison, "last", case))

    recording_suite: Suite = replace(suite, target=RecordingTarget(suite.target, write_case))  # pyright: ignore[reportArgumentType]
    for check in import_level(setup.levels[task.level]).checks(task, recording_suite):
        if check.name == request["check"]:
            write(Outcome(check.name, comparison))  # of the check itself, if it dies before the target is called
            check.run()
            faulthandler.cancel_dump_traceback_later()
            Path(request["file"]).unlink(missing_ok=True)  # survived; exit status 0 would not prove it


if __name__ == "__main__":
    main()
