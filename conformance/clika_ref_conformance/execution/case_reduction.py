"""Checks of the cases of one task, with reduction of failing cases."""

from __future__ import annotations

import functools
import time
from dataclasses import replace

from clika_ref_conformance.cases import Check, GraphCase, Outcome
from clika_ref_conformance.drawing.reducing.graphs import reduce_case
from clika_ref_conformance.execution.case_checks import run_case
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.verdicts import Reason, make_not_run

NO_NODES_MESSAGE = "the target rejects every call that was drawn for the graph"
"""Reason why a case without nodes is not run."""


class CaseBatch:
    """Checks of one task. Reduction has a time budget: later failures are mostly repetitions of earlier ones."""

    def __init__(self, suite: Suite) -> None:
        self.suite = suite
        self.seconds = suite.profile.shrink_seconds
        """Seconds left for all reductions of the task."""

    def check(self, case: GraphCase) -> Check:
        """Return the check of a case."""
        return Check(case.name, functools.partial(self.judge, case))

    def judge(self, case: GraphCase) -> Outcome:
        """Judge a case, and reduce a failure to the failing nodes.

        A graph without nodes is not run, as it would only return its inputs.
        """
        if not len(case.graph):
            return Outcome(case.name, make_not_run(Reason.NO_NODES, NO_NODES_MESSAGE))
        found = run_case(case, self.suite)
        if not found.verdict.is_failure or self.seconds <= 0:
            return found
        start = time.monotonic()
        small = reduce_case(case, lambda c: run_case(c, self.suite).verdict is found.verdict, self.seconds)
        self.seconds -= time.monotonic() - start
        return replace(run_case(small, self.suite), name=case.name)
