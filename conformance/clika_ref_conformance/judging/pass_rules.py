"""Check the rules for passes on one graph: structure, interface, weights and numerics are preserved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.declared_types import DeclaredTypes
from clika_ref.core.errors import ClikaError, PassError
from clika_ref.core.execution import interpret
from clika_ref.core.invariants import verify
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.passes import Pass, Phase
from clika_ref_conformance.cases import CaseRun, GraphCase
from clika_ref_conformance.judging.judge import CaseReference
from clika_ref_conformance.judging.random_nodes import bytes_of, count_deciding_nodes, count_random_nodes
from clika_ref_conformance.verdicts import Comparison, Verdict

Operators = Mapping[str, Operator]


class BrokenRuleError(PassError):
    """A pass broke a rule; the message names the rule and shows the result."""

    def __init__(self, verdict: Verdict, message: str) -> None:
        super().__init__(message)
        self.verdict = verdict


@dataclass(frozen=True)
class PassFinding:
    """Result of a pass on a case: a verdict, the inputs that decided, and whether the pass changed anything."""

    comparison: Comparison
    run: str = ""
    fired: bool = False


def check_passes(passes: Sequence[Pass], operators: Operators, case: GraphCase) -> PassFinding:
    """Run passes one after another on a clone of a graph, and check each result by all rules."""
    graph, fired, worst, decided = case.graph, False, Comparison(Verdict.PASS), ""
    for position, p in enumerate(passes):
        name = f"{p.name}, run after {', '.join(other.name for other in passes[:position])}" if position else p.name
        before, graph = graph, graph.clone()
        try:
            with _protect_constants(before):
                changed = _run_and_check(p, operators, graph, before)
                results = _compare_numerics(p, before, graph, case.runs) if changed else []
        except BrokenRuleError as broken:
            shown = f"{name}: {broken}\nbefore:\n{before}\nafter:\n{graph}"
            return PassFinding(Comparison(broken.verdict, shown), fired=True)
        fired = fired or changed
        for run, found in results:
            if found.verdict.is_failure:
                message = f"{name}: {found.message}\nbefore:\n{before}\nafter:\n{graph}"
                return PassFinding(replace(found, message=message), run, fired)
            if found.ratio > worst.ratio:
                worst, decided = found, run
    return PassFinding(worst, decided, fired)


@contextmanager
def _protect_constants(graph: Graph) -> Iterator[None]:
    """Fail if a pass, or a deferred computation that it left, wrote to a constant, and restore the constant.

    Clones share the tensors, so everything that follows, including reproducers, would start from damaged ones.

    Raises:
        BrokenRuleError: a constant was changed in place. Replaces the error of any other broken rule.
    """
    tensors = {name: v.data for name, v in graph.constants.items() if v.data is not None}
    kept = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    changed: list[str] = []
    try:
        yield
    finally:
        for name, tensor in tensors.items():
            if not torch.equal(bytes_of(tensor), bytes_of(kept[name])):
                changed.append(name)
                tensor.data.copy_(kept[name])
        _require(not changed, f"the pass changed the constants {changed} in place")


def _run_and_check(p: Pass, operators: Operators, graph: Graph, before: Graph) -> bool:
    """Run a pass on ``graph``, a clone of ``before``, and check all but numerics; return whether it changed.

    Raises:
        BrokenRuleError: the pass broke a rule; reports the first one.
    """
    revision, attributes = graph.revision, [repr(node.attrs) for node in before.nodes]
    _run_pass(p, graph, operators)
    kept_as_is = [repr(node.attrs) for node in before.nodes] == attributes  # by repr, since 1 == True
    _require(kept_as_is, "the pass changed a node in place: attributes are shared with the stored graph")
    changed = graph.revision != revision
    unchanged = changed or _collect_structure(graph) == _collect_structure(before) or str(graph) == str(before)
    _require(unchanged, "the pass changed the graph, but not its revision")
    try:
        verify(graph)
    except PassError as error:
        raise BrokenRuleError(Verdict.CONTRACT, f"an invariant is broken: {error}") from error
    if changed:
        _check_interface(before, graph)
        _check_constants(p, before, graph)
        _check_nodes(p, before, graph, operators)
        twin = before.clone()
        _run_pass(p, twin, operators)
        _require(str(twin) == str(graph), f"a second run on the same graph gives another result:\n{twin}")
        _check_idempotent(p, twin, operators)
    return changed


def _collect_structure(graph: Graph) -> list[Any]:
    """Return the parts of a graph's text that a clone shares with its original, as writing the full text is slow."""
    nodes = [
        (
            node.op,
            id(node.attrs),
            [item.name if isinstance(item, Value) else id(item) for item in node.inputs],
            [(value.name, value.type) for value in node.outputs],
        )
        for node in graph.nodes
    ]
    inputs = [(value.name, value.type) for value in graph.inputs]
    returned = [value.name for value in (*graph.outputs, *graph.state.values())]
    return [inputs, graph.symbols, graph.guards, nodes, [*graph.state], returned]


def _run_pass(p: Pass, graph: Graph, operators: Operators) -> None:
    try:
        p(graph, operators)
    except Exception as error:
        raise BrokenRuleError(Verdict.CONTRACT, f"the pass raised {type(error).__name__}: {error}") from error


def _require(holds: bool, message: str) -> None:  # noqa: FBT001 - reads as an assertion
    if not holds:
        raise BrokenRuleError(Verdict.CONTRACT, message)


def _check_idempotent(p: Pass, made: Graph, operators: Operators) -> None:
    """Require that a pass changes nothing in its own result. Otherwise, the graph is left changed."""
    if not getattr(p, "idempotent", True):
        return
    revision = made.revision
    _run_pass(p, made, operators)
    _require(made.revision == revision, f"the pass is not idempotent: it changes its own result:\n{made}")


def _check_interface(before: Graph, after: Graph) -> None:
    """Require that names and types of inputs and outputs, state, guards and symbols are unchanged."""
    for name, old, new in (
        ("inputs", before.inputs, after.inputs),
        ("outputs", before.outputs, after.outputs),
        ("state", before.state.values(), after.state.values()),
    ):
        facts = [[("" if name == "state" else f"%{v.name}: ", v.type) for v in values] for values in (old, new)]
        if facts[0] != facts[1]:
            shown = [[f"{prefix}{kind}" for prefix, kind in items] for items in facts]
            _require(holds=False, message=f"the {name} are {shown[1]} instead of {shown[0]}")
    _require(list(before.state) == list(after.state), f"the state is {list(after.state)}, was {list(before.state)}")
    _require(before.guards == after.guards, f"the guards are {after.guards} instead of {before.guards}")
    leaves = {v.name for v in (*after.inputs, *after.constants.values())}
    made = {v.name for node in after.nodes for v in node.outputs}
    _require(not leaves & made, f"two values are named {sorted(leaves & made)}")
    inputs = {v.name for v in before.inputs}
    for name, symbol in before.symbols.items():
        if symbol.source.name in inputs:
            _require(after.symbols.get(name) == symbol, f"the symbol {symbol} was removed or changed")
    for symbol in after.symbols.values():
        _require(
            symbol.source.name in leaves | made,
            f"the symbol {symbol} is read from a value that no node computes any more",
        )


def _check_constants(p: Pass, before: Graph, after: Graph) -> None:
    """Require that constants under an existing name keep their tensors, and that shared weights are not copied."""
    if p.phase == Phase.CLEAN:
        lost = sorted(n for n in before.constants.keys() - after.constants.keys() if not n.startswith(LITERAL_PREFIX))
        _require(not lost, f"a pass of phase CLEAN must keep every parameter, but removed {lost}")
        _require(before.aliases == after.aliases, f"the aliases are {after.aliases} instead of {before.aliases}")
        copied = next(find_copies(before, after), "")
        _require(not copied, copied)
    for name, value in after.constants.items():
        old = before.constants.get(name)
        _require(value.name == name, f"the constant {name!r} is named {value.name!r}")
        same = old is None or old.data is value.data
        _require(
            same or (old is not None and torch.equal(bytes_of(old.data), bytes_of(value.data))),
            f"the elements of the constant {name!r} changed",
        )


def find_copies(before: Graph, after: Graph, *, may_replace: bool = False) -> Iterator[str]:
    """Yield a message for each weight shared by several nodes that has its own copy after a pass.

    Args:
        before: original graph.
        after: result of the passes.
        may_replace: whether one copy may replace the weight, as after folding a node that is the identity at these
            sizes.
    """
    added = [v for name, v in after.constants.items() if name not in before.constants]
    for name, old in before.constants.items():
        if len(old.uses) < 2 or name.startswith(LITERAL_PREFIX) or old.type.rank == 0:
            continue
        same = [v for v in added if v.type == old.type and torch.equal(bytes_of(v.data), bytes_of(old.data))]
        kept = after.constants.get(name)
        replaces = may_replace and len(same) == 1 and (kept is None or not kept.uses)
        if same and not replaces:
            yield f"{same[0].name!r} is a copy of {name!r}, which several nodes share"


def _check_nodes(p: Pass, before: Graph, after: Graph, operators: Operators) -> None:
    """Require that the graph does not grow, and consists of complete calls of known operators."""
    grown = len(after) > len(before) and not getattr(p, "may_grow", False)
    _require(not grown, f"{len(before)} nodes became {len(after)}. Declare `may_grow = True` if this is intended.")
    known = {node.op for node in before.nodes}
    for node in after.nodes:
        _require(
            node.op in known or operators.get(node.op_type) is node.op, f"{node!r} is not a call of a known operator"
        )
        _require(node.attrs.keys() == node.op.attributes.keys(), f"{node!r} does not have the attributes of its schema")


LITERAL_PREFIX = "clika."
"""Prefix of constants without a module: numbers written in the user's code."""


def _compare_numerics(p: Pass, before: Graph, after: Graph, runs: Sequence[CaseRun]) -> list[tuple[str, Comparison]]:
    """Compare the results of two graphs on all inputs that are legal for the first one."""
    went = False
    if any(node.is_random for node in before.nodes):
        try:
            counts = [count_random_nodes(graph, runs[0].inputs) for graph in (before, after)]
        except ClikaError:
            return []  # random values may be invalid for the next node: skip the case
        first, then = counts[0][1], counts[1][1]
        is_same = first == then or len({count_deciding_nodes(graph, runs[0].inputs) for graph in (before, after)}) == 1
        _require(is_same, f"{first} nodes that make outputs random became {then}")
        went = counts[0] != counts[1]  # removed random nodes shift the stream of random numbers
        if counts[0][1] and (went or p.error.kind != "exact"):
            return []
    found: list[tuple[str, Comparison]] = []
    for run in runs:
        try:
            expected = _call_twice(before, run.inputs)
            if went and _find_difference(expected, _call_twice(before, run.inputs, seed=1)) is not None:
                continue
        except Exception:  # noqa: BLE001, S112 - eager rejects these sizes or elements: skip the case
            continue
        try:
            actual = _call_twice(after, run.inputs, known=expected)
        except Exception as error:  # noqa: BLE001 - any error is a failure, as the graph ran before
            return [
                (
                    run.name,
                    Comparison(Verdict.VALUE, f"the graph ran on {run.name} before the pass, and now fails: {error}"),
                )
            ]
        found.append((run.name, _compare(p, (before, after), run, expected, actual)))
    return found


def _compare(
    p: Pass, graphs: tuple[Graph, Graph], run: CaseRun, expected: Sequence[Tensor], actual: Sequence[Tensor]
) -> Comparison:
    before, _ = graphs
    if p.error.kind != "exact":
        try:
            return _judge_calls(before, run.inputs, expected, actual)
        except RuntimeError as error:  # convolutions accept a dilation of 0 in float32, but not in float64
            return Comparison(Verdict.UNSTABLE, f"eager rejects the graph in wider arithmetic: {error}")
    found = _find_difference(expected, actual)
    if found is not None and found.verdict is Verdict.VALUE:
        # The class EXACT does not define the sign of zero, but 1 / -0.0 != 1 / 0.0: compare without signs of zeros.
        unsigned = CaseRun(run.name, tuple(map(_clear_zero_signs, run.inputs)))
        found = _find_difference(
            *(_call_twice(_clear_zero_signs_of_graph(g), unsigned.inputs, unsigned=True) for g in graphs)
        )
    if found is not None and _find_difference(expected, _call_twice(before, run.inputs)) is not None:
        return Comparison(Verdict.UNSTABLE, "eager itself returns other results in each run: it reads undefined memory")
    return found or Comparison(Verdict.PASS, elements=sum(t.numel() for t in expected))


def _judge_calls(
    before: Graph, inputs: Sequence[Tensor], expected: Sequence[Tensor], actual: Sequence[Tensor]
) -> Comparison:
    """Judge the results of one or two calls, each by its own reference; return the worse comparison."""
    size = len(before.outputs) + len(before.state)
    found = CaseReference(_return_state(before), inputs, trusts_eager=True).judge(actual[:size])
    if not before.state or found.verdict.is_failure:
        return found
    later, again = _make_second_call(before, inputs, expected)
    second = CaseReference(_return_state(later), again, trusts_eager=True).judge(actual[size:])
    return max(found, second, key=lambda c: (c.verdict.is_failure, c.verdict is Verdict.PASS, c.ratio))


def _find_difference(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> Comparison | None:
    for index, (e, a) in enumerate(zip(expected, actual, strict=True)):
        if e.dtype != a.dtype or e.shape != a.shape:
            kinds = [f"{t.dtype}{list(t.shape)}" for t in (a, e)]
            return Comparison(Verdict.STRUCTURE, f"result {index} is {kinds[0]} instead of {kinds[1]}")
        same = (e == a) | (e.isnan() & a.isnan())
        if not bool(same.all()):
            message = f"result {index} differs in {int((~same).sum())} of {e.numel()} elements: {a} instead of {e}"
            return Comparison(Verdict.VALUE, message, elements=e.numel())
    return None


def _call_twice(
    graph: Graph, inputs: Sequence[Tensor], *, known: Sequence[Tensor] = (), unsigned: bool = False, seed: int = 0
) -> list[Tensor]:
    """Return outputs and new state of a call; with state, also those of a second call that starts from it.

    If the results of another graph are ``known``, the second call starts from their state, so that a difference in the
    first call is not reported again in the second.
    """
    first = _run_graph(graph, inputs, unsigned=unsigned, seed=seed)
    if not graph.state:
        return first
    later, again = _make_second_call(graph, inputs, known or first)
    return [*first, *_run_graph(later, again, unsigned=unsigned, seed=seed)]


def _make_second_call(graph: Graph, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> tuple[Graph, list[Tensor]]:
    """Return graph and inputs of a second call that starts from the state in the results of the first."""
    outputs = len(graph.outputs)
    state = dict(zip(graph.state, results[outputs : outputs + len(graph.state)], strict=True))
    later = graph.clone()
    for name, value in later.constants.items():
        value.data = state.get(name, value.data)
    return later, [state.get(v.name, tensor) for v, tensor in zip(graph.inputs, inputs, strict=True)]


def _run_graph(graph: Graph, inputs: Sequence[Tensor], *, unsigned: bool, seed: int) -> list[Tensor]:
    """Run a graph with a seed, with contiguous results, since kernels round by layout.

    Raises:
        BrokenRuleError: a result of a node does not have the type that the graph states.
    """
    types = DeclaredTypes(graph, inputs)

    def hook(node: Node, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for message in types.find_mismatches(node, results):
            raise BrokenRuleError(Verdict.STRUCTURE, message)
        return tuple(_clear_zero_signs(r) if unsigned else r.contiguous() for r in results)

    random = any(node.is_random for node in graph.nodes)
    with torch.random.fork_rng(devices=(), enabled=random), torch.no_grad():
        if random:
            torch.default_generator.manual_seed(seed)  # CPU generator only, as in `count_random_nodes`
        outputs, state = interpret(graph, inputs, hook)
    return [t.detach() for t in (*outputs, *state.values())]


def _clear_zero_signs(tensor: Tensor) -> Tensor:
    """Return a tensor with only positive zeros."""
    return tensor.detach().contiguous() + 0 if tensor.is_floating_point() else tensor.contiguous()


def _clear_zero_signs_of_graph(graph: Graph) -> Graph:
    copy = graph.clone()
    for value in copy.constants.values():
        value.data = None if value.data is None else _clear_zero_signs(value.data)
    return copy


def _return_state(graph: Graph) -> Graph:
    """Return a graph that returns its new state after its outputs."""
    copy = graph.clone()
    for value in copy.state.values():
        copy.add_output(value)
    return copy
