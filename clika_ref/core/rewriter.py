"""Rewrite rules, the reasons why they did not fire, and the loop that applies rules until none fires."""

# pyright: reportPrivateUsage=false, reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Only this file reads the private links of the IR for rules; a rule may return any type.

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from clika_ref.core.errors import PassError
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph, Node, Value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from clika_ref.core.operators import Operator


@dataclass(frozen=True, slots=True)
class Skip:
    """The result of a rule that does not apply: the ``reason``, and how many conditions held (``closeness``)."""

    reason: str
    closeness: int = 0


@dataclass(frozen=True, slots=True)
class Rule:
    """One rewrite: ``rewrite(node, build)`` returns the values that replace the node's outputs, or a `Skip`.

    ``kinds`` are the names of the operators that it matches; errors and origins show its ``name``. Made by `rule`.
    """

    name: str
    kinds: tuple[str, ...]
    rewrite: Callable[[Node, Builder], Any]


def rule(*kinds: str) -> Callable[[Callable[[Node, Builder], Any]], Rule]:
    """Declare a rule for nodes of the given operators (``kinds``); its name is the function's, with dashes."""

    def declare(rewrite: Callable[[Node, Builder], Any]) -> Rule:
        return Rule(rewrite.__name__.strip("_").replace("_", "-"), kinds, rewrite)

    return declare


@dataclass(slots=True)
class MatchStats:
    """The closest miss of each rule (``closest``), which explains why it did not fire."""

    closest: dict[str, tuple[Skip, str]] = field(default_factory=dict[str, "tuple[Skip, str]"])

    def record(self, rule: Rule, skip: Skip, node: Node) -> None:
        """Record that ``rule`` returned ``skip`` at ``node``, if that is its closest miss so far."""
        known = self.closest.get(rule.name)
        if known is None or skip.closeness > known[0].closeness:
            self.closest[rule.name] = (skip, repr(node))


def apply_rules(
    graph: Graph, rules: Sequence[Rule], operators: Mapping[str, Operator], stats: MatchStats | None = None
) -> int:
    """Apply rules until none fires, revisiting only nodes that a rewrite may affect; return the number of rewrites.

    Args:
        graph: the graph to change.
        rules: the rules, tried in this order.
        operators: operators by name, for building replacements.
        stats: records why rules did not fire.

    Raises:
        PassError: a rule returned something other than replacements of the right number and types.
    """
    by_kind: dict[str, list[Rule]] = {}
    for r in rules:
        for kind in r.kinds:
            by_kind.setdefault(kind, []).append(r)
    queue = deque(node for node in graph.nodes if node.op_type in by_kind)
    waiting = set(queue)
    fired = 0
    while queue:
        node = queue.popleft()
        waiting.discard(node)
        if node not in graph:
            continue
        for r in by_kind[node.op_type]:
            touched = _apply_rule(graph, r, node, operators, stats)
            if touched is None:
                continue
            fired += 1
            for neighbour in touched:
                if neighbour in graph and neighbour.op_type in by_kind and neighbour not in waiting:
                    queue.append(neighbour)
                    waiting.add(neighbour)
            break
    return fired


def _apply_rule(
    graph: Graph, r: Rule, node: Node, operators: Mapping[str, Operator], stats: MatchStats | None
) -> list[Node] | None:
    """Try one rule on one node; return the nodes to visit again, or None if it did not fire."""
    previous = next(graph.nodes_backward(node), None)
    build = Builder(graph, operators, node, node.origin.with_rule(r.name))
    answer = r.rewrite(node, build)
    if isinstance(answer, Skip):
        if stats is not None:
            stats.record(r, answer, node)
        return None
    replacements = tuple(answer) if isinstance(answer, tuple) else (answer,)
    if len(replacements) != len(node.outputs) or not all(isinstance(v, Value) for v in replacements):
        raise PassError(
            f"rule {r.name}: it returned {answer!r} for {node!r}. Return one value for each output, or Skip(reason)."
        )
    if not all(can_substitute(graph, old, new) for old, new in zip(node.outputs, replacements, strict=True)):
        return None
    made = list(takewhile(lambda step: step is not previous, graph.nodes_backward(node)))
    # Only the moved readers: a replacement may have many others, and visiting them each time would be quadratic.
    readers = [u.user for v in node.outputs for u in v.uses if isinstance(u.user, Node)]
    for old, new in zip(node.outputs, replacements, strict=True):
        substitute(graph, old, new)
    less_read = dict.fromkeys(v for gone in erase_dead(graph, node) for v in gone.inputs if isinstance(v, Value))
    producers = [v.producer for v in less_read if v.producer]
    # A node that is now the only reader of a value may match rules that require a single use.
    single_users = [u.user for v in less_read if v.use_count == 1 for u in v.uses if isinstance(u.user, Node)]
    return [*made, *producers, *readers, *single_users]


def can_substitute(graph: Graph, old: Value, new: Value) -> bool:
    """Whether replacing ``old`` by ``new`` in a graph keeps the names of outputs and the tensors of state entries."""
    if not any(use.user is graph for use in old.uses):
        return True
    return (
        new.producer is not None
        and not any(use.user is graph for use in new.uses)
        and new.name not in _symbol_sources(graph)
    )


def substitute(graph: Graph, old: Value, new: Value) -> None:
    """Replace ``old`` by ``new`` in a graph for which `can_substitute` holds. Outputs keep their user-visible names."""
    if any(use.user is graph and isinstance(use.position, int) for use in old.uses):
        old.name, new.name = new.name, old.name
    graph.replace(old, new)


def _symbol_sources(graph: Graph) -> set[str]:
    return {symbol.source.name for symbol in graph.symbols.values()}


def erase_dead(graph: Graph, *roots: Node) -> list[Node]:
    """Erase those ``roots`` that no node, output or symbol of a graph uses, and all nodes that become unused.

    Returns:
        The erased nodes.
    """
    stack, erased, bound = list(roots), list[Node](), _symbol_sources(graph)
    while stack:
        node = stack.pop()
        if node not in graph or any(v.use_count or v.name in bound for v in node.outputs):
            continue
        graph.erase(node)
        erased.append(node)
        stack.extend(v.producer for v in node.inputs if isinstance(v, Value) and v.producer)
    return erased
