"""L2p: every pair of the most-used operators, as a chain, as a chain with an extra output, and in parallel."""

from __future__ import annotations

from collections.abc import Sequence

from clika_ref_conformance.cases import Check, Task
from clika_ref_conformance.drawing.graphs.demand import in_demand, of_strangers, partners
from clika_ref_conformance.drawing.graphs.pairs import Pairing
from clika_ref_conformance.execution.packing import packed_checks
from clika_ref_conformance.suite import Suite

LEVEL = "pairs"


def tasks(suite: Suite) -> list[Task]:
    """Return one task for each first operator: the most-used ones, then those of other plugins."""
    firsts = [*in_demand(suite.registry, suite.profile.pair_operators), *of_strangers(suite.registry)]
    return [Task(LEVEL, op.name, "float32") for op in firsts]


def checks(task: Task, suite: Suite) -> Sequence[Check]:
    """Return one check, in packs, for each graph of two calls with this operator first."""
    first = suite.registry.operators[task.subject]
    pairing = Pairing(first, suite.profile.seed)
    seconds = partners(suite.registry, first, suite.profile.pair_operators)
    names = [op.name for op in seconds]
    later = names[names.index(first.name) :] if first.name in names else names  # parallel calls have no order
    cases = [case for op in seconds for case in pairing.cases(op, fork=op.name in later)]
    return packed_checks(cases, suite)
