"""Cases of one task, of which those that fail are made small."""

from __future__ import annotations

import functools
import time
from dataclasses import replace

from clika_ref_conformance.cases import Case, Check, Outcome
from clika_ref_conformance.drawing.reducing.graphs import reduce_case
from clika_ref_conformance.execution.case_checks import run_case
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.verdicts import Reason, not_run

NO_NODES = "the target refuses every call that was drawn for the graph"
"""Why a case without nodes is not run."""


class Batch:
    """The checks of one task, of which few failures are made small: what fails later is most often the same again."""

    def __init__(self, suite: Suite) -> None:
        self.suite = suite
        self.seconds = suite.profile.shrink_seconds
        """What is left for all reductions of the task."""

    def check(self, case: Case) -> Check:
        """Return the check of a case."""
        return Check(case.name, functools.partial(self.outcome, case))

    def outcome(self, case: Case) -> Outcome:
        """Judge a case, and cut it to the nodes that fail; a graph without nodes would only pass its inputs on."""
        if not len(case.graph):
            return Outcome(case.name, not_run(Reason.NO_NODES, NO_NODES))
        found = run_case(case, self.suite)
        if not found.verdict.is_failure or self.seconds <= 0:
            return found
        start = time.monotonic()
        small = reduce_case(case, lambda c: run_case(c, self.suite).verdict is found.verdict, self.seconds)
        self.seconds -= time.monotonic() - start
        return replace(run_case(small, self.suite), name=case.name)
