"""Read a reproducer and judge it again: the zip has graph and inputs, and this installation eager and the judge."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import safetensors.torch
from safetensors import SafetensorError

from clika_ref.core.errors import ModelError, PassError
from clika_ref.core.invariants import verify
from clika_ref.core.passes import sort_passes
from clika_ref.core.registry import Registry
from clika_ref.serialization.graph_format import decode, graph_from_json
from clika_ref_conformance.cases import CaseRun, GraphCase, Outcome, Task
from clika_ref_conformance.deviations import read_declarations
from clika_ref_conformance.drawing.motifs.rebuilding import SUITE_OPERATORS
from clika_ref_conformance.execution.case_checks import run_case
from clika_ref_conformance.execution.check_runner import BROKEN_PLAN_CHECK, check_torch_state, plan_checks, run_check
from clika_ref_conformance.execution.levels import LEVELS, import_level
from clika_ref_conformance.execution.messages import WorkerSetup
from clika_ref_conformance.judging.pass_rules import check_passes
from clika_ref_conformance.profiles import PROFILES, Profile
from clika_ref_conformance.reproducing.archives import MAX_UNPACKED_BYTES, unpack
from clika_ref_conformance.reproducing.errors import ReportError
from clika_ref_conformance.reproducing.reproducers import REPRODUCER_FORMAT
from clika_ref_conformance.reproducing.tensors import from_npz, rebuild_tensor
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.targets.loading import load_target
from clika_ref_conformance.verdicts import Reason, make_not_run

RANDOM_ORDERS = 50
"""Orders of all passes to try if a random one had failed, since the zip does not store it."""

MAX_CASE_SECONDS = 86_400.0
"""Maximum time limit of a check, a day; timers may not accept more."""

MAX_MEMORY_BYTES = 2**62
"""Maximum memory limit of a process; the system may not accept more."""


@dataclass(frozen=True)
class Reproducer:
    """Content of a reproducer, without its script, which is never run here."""

    path: Path
    task: Task
    check: str
    case: GraphCase
    target: str
    verdict: str
    message: str
    profile: Profile
    """Profile of the run, so that a repeated check draws the same calls."""
    repeats_check: bool
    """Whether to repeat the check itself: there was no case, and ``case`` is empty."""


def replay(path: Path, registry: Registry, target: str = "") -> Outcome:
    """Run the case of a reproducer once more and judge it.

    Args:
        path: a ``CASE.zip`` that a run has written.
        registry: the operators, passes and targets in force.
        target: another target, as for ``clika-ref conformance run``; by default the one that failed.

    Raises:
        ReportError: the zip is damaged, or names code that only the user may select for import.
        TargetError: there is no such target.
    """
    found = read_reproducer(path, registry)
    name = target or found.target
    if not target and ":" in name:
        # A file must not select a module to import.
        raise ReportError(
            f"cannot replay {path}: a zip must not select code to import. Give its target yourself: --target {name}"
        )
    with TemporaryDirectory() as folder:
        tested = load_target(name, registry)
        deviations = read_declarations(tested, registry, name).deviations
        setup = WorkerSetup(name, found.profile, {}, folder, path=tuple(map(os.path.abspath, sys.path))).as_json()
        suite = Suite(registry, tested, found.profile, Path(folder), deviations=deviations, setup=setup)
        again = _REPEAT_BY_LEVEL.get(found.task.level, lambda one, suite: run_case(one.case, suite))
        again = _repeat_check if found.repeats_check else again
        return check_torch_state(replace(again(found, suite), name=found.check))


def _repeat_check(found: Reproducer, suite: Suite) -> Outcome:
    """Repeat the check that produced the finding."""
    if found.task.level not in LEVELS:
        raise ReportError(
            f"cannot replay {found.path}: there is no level {found.task.level!r}. Levels are {', '.join(LEVELS)}."
        )
    checks = [check for check in plan_checks(found.task, suite) if check.name in (found.check, BROKEN_PLAN_CHECK)]
    if not checks:
        message = f"the task {found.task} no longer has the check {found.check!r}"
        return Outcome(found.check, make_not_run(Reason.NO_LONGER_PLANNED, message))
    return run_check(checks[0])


def _repeat_pass(found: Reproducer, suite: Suite) -> Outcome:
    """Check the pass of a task, or all passes in the orders of its check, by the rules for passes again."""
    passes = suite.passes
    if found.task.subject not in passes:
        raise ReportError(f"cannot replay {found.path}: there is no pass {found.task.subject!r}. Install its plugin.")
    every, random = sort_passes(list(passes.values())), Random(0)  # noqa: S311 - test data, not cryptography
    orders = {
        "pipeline order": [[*every, *every]],
        "random order": [random.sample(every, len(every)) for _ in range(RANDOM_ORDERS)],
    }.get(found.check, [[passes[found.task.subject]]])
    findings = [check_passes(order, suite.registry.operators, found.case) for order in orders]
    worst = next((f for f in findings if f.comparison.verdict.is_failure), findings[0])
    return Outcome(found.check, worst.comparison, worst.run, found.case)


def _repeat_artifact(found: Reproducer, suite: Suite) -> Outcome:
    """Transfer the artifact to another process again."""
    level: Any = import_level(LEVELS[found.task.level])  # imported lazily: it imports Hypothesis
    return level.ArtifactChecks(suite).transfer(found.case)


_REPEAT_BY_LEVEL: Mapping[str, Callable[[Reproducer, Suite], Outcome]] = {
    "passes": _repeat_pass,
    "artifacts": _repeat_artifact,
}
"""Levels that do not compare a compiled graph with eager."""


def read_reproducer(path: Path, registry: Registry) -> Reproducer:
    """Read a reproducer; nothing in it is executed.

    Raises:
        ReportError: it is damaged, of another format, or uses an operator that no installed plugin declares.
    """
    files = unpack(path)
    try:
        meta = json.loads(files["meta.json"])
        _check_format(meta["format"])
        case = _read_case(files, meta, registry)
        task = Task.of_json(meta["task"])
        texts = [meta[key] for key in ("target", "verdict", "message", "check")]
        profile = _read_profile(meta)
    except (ModelError, PassError, ReportError) as error:
        raise ReportError(str(error) if str(path) in str(error) else f"cannot replay {path}: {error}") from error
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, SafetensorError, RecursionError) as error:
        raise ReportError(f"cannot replay {path}: it is damaged ({type(error).__name__}: {error})") from error
    target, verdict, message, check = map(str, texts)
    return Reproducer(path, task, check, case, target, verdict, message, profile, bool(meta["repeats_check"]))


def _read_profile(meta: Mapping[str, Any]) -> Profile:
    """Return the profile of the run, but without trusting eager: a replay has the time for exact arithmetic."""
    known = PROFILES.get(str(meta.get("profile")), Profile("replay"))
    seconds = float(meta.get("limit_seconds", known.case_seconds))
    if not 0 < seconds <= MAX_CASE_SECONDS:
        raise ReportError(f"limit_seconds is {seconds}, not a time of at most a day")
    memory = int(meta.get("limit_bytes", known.memory_bytes))
    if not 0 <= memory <= MAX_MEMORY_BYTES:
        raise ReportError(f"limit_bytes is {memory}, not a number of bytes")
    limits = {"case_seconds": seconds, "memory_bytes": memory}
    return replace(known, seed=int(meta.get("seed", 0)), trusts_eager=False, **limits)


def _check_format(written: int) -> None:
    if written != REPRODUCER_FORMAT:
        remedy = "Update it." if written > REPRODUCER_FORMAT else "A development version wrote it; run again."
        raise ReportError(f"it has format {written}, but this suite reads format {REPRODUCER_FORMAT}. {remedy}")


def _read_case(files: Mapping[str, bytes], meta: Mapping[str, Any], registry: Registry) -> GraphCase:
    weights = safetensors.torch.load(files["weights.safetensors"])
    operators = {**SUITE_OPERATORS, **registry.operators}
    graph = graph_from_json(json.loads(files["graph.json"]), operators.get, weights)
    verify(graph)
    arrays = from_npz(files["inputs.npz"], "inputs.npz", MAX_UNPACKED_BYTES)
    runs = [_read_run(entry, index, arrays) for index, entry in enumerate(meta["runs"])]
    for run in runs:
        if len(run.inputs) != len(graph.inputs):
            raise ReportError(
                f"the run {run.name!r} has {len(run.inputs)} inputs, but its graph has {len(graph.inputs)}"
            )
    facts = {str(key): decode(value) for key, value in meta["facts"].items()}
    return GraphCase(str(meta["case"]), graph, runs, facts, passes=bool(meta["passes"]))


def _read_run(entry: Mapping[str, Any], index: int, arrays: Mapping[str, np.ndarray]) -> CaseRun:
    inputs = [rebuild_tensor(layout, arrays[f"run{index}_input{i}"]) for i, layout in enumerate(entry["inputs"])]
    return CaseRun(str(entry["name"]), tuple(inputs))
