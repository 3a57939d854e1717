"""L2: every pass, on graphs that trigger it and on near misses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from random import Random

from clika_ref.core.passes import Pass, Pipeline, ordered
from clika_ref_conformance.cases import Case, Check, Outcome, Task
from clika_ref_conformance.drawing.motifs import alike, near_misses
from clika_ref_conformance.drawing.motifs.finding import Motifs, find_motifs
from clika_ref_conformance.drawing.motifs.freed_sides import sides_freed
from clika_ref_conformance.drawing.motifs.hosts import host
from clika_ref_conformance.drawing.motifs.mentions import mentions
from clika_ref_conformance.drawing.motifs.optional_operands import operand_given_or_taken
from clika_ref_conformance.drawing.motifs.varying import call_redrawn, random_instead
from clika_ref_conformance.drawing.reducing.graphs import reduce_case
from clika_ref_conformance.judged_dtypes import unjudged_in
from clika_ref_conformance.judging.pass_rules import Finding, check_pass, check_passes, copies
from clika_ref_conformance.levels.hash_seeds import digest, digests_elsewhere, results
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.verdicts import Comparison, Verdict

LEVEL = "passes"

OF_CALLS: dict[str, near_misses.Makes] = {
    "attribute changed": near_misses.attribute_changed,
    "operands swapped": near_misses.operands_swapped,
    "scalar changed": near_misses.scalar_changed,
    "dtype changed": near_misses.dtype_changed,
    "special elements": near_misses.special_elements,
    "large constants": near_misses.large_constants,
    "literals alike": alike.literals_alike,
    "sides alike": alike.sides_alike,
    "round trips": alike.round_trips,
    "call redrawn": call_redrawn,
    "operand given or taken": operand_given_or_taken,
}
"""Changes to the calls of a motif, and functions that create the graphs; for drawn motifs and their variations."""

OF_SURROUNDINGS: dict[str, near_misses.Makes] = {
    "read elsewhere": near_misses.read_elsewhere,
    "repeated": near_misses.repeated,
    "outputs changed": near_misses.outputs_changed,
    "leaves changed": near_misses.leaves_changed,
    "constants alike": alike.constants_alike,
    "numbers alike": alike.numbers_alike,
    "calls alike": alike.calls_alike,
    "random instead": random_instead,
    "side freed": sides_freed,
}
"""Changes around a motif, mostly independent of its calls: for drawn motifs only."""

LISTED = "listed call redrawn"
"""Call changes for each operator in a long table: errors of one operator show only with some attributes."""

LISTED_SORTS = "listed attribute of another sort"
"""Call changes to one attribute of such operators: a longer or shorter tuple, a number that is 0 or negative."""

GRAPHS_PER_DRAW = 75
"""The profile's random graphs per pass, divided by this, are the draws of each call: 2 in ``quick``."""

GRAPHS_PER_MOTIF = 15
"""The profile's random graphs per pass, divided by this, are the motifs per goal: 10 for the 150 of ``quick``."""


NEAR_EACH = 2
"""Minimum number of near misses of each kind per motif, if there are too many motifs for all to have more."""

FEWEST_MOTIFS = 10
"""Minimum number of motifs per goal, for few random graphs: the first motifs found are the simplest."""

MOST_SEARCHED = 300
"""Half the number of unsuccessful chains after which the search for motifs ends, in profiles with more random graphs.

The search finds 51 motifs of fold-batch-norm before 600 chains bring none, in half a minute. Searching longer took
``ci`` seven minutes.
"""

HASH_SEEDS = "hash seeds"
"""Task that runs all installed passes in a second process with another iteration order of sets."""


def passes_of(suite: Suite) -> dict[str, Pass]:
    """Return the registered passes and those that the target adds, by name."""
    return {**suite.registry.passes, **{p.name: p for p in suite.target.passes()}}


def tasks(suite: Suite) -> list[Task]:
    """Return one task for each pass, and one for the order of sets."""
    return [*(Task(LEVEL, name) for name in sorted(passes_of(suite))), Task(LEVEL, HASH_SEEDS)]


def checks(task: Task, suite: Suite) -> Sequence[Check]:
    """Return the checks of a pass; motifs are searched when the first of them runs."""
    if task.subject == HASH_SEEDS:
        return [Check(HASH_SEEDS, _timed(HASH_SEEDS, lambda: hash_seeds(suite)))]
    trial = Trial(passes_of(suite)[task.subject], suite)
    named: list[tuple[str, Callable[[], Outcome]]] = [("fires", trial.fires), ("motifs", trial.motifs_kept)]
    named += [(name, trial.near_miss(makes, trial.drawn_and_varied)) for name, makes in OF_CALLS.items()]
    named += [(LISTED, trial.near_miss(trial.listed_redrawn, lambda: trial.motifs.listed))]
    named += [(LISTED_SORTS, trial.near_miss(near_misses.attribute_of_another_sort, lambda: trial.motifs.listed))]
    named += [(name, trial.near_miss(makes, lambda: trial.motifs.cases)) for name, makes in OF_SURROUNDINGS.items()]
    named += [("random graphs", trial.random_graphs), ("pipeline order", trial.pipeline_order)]
    named += [("random order", trial.random_order)]
    return [Check(name, _timed(name, run)) for name, run in named]


def _timed(name: str, run: Callable[[], Outcome]) -> Callable[[], Outcome]:
    def timed() -> Outcome:
        start = time.perf_counter()
        return replace(run(), name=name, seconds=time.perf_counter() - start)

    return timed


def hash_seeds(suite: Suite) -> Outcome:
    """Fail if the result of an installed pass depends on the iteration order of sets."""
    seed = suite.profile.seed
    elsewhere = digests_elsewhere(sorted(suite.registry.passes), seed)
    for name, others in elsewhere.items():
        here = results(suite.registry.passes[name], suite.registry.operators, seed)
        for text, other in zip(here, others, strict=False):
            if digest(text) != other:
                message = f"{name}: under another PYTHONHASHSEED the result is another one than here:\n{text}"
                return Outcome("", Comparison(Verdict.NONDETERMINISTIC, message))
    return Outcome(
        "", Comparison(Verdict.PASS, f"{sum(map(len, elsewhere.values()))} graphs of {len(elsewhere)} passes")
    )


def _in_turn(sources: Iterable[Iterator[Case]]) -> Iterator[Case]:
    """Yield cases from the sources in turn, until all of them are exhausted."""
    left = list(sources)
    while left:
        taken = [(source, next(source, None)) for source in left]
        yield from (case for _, case in taken if case is not None)
        left = [source for source, case in taken if case is not None]


@dataclass
class Trial:
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
        wanted, patience = max(FEWEST_MOTIFS, graphs // GRAPHS_PER_MOTIF), 2 * min(graphs, MOST_SEARCHED)
        seed = self.suite.profile.seed
        return find_motifs(self.p, self._operators, seed=seed, wanted=wanted, tries=10 * patience, patience=patience)

    def fires(self) -> Outcome:
        """Fail if the pass, or a rule of it, fires on no graph that was found."""
        silent = self.motifs.silent
        if not silent:
            found = f"{len(self.motifs.cases)} motifs of {self.motifs.tried} chains"
            message = f"{found}, and {len(self.motifs.varied)} varied from them"
            return Outcome("", Comparison(Verdict.PASS, message))
        message = (
            f"{self.p.name}: no graph was found on which {' and '.join(silent)} fires ({self.motifs.tried} chains of "
            "drawn calls were tried). Either it cannot fire, or the samples of its operators never draw what it looks "
            "for; show the suite how with `motifs`, a tuple of functions from a builder to the outputs of a graph"
        )
        return Outcome("", Comparison(Verdict.CONTRACT, message))

    def motifs_kept(self) -> Outcome:
        """Check the pass on its motifs."""
        return self._check([*self.motifs.cases, *self.motifs.varied, *self.motifs.listed])

    def drawn_and_varied(self) -> Sequence[Case]:
        """Return the motifs for near misses of calls."""
        return [*self.motifs.cases, *self.motifs.varied]

    def listed_redrawn(self, case: Case, operators: near_misses.Operators) -> Iterator[Case | None]:
        """Redraw each call of a motif, as often as the profile allows."""
        return call_redrawn(case, operators, draws=self.suite.profile.pass_graphs // GRAPHS_PER_DRAW)

    def near_miss(self, makes: near_misses.Makes, motifs: Callable[[], Sequence[Case]]) -> Callable[[], Outcome]:
        """Return the check of the pass on one kind of near misses of its motifs, which take turns.

        Judging a pass that may round takes ten times as long as one that may not. Such a pass gets at most half as many
        near misses as there are random graphs, or some per motif if there are more motifs.
        """
        graphs = self.suite.profile.pass_graphs

        def of_motif(motif: Case) -> Iterator[Case]:
            every = islice(makes(motif, self._operators), graphs // 2)
            return (replace(c, name=f"{motif.name}, {c.name}") for c in every if c is not None)

        def run() -> Outcome:
            known = motifs()
            limit = None if self.p.error.kind == "exact" else max(graphs // 2, NEAR_EACH * len(known))
            return self._check(islice(_in_turn(map(of_motif, known)), limit))

        return run

    def random_graphs(self) -> Outcome:
        """Check the pass on random graphs with its motifs."""
        return self._check(self._hosts("random", self.suite.profile.pass_graphs))

    def pipeline_order(self) -> Outcome:
        """Check every pass in pipeline order, twice, on random graphs with the motifs of this one.

        The passes must reach a fixed point, and leave no copy of a weight that several nodes share.
        """
        passes = ordered(list(passes_of(self.suite).values()))

        def check(case: Case) -> Finding:
            found = check_passes([*passes, *passes], self._operators, case)
            if found.comparison.verdict.is_failure:
                return found
            graph = case.graph.clone()
            try:
                Pipeline(passes, self._operators).run(graph)
            except Exception as error:  # noqa: BLE001 - a pass may raise anything
                return Finding(Comparison(Verdict.CONTRACT, f"the pipeline fails: {error}\non:\n{case.graph}"))
            copied = next(copies(case.graph, graph, may_replace=True), "")
            return Finding(Comparison(Verdict.CONTRACT, f"{copied}\n{graph}")) if copied else found

        return self._check(self._hosts("pipeline", self.suite.profile.pass_graphs // 10), check)

    def random_order(self) -> Outcome:
        """Check every pass in random orders on random graphs with the motifs of this one."""
        random = Random(f"{self.p.name}-order-{self.suite.profile.seed}")  # noqa: S311 - test data, not cryptography
        passes = [p for _, p in sorted(passes_of(self.suite).items())]

        def check(case: Case) -> Finding:
            return check_passes(random.sample(passes, len(passes)), self._operators, case)

        return self._check(self._hosts("order", self.suite.profile.pass_graphs // 10), check)

    def _hosts(self, purpose: str, count: int) -> Iterator[Case]:
        random = Random(f"{self.p.name}-{purpose}-{self.suite.profile.seed}")  # noqa: S311 - test data, not cryptography
        groups = mentions(self.p, self._operators)
        for number in range(count if self.motifs.cases else 0):
            motif = self.motifs.cases[number % len(self.motifs.cases)]
            case = host(random, motif, self._operators, groups)
            if case is not None:
                yield case

    def _check(self, cases: Iterable[Case], check: Callable[[Case], Finding] | None = None) -> Outcome:
        """Check the pass on cases until one fails, and reduce that one as far as possible."""
        judge = check or self._alone
        count = fired = 0
        worst, run = Comparison(Verdict.PASS), ""
        left_out: Comparison | None = None
        for case in cases:
            other = unjudged_in(case.graph)
            if other is not None:
                left_out = other
                continue
            found = judge(case)
            count, fired = count + 1, fired + found.fired
            if found.comparison.verdict.is_failure:
                return self._failed(case, found, judge)
            if found.comparison.verdict is Verdict.PASS and found.comparison.ratio > worst.ratio:
                worst, run = found.comparison, f"{case.name}, {found.run}"
        if left_out is not None and not count:
            return Outcome("", left_out)
        return Outcome("", replace(worst, message=f"fired on {fired} of {count} graphs"), run)

    def _alone(self, case: Case) -> Finding:
        return check_pass(self.p, self._operators, case)

    def _failed(self, case: Case, found: Finding, judge: Callable[[Case], Finding]) -> Outcome:
        def fails(smaller: Case) -> bool:
            return judge(smaller).comparison.verdict is found.comparison.verdict

        if fails(case):  # random orders are drawn again
            case = reduce_case(case, fails, self.suite.profile.shrink_seconds)
            found = judge(case)
        return Outcome("", found.comparison, f"{case.name}, {found.run}", case)
