"""A case as a check: compile it, load it, run it on every set of inputs, and let the judge compare."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from clika_ref_conformance.cases import Case, Check, Outcome
from clika_ref_conformance.judging.judge import Reference
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.verdicts import Comparison, Verdict


def case_check(name: str, suite: Suite, make: Callable[[], Case]) -> Check:
    """Return the check that makes a case and holds the target against eager on it."""
    return Check(name, lambda: replace(run_case(make(), suite), name=name))


def run_case(case: Case, suite: Suite) -> Outcome:
    """Compile a case for the target, run it on all its inputs and judge what comes back."""
    start = time.perf_counter()
    for node in case.graph.nodes:
        reason = suite.target.refusal(node)
        if reason is not None:
            return Outcome(case.name, Comparison(Verdict.UNSUPPORTED, reason), case=case)
    with TemporaryDirectory(dir=suite.folder) as folder:
        artifact = suite.target.compile(case.graph.clone(), Path(folder) / "model.onnx")
        runner = suite.target.load(artifact)
        worst = Comparison(Verdict.PASS)
        for run in case.runs:
            found = Reference(case.graph, run.inputs).judge(runner(run.inputs))
            if found.verdict.is_failure:
                return Outcome(case.name, found, run.name, case, seconds=time.perf_counter() - start)
            worst = max(worst, found, key=lambda c: c.ratio)
    return Outcome(case.name, worst, seconds=time.perf_counter() - start)
