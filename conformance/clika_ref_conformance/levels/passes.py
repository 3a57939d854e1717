"""L2: every pass, on graphs that trigger it and on near misses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from random import Random

from clika_ref.core.passes import Pass, Pipeline, sort_passes
from clika_ref_conformance.cases import Check, GraphCase, Outcome, Task
from clika_ref_conformance.drawing.motifs import near_misses, similar_parts
from clika_ref_conformance.drawing.motifs.dynamic_dims import make_dims_dynamic
from clika_ref_conformance.drawing.motifs.hosts import embed_motif
from clika_ref_conformance.drawing.motifs.motif_search import Motifs, find_motifs
from clika_ref_conformance.drawing.motifs.optional_operands import change_optional_operands
from clika_ref_conformance.drawing.motifs.pass_operators import find_operator_groups
from clika_ref_conformance.drawing.motifs.varying import redraw_call, substitute_random_operators
from clika_ref_conformance.drawing.reducing.graphs import reduce_case
from clika_ref_conformance.judged_dtypes import check_judged_dtypes
from clika_ref_conformance.judging.pass_rules import PassFinding, check_passes, find_copies
from clika_ref_conformance.levels.hash_seeds import digest_in_other_process, digest_text, run_on_random_graphs
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.verdicts import Comparison, Verdict

LEVEL = "passes"

CALL_CHANGES: dict[str, near_misses.NearMissMaker] = {
    "attribute changed": near_misses.change_attribute,
    "operands swapped": near_misses.swap_operands,
    "scalar changed": near_misses.change_scalar,
    "dtype changed": near_misses.change_dtype,
    "special elements": near_misses.insert_special_elements,
    "large constants": near_misses.enlarge_constants,
    "similar literals": similar_parts.use_similar_literals,
    "equal dims": similar_parts.equalize_dims,
    "cast round trips": similar_parts.cast_round_trips,
    "call redrawn": redraw_call,
    "operand added or omitted": change_optional_operands,
}
"""Changes to the calls of a motif, and functions that create the graphs; for drawn motifs and their variations."""

SURROUNDING_CHANGES: dict[str, near_misses.NearMissMaker] = {
    "another reader": near_misses.add_reader,
    "repeated": near_misses.repeat_motif,
    "outputs changed": near_misses.change_outputs,
    "leaves changed": near_misses.change_leaves,
    "similar constants": similar_parts.add_similar_constants,
    "signed zeros": similar_parts.divide_by_signed_zeros,
    "similar calls": similar_parts.add_similar_calls,
    "random operators": substitute_random_operators,
    "dynamic dims": make_dims_dynamic,
}
"""Changes around a motif, mostly independent of its calls: for drawn motifs only."""

GRAPHS_PER_DRAW = 75
"""The profile's random graphs per pass, divided by this, are the draws of each call: 2 in ``quick``."""

GRAPHS_PER_MOTIF = 15
"""The profile's random graphs per pass, divided by this, are the motifs per goal: 10 for the 150 of ``quick``."""


MIN_NEAR_MISSES_PER_MOTIF = 2
"""Minimum number of near misses of each kind per motif, if there are too many motifs for all to have more."""

MIN_MOTIFS = 10
"""Minimum number of motifs per goal, for few random graphs: the first motifs found are the simplest."""

MAX_SEARCH_GRAPHS = 300
"""Half the number of unsuccessful chains after which the search for motifs ends, in profiles with more random graphs.

The search finds 51 motifs of fold-batch-norm before 600 chains bring none, in half a minute. Searching longer took
``ci`` seven minutes.
"""

HASH_SEEDS_SUBJECT = "hash seeds"
"""Task that runs all installed passes in a second process with another iteration order of sets."""


def tasks(suite: Suite) -> list[Task]:
    """Return one task for each pass, and one for the order of sets."""
    return [*(Task(LEVEL, name) for name in sorted(suite.passes)), Task(LEVEL, HASH_SEEDS_SUBJECT)]


def checks(task: Task, suite: Suite) -> Sequence[Check]:
    """Return the checks of a pass; motifs are searched when the first of them runs."""
    if task.subject == HASH_SEEDS_SUBJECT:
        return [Check(HASH_SEEDS_SUBJECT, partial(check_hash_seeds, suite))]
    one = PassChecks(suite.passes[task.subject], suite)
    redraw = partial(redraw_call, draws=suite.profile.pass_graphs // GRAPHS_PER_DRAW)
    listed_changes: dict[str, near_misses.NearMissMaker] = {
        "listed call redrawn": redraw,  # errors of one operator of a long table show only with some attributes
        "listed attribute changed": near_misses.change_attribute_sort,
    }
    near_miss_checks = {
        name: one.make_near_miss_check(change, motifs)
        for changes, motifs in (
            (CALL_CHANGES, lambda: [*one.motifs.cases, *one.motifs.varied]),
            (listed_changes, lambda: one.motifs.listed),
            (SURROUNDING_CHANGES, lambda: one.motifs.cases),
        )
        for name, change in changes.items()
    }
    named: dict[str, Callable[[], Outcome]] = {
        "fires": one.check_fires,
        "motifs": lambda: one.check([*one.motifs.cases, *one.motifs.varied, *one.motifs.listed]),
        **near_miss_checks,
        "random graphs": lambda: one.check(one.draw_hosts("random", suite.profile.pass_graphs)),
        "pipeline order": one.check_pipeline_order,
        "random order": one.check_random_order,
    }
    return [Check(name, run) for name, run in named.items()]


def check_hash_seeds(suite: Suite) -> Outcome:
    """Fail if the result of an installed pass depends on the iteration order of sets."""
    seed = suite.profile.seed
    elsewhere = digest_in_other_process(sorted(suite.registry.passes), seed)
    for name, others in elsewhere.items():
        here = run_on_random_graphs(suite.registry.passes[name], suite.registry.operators, seed)
        for text, other in zip(here, others, strict=False):
            if digest_text(text) != other:
                message = f"{name}: the result differs under another PYTHONHASHSEED:\n{text}"
                return Outcome("", Comparison(Verdict.NONDETERMINISTIC, message))
    return Outcome(
        "", Comparison(Verdict.PASS, f"{sum(map(len, elsewhere.values()))} graphs of {len(elsewhere)} passes")
    )


def _interleave(sources: Iterable[Iterator[GraphCase]]) -> Iterator[GraphCase]:
    """Yield cases from the sources in turn, until all of them are exhausted."""
    left = list(sources)
    while left:
        taken = [(source, next(source, None)) for source in left]
        yield from (case for _, case in taken if case is not None)
        left = [source for source, case in taken if case is not None]


@dataclass
class PassChecks:
    """Checks of one pass, with its motifs, which are searched once."""

    p: Pass
    suite: Suite

    @property
    def _operators(self):  # noqa: ANN202 - a mapping of operators
        return self.suite.registry.operators

    @cached_property
    def motifs(self) -> Motifs:
        """Motifs of the pass; their number depends on the profile."""
        graphs = self.suite.profile.pass_graphs
        wanted, patience = max(MIN_MOTIFS, graphs // GRAPHS_PER_MOTIF), 2 * min(graphs, MAX_SEARCH_GRAPHS)
        seed = self.suite.profile.seed
        return find_motifs(
            self.p, self._operators, seed=seed, motif_count=wanted, tries=10 * patience, patience=patience
        )

    def check_fires(self) -> Outcome:
        """Fail if the pass, or a rule of it, fires on no graph that was found."""
        silent = self.motifs.unreached_goals
        if not silent:
            found = f"{len(self.motifs.cases)} motifs from {self.motifs.tried} chains"
            message = f"{found}, and {len(self.motifs.varied)} variants of them"
            return Outcome("", Comparison(Verdict.PASS, message))
        message = (
            f"{self.p.name}: {' and '.join(silent)} fired on none of {self.motifs.tried} chains of drawn calls. If it "
            "can fire, declare `motifs`: a tuple of functions from a builder to the outputs of a graph."
        )
        return Outcome("", Comparison(Verdict.CONTRACT, message))

    def make_near_miss_check(
        self, makes: near_misses.NearMissMaker, motifs: Callable[[], Sequence[GraphCase]]
    ) -> Callable[[], Outcome]:
        """Return the check of the pass on one kind of near misses of its motifs, which take turns.

        Judging a pass that may round takes ten times as long as one that may not. Such a pass gets at most half as many
        near misses as there are random graphs, or some per motif if there are more motifs.
        """
        graphs = self.suite.profile.pass_graphs

        def of_motif(motif: GraphCase) -> Iterator[GraphCase]:
            every = islice(makes(motif, self._operators), graphs // 2)
            return (replace(c, name=f"{motif.name}, {c.name}") for c in every if c is not None)

        def run() -> Outcome:
            known = motifs()
            limit = None if self.p.error.kind == "exact" else max(graphs // 2, MIN_NEAR_MISSES_PER_MOTIF * len(known))
            return self.check(islice(_interleave(map(of_motif, known)), limit))

        return run

    def check_pipeline_order(self) -> Outcome:
        """Check every pass in pipeline order, twice, on random graphs with the motifs of this one.

        The passes must reach a fixed point, and leave no copy of a weight that several nodes share.
        """
        passes = sort_passes(list(self.suite.passes.values()))

        def check(case: GraphCase) -> PassFinding:
            found = check_passes([*passes, *passes], self._operators, case)
            if found.comparison.verdict.is_failure:
                return found
            graph = case.graph.clone()
            try:
                Pipeline(passes, self._operators).run(graph)
            except Exception as error:  # noqa: BLE001 - a pass may raise anything
                return PassFinding(Comparison(Verdict.CONTRACT, f"the pipeline fails: {error}\non:\n{case.graph}"))
            copied = next(find_copies(case.graph, graph, may_replace=True), "")
            return PassFinding(Comparison(Verdict.CONTRACT, f"{copied}\n{graph}")) if copied else found

        return self.check(self.draw_hosts("pipeline", self.suite.profile.pass_graphs // 10), check)

    def check_random_order(self) -> Outcome:
        """Check every pass in random orders on random graphs with the motifs of this one."""
        random = Random(f"{self.p.name}-order-{self.suite.profile.seed}")  # noqa: S311 - test data, not cryptography
        passes = [p for _, p in sorted(self.suite.passes.items())]

        def check(case: GraphCase) -> PassFinding:
            return check_passes(random.sample(passes, len(passes)), self._operators, case)

        return self.check(self.draw_hosts("order", self.suite.profile.pass_graphs // 10), check)

    def draw_hosts(self, purpose: str, count: int) -> Iterator[GraphCase]:
        """Yield random graphs with the motifs of the pass."""
        random = Random(f"{self.p.name}-{purpose}-{self.suite.profile.seed}")  # noqa: S311 - test data, not cryptography
        groups = find_operator_groups(self.p, self._operators)
        for number in range(count if self.motifs.cases else 0):
            motif = self.motifs.cases[number % len(self.motifs.cases)]
            case = embed_motif(random, motif, self._operators, groups)
            if case is not None:
                yield case

    def check(self, cases: Iterable[GraphCase], check: Callable[[GraphCase], PassFinding] | None = None) -> Outcome:
        """Check the pass on cases until one fails, and reduce that one as far as possible."""
        judge = check or partial(check_passes, [self.p], self._operators)
        count = fired = 0
        worst, run = Comparison(Verdict.PASS), ""
        left_out: Comparison | None = None
        for case in cases:
            other = check_judged_dtypes(case.graph)
            if other is not None:
                left_out = other
                continue
            found = judge(case)
            count, fired = count + 1, fired + found.fired
            if found.comparison.verdict.is_failure:
                return self._reduce_failure(case, found, judge)
            if found.comparison.verdict is Verdict.PASS and found.comparison.ratio > worst.ratio:
                worst, run = found.comparison, f"{case.name}, {found.run}"
        if left_out is not None and not count:
            return Outcome("", left_out)
        return Outcome("", replace(worst, message=f"fired on {fired} of {count} graphs"), run)

    def _reduce_failure(
        self, case: GraphCase, found: PassFinding, judge: Callable[[GraphCase], PassFinding]
    ) -> Outcome:
        def fails(smaller: GraphCase) -> bool:
            return judge(smaller).comparison.verdict is found.comparison.verdict

        if fails(case):  # random orders are drawn again
            case = reduce_case(case, fails, self.suite.profile.shrink_seconds)
            found = judge(case)
        return Outcome("", found.comparison, f"{case.name}, {found.run}", case)
