"""L2: every pass, on the graphs on which it fires and on those that nearly look like them."""

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
"""What is changed in the calls of a motif, and what makes the graphs: of drawn motifs and of those varied from them."""

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
"""What is changed around them, for which it matters little which calls they are: of drawn motifs only."""

LISTED = "listed call redrawn"
"""The same of each operator in a long table: what is wrong with one operator shows with some attributes only."""

LISTED_SORTS = "listed attribute of another sort"
"""One attribute of these changed: a tuple longer or shorter, a number that is 0 or negative."""

GRAPHS_PER_DRAW = 75
"""The profile's random graphs per pass over this are the draws of each: 2 in ``quick``."""

GRAPHS_PER_MOTIF = 15
"""The profile's random graphs per pass over this are the motifs of each goal: 10 of the 150 of ``quick``."""


NEAR_EACH = 2
"""Near misses of one sort that each motif has, at least, where there are many motifs and not all could have more."""

FEWEST_MOTIFS = 10
"""Of each goal, however few random graphs there are: the first motifs found are the plainest."""

MOST_SEARCHED = 300
"""Half of the chains after which no further motif is expected, in profiles with more random graphs: 51 of
fold-batch-norm come before 600 chains bring none, in half a minute; to look for more took ``ci`` seven."""

HASH_SEEDS = "hash seeds"
"""The task that runs all installed passes in a second process, whose sets have another order."""


def passes_of(suite: Suite) -> dict[str, Pass]:
    """Return the registered passes and those that the target adds, by name."""
    return {**suite.registry.passes, **{p.name: p for p in suite.target.passes()}}


def tasks(suite: Suite) -> list[Task]:
    """Return one task for each pass, and one for the order of sets."""
    return [*(Task(LEVEL, name) for name in sorted(passes_of(suite))), Task(LEVEL, HASH_SEEDS)]


def checks(task: Task, suite: Suite) -> Sequence[Check]:
    """Return the checks of a pass; motifs are looked for when the first of them runs."""
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
    """Fail if an installed pass makes another graph where sets have another order."""
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
    """Yield one case of each source, then another of each, until all of them are exhausted."""
    left = list(sources)
    while left:
        taken = [(source, next(source, None)) for source in left]
        yield from (case for _, case in taken if case is not None)
        left = [source for source, case in taken if case is not None]


@dataclass
class Trial:
    """One pass on trial: its motifs, found once, and the checks that are made of them."""

    p: Pass
    suite: Suite

    @property
    def _operators(self):  # noqa: ANN202 - a mapping of operators
        return self.suite.registry.operators

    @cached_property
    def motifs(self) -> Motifs:
        """The motifs of the pass; how many are wanted follows from the profile."""
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
        """Return the motifs that near misses of calls are made of."""
        return [*self.motifs.cases, *self.motifs.varied]

    def listed_redrawn(self, case: Case, operators: near_misses.Operators) -> Iterator[Case | None]:
        """Draw each call of a motif anew, as often as the profile allows."""
        return call_redrawn(case, operators, draws=self.suite.profile.pass_graphs // GRAPHS_PER_DRAW)

    def near_miss(self, makes: near_misses.Makes, motifs: Callable[[], Sequence[Case]]) -> Callable[[], Outcome]:
        """Return the check of the pass on one sort of near misses of some of its motifs, which take turns.

        What a pass may round takes ten times as long to judge as what it must keep: then there are half as many as
        there are random graphs, or some of each motif where there are more of those.
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
        """Check the pass on random graphs that hold its motifs."""
        return self._check(self._hosts("random", self.suite.profile.pass_graphs))

    def pipeline_order(self) -> Outcome:
        """Check every pass in pipeline order, twice, on random graphs that hold the motifs of this one.

        They must settle, and leave no copy of a weight that several nodes share.
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
        """Check every pass in random orders on random graphs that hold the motifs of this one."""
        random = Random(f"{self.p.name}-order-{self.suite.profile.seed}")  # noqa: S311 - no secret
        passes = [p for _, p in sorted(passes_of(self.suite).items())]

        def check(case: Case) -> Finding:
            return check_passes(random.sample(passes, len(passes)), self._operators, case)

        return self._check(self._hosts("order", self.suite.profile.pass_graphs // 10), check)

    def _hosts(self, purpose: str, count: int) -> Iterator[Case]:
        random = Random(f"{self.p.name}-{purpose}-{self.suite.profile.seed}")  # noqa: S311 - no secret
        groups = mentions(self.p, self._operators)
        for number in range(count if self.motifs.cases else 0):
            motif = self.motifs.cases[number % len(self.motifs.cases)]
            case = host(random, motif, self._operators, groups)
            if case is not None:
                yield case

    def _check(self, cases: Iterable[Case], check: Callable[[Case], Finding] | None = None) -> Outcome:
        """Check the pass on cases until one fails, which is then made as small as possible."""
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

        if fails(case):  # random orders draw anew
            case = reduce_case(case, fails, self.suite.profile.shrink_seconds)
            found = judge(case)
        return Outcome("", found.comparison, f"{case.name}, {found.run}", case)
