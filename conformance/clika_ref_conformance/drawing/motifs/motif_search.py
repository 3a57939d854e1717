"""Motifs of a pass: minimal graphs that it rewrites, derived from its own rules."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.passes import Pass
from clika_ref.core.rewriter import apply_rules
from clika_ref_conformance.cases import CaseRun, GraphCase
from clika_ref_conformance.drawing.eager_builder import EagerGraphBuilder
from clika_ref_conformance.drawing.motifs.call_generator import UNSAFE_OPERATORS, CallGenerator
from clika_ref_conformance.drawing.motifs.cutting import cut_case, shrink_motif
from clika_ref_conformance.drawing.motifs.near_misses import classify_attribute
from clika_ref_conformance.drawing.motifs.pass_operators import collect_rules, find_operator_groups
from clika_ref_conformance.drawing.motifs.varying import redraw_each_call, substitute_operator

CHAIN_LENGTHS = (1, 2, 2, 3, 3, 4)
"""Number of nodes of a drawn chain, before repeats."""

INVERSE_END_SHARE = 1 / 2
"""Share of chains that end in their first operator: the inverse of a call is mostly a call of the same operator."""

NEW_OPERATORS_PER_GROUP = 3
"""Number of operators to substitute from a group that no drawn motif has."""

TRIES_PER_NEW_OPERATOR = 3
"""Number of tries for each of them."""

MAX_MOTIFS_PER_CALL = 3
"""Maximum number of motifs from redrawing one call of a motif."""

MIN_MOTIFS_PER_OPERATOR = 3
"""Minimum number of motifs to try for the substitution of an operator of a table."""

TRIES_PER_TABLE = 100
"""Number of tries for a whole table; operators of a short table get more each."""

JOIN_SHARE = 1 / 4
"""Share of calls that also read an operand or result of another call."""

CHAINS_WITH_ALL_OUTPUTS = 100
"""Number of chains that return all unread values; if none is a motif, some later ones return less."""

CHAINS_PER_OMISSION = 4
"""One in this many of the later chains leaves out an output."""

FiresCheck = Callable[[Graph], bool]


@dataclass(frozen=True)
class MotifGoal:
    """An effect that a motif should have: one rule of a pass fires, or the pass changes anything."""

    name: str
    fires: FiresCheck
    last_op_types: tuple[str, ...]
    """Operators allowed as the last node of a chain; all if empty."""
    groups: Sequence[tuple[str, ...]] = ()
    """Groups of operators that the code of the pass or rule mentions."""


@dataclass
class Motifs:
    """The motifs found for one pass."""

    cases: list[GraphCase] = field(default_factory=list[GraphCase])
    varied: list[GraphCase] = field(default_factory=list[GraphCase])
    """Variants of the drawn motifs with other operators and attributes."""
    listed: list[GraphCase] = field(default_factory=list[GraphCase])
    """Further variants, one for each operator of a long table; they get few near misses."""
    unreached_goals: list[str] = field(default_factory=list[str])
    """Goals without a motif."""
    tried: int = 0


def make_goals(p: Pass, operators: Mapping[str, Operator]) -> list[MotifGoal]:
    """Return one goal for the pass as a whole, and one for each of its rules."""

    def is_changed(graph: Graph) -> bool:
        revision = graph.revision
        p(graph, operators)
        return graph.revision != revision

    rules = [
        MotifGoal(
            f"rule {r.name}",
            lambda graph, r=r: apply_rules(graph, [r], operators) > 0,
            tuple(kind for kind in r.kinds if kind in operators),
            find_operator_groups(r, operators),
        )
        for r in collect_rules(p)
    ]
    return [MotifGoal("pass", is_changed, (), find_operator_groups(p, operators)), *rules]


def find_motifs(
    p: Pass,
    operators: Mapping[str, Operator],
    *,
    seed: int,
    motif_count: int,
    tries: int,
    patience: int,
    varied: bool = True,
) -> Motifs:
    """Draw chains until each goal of a pass has ``motif_count`` motifs, or ``patience`` chains give no new one.

    A goal without any motif is tried up to ``tries`` times. The pass's own ``motifs`` come first: functions that take a
    builder and return the outputs of a graph. With ``varied``, `_MotifSearch.vary` then adds variants.
    """
    found, goals = Motifs([*build_pass_motifs(p, operators)]), make_goals(p, operators)
    for goal in goals:
        random = Random(f"{p.name}-{goal.name}-{seed}")  # noqa: S311 - no secret
        search = _MotifSearch(
            goal, operators, random, motif_count, [case for case in found.cases if _is_reached(goal, case)]
        )
        known = len(search.own)
        search.draw(tries, patience)
        drawn = len(search.own)
        found.cases += search.own[known:]
        if varied:
            search.vary()
            found.varied += search.own[drawn : search.plain + motif_count]
            found.listed += search.own[search.plain + motif_count :]
        found.tried += search.tried
    found.unreached_goals = [goal.name for goal in goals if not any(_is_reached(goal, case) for case in found.cases)]
    return found


@dataclass
class _MotifSearch:
    """The motifs of one goal as they are found."""

    goal: MotifGoal
    operators: Mapping[str, Operator]
    random: Random
    motif_count: int
    own: list[GraphCase]
    tried: int = 0
    plain: int = 0
    """Number of motifs before those that only differ in an operator."""
    omits_outputs: bool = False
    """Whether some chains leave out an output, which hides faults, as no chain with all outputs was a motif."""

    def draw(self, tries: int, patience: int) -> None:
        """Draw chains until there are as many different motifs as requested."""
        known = {_signature(case) for case in self.own}
        ends = Counter[str]()
        share = -(-2 * self.motif_count // max(len(self.goal.last_op_types), 1))
        latest = 0
        for attempt in range(tries):
            if len(self.own) >= self.motif_count or (self.own and attempt - latest >= patience):
                return
            self.tried += 1
            forgets = attempt >= CHAINS_WITH_ALL_OUTPUTS and (self.omits_outputs or not self.own)
            self.omits_outputs |= forgets
            case = draw_chain(
                self.random, self.operators, self.goal, attempt, forgets=forgets and attempt % CHAINS_PER_OMISSION == 0
            )
            if case is None or not _is_reached(self.goal, case):
                continue
            small = shrink_motif(case, lambda c: _is_reached(self.goal, c))
            kinds = {node.op_type for node in small.graph.nodes}.intersection(self.goal.last_op_types)
            if _signature(small) not in known and all(ends[kind] < share for kind in kinds):
                known.add(_signature(small))
                ends.update(kinds)
                latest = attempt
                self._add(small)

    def vary(self) -> None:
        """Add variants of the drawn motifs, as faults of a table or a pattern may only show in these.

        First come operators from each mentioned group that no drawn motif contains. Then come the drawn motifs with
        other sorts of attributes and operands. Last comes one motif for each operator of the groups.
        """
        drawn = list(self.own)
        traits = set().union(*(_traits(_find_fired_nodes(self.goal, case) or ()) for case in drawn))
        for group in self.goal.groups:
            if all(kind not in group for kind, *_ in traits):
                strangers = (
                    self._substitute(group, kind, drawn, kin=False)
                    for kind in [*group[:NEW_OPERATORS_PER_GROUP]] * TRIES_PER_NEW_OPERATOR
                )
                traits |= next(filter(None, (self._add_first(cases, traits) for cases in strangers)), set())
        most = len(self.own) + 2 * self.motif_count
        for motif in self.random.sample(self.own, len(self.own)):
            for cases in redraw_each_call(self.random, motif):
                for _ in range(MAX_MOTIFS_PER_CALL):
                    traits |= self._add_first(cases, traits) if len(self.own) < most else set()
        self.plain = len(self.own)
        for group in self.goal.groups:
            kin = [motif for motif in self.own if any(node.op_type in group for node in motif.graph.nodes)]
            for kind in group:
                some = self.random.sample(
                    kin, min(max(MIN_MOTIFS_PER_OPERATOR, TRIES_PER_TABLE // len(group)), len(kin))
                )
                traits |= self._add_first(self._substitute(group, kind, some, kin=True), traits)

    def _substitute(
        self, group: Sequence[str], kind: str, motifs: Sequence[GraphCase], *, kin: bool
    ) -> Iterator[GraphCase]:
        for motif in motifs:
            yield from substitute_operator(self.random, motif, self.operators, group, kind, kin=kin)

    def _add_first(self, cases: Iterator[GraphCase], known: set[Any]) -> set[Any]:
        """Add the first case that is a motif with new traits, and return its traits."""
        for case in cases:
            if (
                not _traits(case.graph.nodes) <= known
                and not _traits(_find_fired_nodes(self.goal, case) or ()) <= known
            ):
                small = shrink_motif(cut_case(case, None), lambda c: _is_reached(self.goal, c))
                shown = _traits(_find_fired_nodes(self.goal, small) or ())
                if not shown <= known:
                    self._add(small)
                    return shown
        return set()

    def _add(self, case: GraphCase) -> None:
        self.own.append(GraphCase(f"{self.goal.name} {len(self.own) + 1}", case.graph, case.runs))


def _is_reached(goal: MotifGoal, case: GraphCase) -> bool:
    """Return whether a case reaches a goal; a pass that raises on the graph counts as firing."""
    return _find_fired_nodes(goal, case) is not None


def _find_fired_nodes(goal: MotifGoal, case: GraphCase) -> list[Node] | None:
    """Return the nodes that a firing goal removes or leaves unread, or all nodes if it leaves none so.

    Untouched nodes show nothing of the rule. None if the goal does not fire.
    """
    try:
        return _find_replaced_nodes(goal, case)
    except Exception as error:  # noqa: BLE001 - a pass may raise anything; the checks of the motif report it
        is_full = isinstance(error, MemoryError)
    if is_full:  # frees the graph of an endless pass, which is a reference cycle
        gc.collect()
    return list(case.graph.nodes)


def _find_replaced_nodes(goal: MotifGoal, case: GraphCase) -> list[Node] | None:
    graph = case.graph.clone()
    before = list(graph.nodes)
    if not goal.fires(graph):
        return None
    left = {node for node in graph.nodes if any(v.uses for v in node.outputs)}
    pairs = [
        (old, twin) for old, twin in zip(case.graph.nodes, before, strict=True) if any(v.uses for v in old.outputs)
    ]
    return [old for old, twin in pairs if twin not in left] or list(case.graph.nodes)


def build_pass_motifs(p: Pass, operators: Mapping[str, Operator]) -> Iterator[GraphCase]:
    """Yield the motifs that a pass provides, which random drawing would not find."""
    functions: Sequence[Callable[[Builder], Any]] = getattr(p, "motifs", ())
    for number, function in enumerate(functions):
        graph = Graph(p.name)
        outputs = function(Builder(graph, operators))
        for value in outputs if isinstance(outputs, tuple) else (outputs,):
            graph.add_output(value)
        yield GraphCase(f"provided {number}", graph, [CaseRun("typical", _draw_random_inputs(graph, number))])


def _draw_random_inputs(graph: Graph, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes: list[Any] = [v.type.shape for v in graph.inputs]
    return tuple(
        (torch.rand(shape, generator=generator) * 4 - 2).to(v.type.dtype)
        for shape, v in zip(shapes, graph.inputs, strict=True)
    )


def draw_chain(
    random: Random, operators: Mapping[str, Operator], goal: MotifGoal, attempt: int, *, forgets: bool
) -> GraphCase | None:
    """Draw a chain of calls that each read the previous result and end in one of the goal's last operators.

    Some calls also read an unread value, or a value that has a reader already, as in ``x * sigmoid(x)``. All unread
    values become outputs, except for the first one if the chain ``forgets``.
    """
    growth = EagerGraphBuilder()
    drawing = CallGenerator(random, growth, 0.9, random.choice((0.0, 0.5, 1.0, 1.0)))
    everything = sorted(operators)
    pool: list[Value] = []
    length = random.choice(CHAIN_LENGTHS)
    kinds: list[str] = []
    for position in range(length):
        if position == length - 1 and goal.last_op_types:
            kind = goal.last_op_types[attempt % len(goal.last_op_types)]
        elif position == length - 1 and kinds and random.random() < INVERSE_END_SHARE:
            kind = kinds[0]
        else:
            kind = random.choice(random.choice(goal.groups) if goal.groups and random.random() < 3 / 4 else everything)
        kinds.append(kind)
        node = drawing.call(operators[kind], pool, echoing=True)
        if node is not None:
            node = _join_paths(random, growth, node)
            pool = [*node.outputs, *(pool if random.random() < 1 / 4 else ())]
    if not len(growth.graph):
        return None
    _repeat_node(random, growth)
    outputs = [v for node in growth.graph.nodes for v in node.outputs if not v.uses]
    return growth.finish("chain", outputs[1:] if forgets and len(outputs) > 1 else outputs)


def _join_paths(random: Random, growth: EagerGraphBuilder, node: Node) -> Node:
    """Sometimes replace a new operand by an operand or result of another call, so that paths join."""
    if node.op_type in UNSAFE_OPERATORS or random.random() > JOIN_SHARE:
        return node
    operands = list(node.inputs)
    new = [i for i, v in enumerate(operands) if isinstance(v, Value) and v.producer is None and len(v.uses) == 1]
    others = [other for other in growth.graph.nodes if other is not node]
    known = {v: None for other in others for v in (*other.inputs, *other.outputs) if isinstance(v, Value)}
    if not new or not known:
        return node
    position, other = random.choice(new), random.randrange(len(operands))
    operands[position] = random.choice([*known])
    operands[position], operands[other] = operands[other], operands[position]
    met = growth.add_call(node.op, operands, node.attrs)
    if met is None:
        return node
    growth.graph.erase(node)
    return met


def _repeat_node(random: Random, growth: EagerGraphBuilder) -> None:
    """Sometimes add a node a second time, sometimes with an equal copy of a constant."""
    if random.random() > 1 / 3:
        return
    node = random.choice(list(growth.graph.nodes))
    operands = list(node.inputs)
    if random.random() < 1 / 2:
        for i, value in enumerate(operands):
            if isinstance(value, Value) and value.data is not None:
                operands[i] = growth.graph.add_constant(value.data.detach().clone(), f"{value.name}_again")
                growth.tensors[operands[i]] = value.data.detach()
    growth.add_call(node.op, operands, node.attrs)


def _signature(case: GraphCase) -> tuple[Any, ...]:
    """Return the key that distinguishes motifs: operators in order, sources of operands, sorts of attributes."""

    def attribute_sorts(node: Node) -> tuple[Any, ...]:
        return tuple(classify_attribute(v) for _, v in sorted(node.attrs.items()) if not isinstance(v, float))

    return tuple(
        (n.op_type, tuple(map(_classify_operand_source, n.inputs)), attribute_sorts(n)) for n in case.graph.nodes
    )


def _classify_operand_source(item: Any) -> str:
    if not isinstance(item, Value):
        return type(item).__name__
    return "constant" if item.is_constant else item.producer.op_type if item.producer else "input"


def _traits(nodes: Iterable[Node]) -> set[Any]:
    """Return the features of nodes: the sorts of their attributes, and the types of their operands."""
    found: set[Any] = set()
    for node in nodes:
        found.add((node.op_type, tuple(type(v).__name__ for v in node.inputs)))
        found.update(
            (node.op_type, name, classify_attribute(v)) for name, v in node.attrs.items() if not isinstance(v, float)
        )
    return found
