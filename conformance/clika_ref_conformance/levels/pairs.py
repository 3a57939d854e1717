"""L2p: every pair of the most-used operators, as a chain, as a chain with an extra output, and in parallel."""

from __future__ import annotations

from collections.abc import Sequence

from clika_ref_conformance.cases import Check, Task
from clika_ref_conformance.drawing.graphs.frequent_operators import (
    select_foreign_operators,
    select_frequent_operators,
    select_partners,
)
from clika_ref_conformance.drawing.graphs.pairs import OperatorPairs
from clika_ref_conformance.execution.case_packs import make_packed_checks
from clika_ref_conformance.suite import Suite

LEVEL = "pairs"


def tasks(suite: Suite) -> list[Task]:
    """Return one task for each first operator: the most-used ones, then those of other plugins."""
    firsts = [
        *select_frequent_operators(suite.registry, suite.profile.pair_operators),
        *select_foreign_operators(suite.registry),
    ]
    return [Task(LEVEL, op.name, "float32") for op in firsts]


def checks(task: Task, suite: Suite) -> Sequence[Check]:
    """Return one check, in packs, for each graph of two calls with this operator first."""
    first = suite.registry.operators[task.subject]
    pairing = OperatorPairs(first, suite.profile.seed)
    seconds = select_partners(suite.registry, first, suite.profile.pair_operators)
    names = [op.name for op in seconds]
    later = names[names.index(first.name) :] if first.name in names else names  # parallel calls have no order
    cases = [case for op in seconds for case in pairing.make_cases(op, fork=op.name in later)]
    return make_packed_checks(cases, suite)
