"""What every pass must keep: structure, interface, weights and numbers; checked on one graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.errors import ClikaError, PassError
from clika_ref.core.execution import interpret
from clika_ref.core.invariants import verify
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.passes import Pass, Phase
from clika_ref.stated_types import StatedTypes
from clika_ref_conformance.cases import Case, Run
from clika_ref_conformance.judging.judge import Reference
from clika_ref_conformance.judging.random_nodes import bits, deciding_nodes, random_nodes
from clika_ref_conformance.verdicts import Comparison, Verdict

Operators = Mapping[str, Operator]


class BrokenRuleError(PassError):
    """A pass broke a rule; says which, and what it made."""

    def __init__(self, verdict: Verdict, message: str) -> None:
        super().__init__(message)
        self.verdict = verdict


@dataclass(frozen=True)
class Finding:
    """What became of a pass on a case: a verdict, the inputs that decided, and whether the pass changed anything."""

    comparison: Comparison
    run: str = ""
    fired: bool = False
    compared: int = 0
    """Runs whose numbers were compared; 0 where the pass changed nothing."""


def check_pass(p: Pass, operators: Operators, case: Case) -> Finding:
    """Run a pass alone on a clone of a graph, and hold the result against all rules."""
    return check_passes([p], operators, case)


def check_passes(passes: Sequence[Pass], operators: Operators, case: Case) -> Finding:
    """Run passes one after another on a clone of a graph, and hold what each makes against all rules."""
    graph, fired, compared, worst, decided = case.graph, False, 0, Comparison(Verdict.PASS), ""
    for place, p in enumerate(passes):
        name = f"{p.name}, run behind {', '.join(other.name for other in passes[:place])}" if place else p.name
        before, graph = graph, graph.clone()
        try:
            with _constants_kept(before):
                changed = _run_checked(p, operators, graph, before)
                results = _numbers(p, before, graph, case.runs) if changed else []
        except BrokenRuleError as broken:
            shown = f"{name}: {broken}\nbefore:\n{before}\nafter:\n{graph}"
            return Finding(Comparison(broken.verdict, shown), fired=True)
        fired, compared = fired or changed, compared + len(results)
        for run, found in results:
            if found.verdict.is_failure:
                message = f"{name}: {found.message}\nbefore:\n{before}\nafter:\n{graph}"
                return Finding(_with_message(found, message), run, fired, compared)
            if found.ratio > worst.ratio:
                worst, decided = found, run
    return Finding(worst, decided, fired, compared)


@contextmanager
def _constants_kept(graph: Graph) -> Iterator[None]:
    """Fail where a constant was written to, by a pass or by what it left to compute later, and undo it.

    Clones share the tensors, so that whatever comes after it would start from damaged ones, reproducers too.

    Raises:
        BrokenRuleError: a constant was changed in place, whatever other rule that made the pass break.
    """
    tensors = {name: v.data for name, v in graph.constants.items() if v.data is not None}
    kept = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    changed: list[str] = []
    try:
        yield
    finally:
        for name, tensor in tensors.items():
            if not torch.equal(bits(tensor), bits(kept[name])):
                changed.append(name)
                tensor.data.copy_(kept[name])
        _require(not changed, f"the constants {changed} were changed in place")


def _with_message(found: Comparison, message: str) -> Comparison:
    return Comparison(
        found.verdict, message, found.error, found.bound, found.ratio, found.quality, found.elements, found.ambiguous
    )


def _run_checked(p: Pass, operators: Operators, graph: Graph, before: Graph) -> bool:
    """Run a pass on a graph, a clone of ``before``, and check all but numbers; say whether it changed it.

    Raises:
        BrokenRuleError: with the first rule that it breaks.
    """
    revision, attributes = graph.revision, [repr(node.attrs) for node in before.nodes]
    _call(p, graph, operators)
    kept_as_is = [repr(node.attrs) for node in before.nodes] == attributes  # 1 is equal to True, and no such attribute
    _require(kept_as_is, "the pass changed a node in place: attributes are shared with the stored graph")
    changed = graph.revision != revision
    unchanged = changed or _objects_of(graph) == _objects_of(before) or str(graph) == str(before)
    _require(unchanged, "the pass changed the graph, but its revision stayed")
    try:
        verify(graph)
    except PassError as error:
        raise BrokenRuleError(Verdict.CONTRACT, f"an invariant is broken: {error}") from error
    if changed:
        _check_interface(before, graph)
        _check_constants(p, before, graph)
        _check_nodes(p, before, graph, operators)
        twin = before.clone()
        _call(p, twin, operators)
        _require(str(twin) == str(graph), f"a second run on the same graph made another:\n{twin}")
        _check_settled(p, twin, operators)
    return changed


def _objects_of(graph: Graph) -> list[Any]:
    """Return what a clone shares with its original, of all that the text of a graph says, which takes long to write."""
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


def _call(p: Pass, graph: Graph, operators: Operators) -> None:
    try:
        p(graph, operators)
    except Exception as error:
        raise BrokenRuleError(Verdict.CONTRACT, f"the pass raised {type(error).__name__}: {error}") from error


def _require(holds: bool, message: str) -> None:  # noqa: FBT001 - reads as an assertion
    if not holds:
        raise BrokenRuleError(Verdict.CONTRACT, message)


def _check_settled(p: Pass, made: Graph, operators: Operators) -> None:
    """A pass changes nothing in what it made itself; that graph is changed where it does."""
    if not getattr(p, "idempotent", True):
        return
    revision = made.revision
    _call(p, made, operators)
    _require(
        made.revision == revision, f"the pass is not idempotent: run on what it made, it changes it again:\n{made}"
    )


def _check_interface(before: Graph, after: Graph) -> None:
    """Names and types of inputs and outputs, state, guards and symbols stay as they were."""
    for what, old, new in (
        ("inputs", before.inputs, after.inputs),
        ("outputs", before.outputs, after.outputs),
        ("state", before.state.values(), after.state.values()),
    ):
        facts = [[("" if what == "state" else f"%{v.name}: ", v.type) for v in values] for values in (old, new)]
        if facts[0] != facts[1]:
            shown = [[f"{name}{kind}" for name, kind in items] for items in facts]
            _require(holds=False, message=f"the {what} are {shown[1]} instead of {shown[0]}")
    _require(list(before.state) == list(after.state), f"the state is {list(after.state)}, was {list(before.state)}")
    _require(before.guards == after.guards, f"the guards are {after.guards} instead of {before.guards}")
    leaves = {v.name for v in (*after.inputs, *after.constants.values())}
    made = {v.name for node in after.nodes for v in node.outputs}
    _require(not leaves & made, f"two values are named {sorted(leaves & made)}")
    inputs = {v.name for v in before.inputs}
    for name, symbol in before.symbols.items():
        if symbol.side.name in inputs:
            _require(after.symbols.get(name) == symbol, f"the symbol {symbol} is gone or changed")
    for symbol in after.symbols.values():
        _require(symbol.side.name in leaves | made, f"the symbol {symbol} is read from what no node makes any more")


def _check_constants(p: Pass, before: Graph, after: Graph) -> None:
    """Constants under an old name are the old tensors; a weight that several nodes share has no copy."""
    if p.phase == Phase.CLEAN:
        lost = sorted(n for n in before.constants.keys() - after.constants.keys() if not n.startswith(LITERALS))
        _require(not lost, f"a pass of phase CLEAN keeps every parameter, but {lost} are gone")
        _require(before.aliases == after.aliases, f"the aliases are {after.aliases} instead of {before.aliases}")
        copied = next(copies(before, after), "")
        _require(not copied, copied)
    for name, value in after.constants.items():
        old = before.constants.get(name)
        _require(value.name == name, f"the constant {name!r} is named {value.name!r}")
        same = old is None or old.data is value.data
        _require(
            same or (old is not None and torch.equal(bits(old.data), bits(value.data))),
            f"the constant {name!r} holds other elements",
        )


def copies(before: Graph, after: Graph, *, may_replace: bool = False) -> Iterator[str]:
    """Yield what is wrong with each weight that several nodes share and that has a copy of its own after a pass.

    Args:
        before: the graph as it was.
        after: what passes made of it.
        may_replace: whether one copy may take the place of the weight, as where a node that changes nothing at these
            sizes was computed beforehand.
    """
    added = [v for name, v in after.constants.items() if name not in before.constants]
    for name, old in before.constants.items():
        if len(old.uses) < 2 or name.startswith(LITERALS) or old.type.rank == 0:
            continue
        same = [v for v in added if v.type == old.type and torch.equal(bits(v.data), bits(old.data))]
        kept = after.constants.get(name)
        replaces = may_replace and len(same) == 1 and (kept is None or not kept.uses)
        if same and not replaces:
            yield f"{same[0].name!r} is a copy of {name!r}, which several nodes share"


def _check_nodes(p: Pass, before: Graph, after: Graph, operators: Operators) -> None:
    """The graph does not grow, and consists of complete calls of known operators."""
    grown = len(after) > len(before) and not getattr(p, "may_grow", False)
    _require(not grown, f"{len(before)} nodes became {len(after)}: a pass that makes more states `may_grow = True`")
    known = {node.op for node in before.nodes}
    for node in after.nodes:
        _require(node.op in known or operators.get(node.kind) is node.op, f"{node!r} is no call of a known operator")
        _require(node.attrs.keys() == node.op.attributes.keys(), f"{node!r} does not have the attributes of its schema")


LITERALS = "clika."
"""Constants that no module of the user's owns: numbers written in its code."""

# Numbers


def _numbers(p: Pass, before: Graph, after: Graph, runs: Sequence[Run]) -> list[tuple[str, Comparison]]:
    """Compare the results of two graphs on all inputs on which the first one is legal."""
    went = False
    if any(node.is_random for node in before.nodes):
        try:
            counts = [random_nodes(graph, runs[0].inputs) for graph in (before, after)]
        except ClikaError:
            return []  # what is drawn at random is not always what the next node takes: no case
        first, then = counts[0][1], counts[1][1]
        is_same = first == then or len({deciding_nodes(graph, runs[0].inputs) for graph in (before, after)}) == 1
        _require(is_same, f"{first} nodes that make results random became {then}")
        went = counts[0] != counts[1]  # random nodes, and with them their part of the stream of numbers
        if counts[0][1] and (went or p.error.kind != "exact"):
            return []
    found: list[tuple[str, Comparison]] = []
    for run in runs:
        try:
            expected = _called_twice(before, run.inputs)
            if went and _differs(expected, _called_twice(before, run.inputs, seed=1)) is not None:
                continue
        except Exception:  # noqa: BLE001, S112 - eager refuses these sizes or elements: no case
            continue
        try:
            actual = _called_twice(after, run.inputs, known=expected)
        except Exception as error:  # noqa: BLE001 - whatever it is, the graph ran before
            return [(run.name, Comparison(Verdict.VALUE, f"ran on {run.name} before, now: {error}"))]
        found.append((run.name, _compare(p, (before, after), run, expected, actual)))
    return found


def _compare(
    p: Pass, graphs: tuple[Graph, Graph], run: Run, expected: Sequence[Tensor], actual: Sequence[Tensor]
) -> Comparison:
    before, _ = graphs
    if p.error.kind != "exact":
        try:
            return _judged(before, run.inputs, expected, actual)
        except RuntimeError as error:  # a convolution in float32 takes a dilation of 0, one in float64 does not
            return Comparison(Verdict.UNSTABLE, f"eager refuses to compute this in wider arithmetic: {error}")
    found = _differs(expected, actual)
    if found is not None and found.verdict is Verdict.VALUE:
        # The class EXACT leaves the sign of a zero open, and 1 / -0.0 is not 1 / 0.0: compare without signs of zeros.
        unsigned = Run(run.name, tuple(map(_unsigned, run.inputs)))
        found = _differs(*(_called_twice(_unsigned_graph(g), unsigned.inputs, unsigned=True) for g in graphs))
    if found is not None and _differs(expected, _called_twice(before, run.inputs)) is not None:
        return Comparison(Verdict.UNSTABLE, "eager itself returns something else each time: it reads undefined memory")
    return found or Comparison(Verdict.PASS, elements=sum(t.numel() for t in expected))


def _judged(
    before: Graph, inputs: Sequence[Tensor], expected: Sequence[Tensor], actual: Sequence[Tensor]
) -> Comparison:
    """Judge what one or two calls returned, each by the reference of its own; return the worse comparison."""
    size = len(before.outputs) + len(before.state)
    found = Reference(_stateless(before), inputs, trusting=True).judge(actual[:size])
    if not before.state or found.verdict.is_failure:
        return found
    later, again = _later(before, inputs, expected)
    second = Reference(_stateless(later), again, trusting=True).judge(actual[size:])
    return max(found, second, key=lambda c: (c.verdict.is_failure, c.verdict is Verdict.PASS, c.ratio))


def _differs(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> Comparison | None:
    for index, (e, a) in enumerate(zip(expected, actual, strict=True)):
        if e.dtype != a.dtype or e.shape != a.shape:
            kinds = [f"{t.dtype}{list(t.shape)}" for t in (a, e)]
            return Comparison(Verdict.STRUCTURE, f"result {index} is {kinds[0]} instead of {kinds[1]}")
        same = (e == a) | (e.isnan() & a.isnan())
        if not bool(same.all()):
            message = f"result {index} differs in {int((~same).sum())} of {e.numel()} elements: {a} instead of {e}"
            return Comparison(Verdict.VALUE, message, elements=e.numel())
    return None


def _called_twice(
    graph: Graph, inputs: Sequence[Tensor], *, known: Sequence[Tensor] = (), unsigned: bool = False, seed: int = 0
) -> list[Tensor]:
    """Return outputs and new state of a call, and where there is state, those of a second call that starts from it.

    Where the results of another graph are ``known``, the second starts from the state in these: so that a difference
    in the first is not seen again in the second.
    """
    first = _computed(graph, inputs, unsigned=unsigned, seed=seed)
    if not graph.state:
        return first
    later, again = _later(graph, inputs, known or first)
    return [*first, *_computed(later, again, unsigned=unsigned, seed=seed)]


def _later(graph: Graph, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> tuple[Graph, list[Tensor]]:
    """Return graph and inputs of a second call, which starts from the state among the results of the first."""
    outputs = len(graph.outputs)
    state = dict(zip(graph.state, results[outputs : outputs + len(graph.state)], strict=True))
    later = graph.clone()
    for name, value in later.constants.items():
        value.data = state.get(name, value.data)
    return later, [state.get(v.name, tensor) for v, tensor in zip(graph.inputs, inputs, strict=True)]


def _computed(graph: Graph, inputs: Sequence[Tensor], *, unsigned: bool, seed: int) -> list[Tensor]:
    """Run a graph with a seed, every result contiguous, since kernels round by layout.

    Raises:
        BrokenRuleError: a node made another type than the graph states.
    """
    types = StatedTypes(graph, inputs)

    def hook(node: Node, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for message in types.broken(node, results):
            raise BrokenRuleError(Verdict.STRUCTURE, message)
        return tuple(_unsigned(r) if unsigned else r.contiguous() for r in results)

    random = any(node.is_random for node in graph.nodes)
    with torch.random.fork_rng(devices=(), enabled=random), torch.no_grad():
        if random:
            torch.default_generator.manual_seed(seed)  # alone, as in `random_nodes`
        outputs, state = interpret(graph, inputs, hook)
    return [t.detach() for t in (*outputs, *state.values())]


def _unsigned(tensor: Tensor) -> Tensor:
    """Return a tensor whose zeros are all positive."""
    return tensor.detach().contiguous() + 0 if tensor.is_floating_point() else tensor.contiguous()


def _unsigned_graph(graph: Graph) -> Graph:
    copy = graph.clone()
    for value in copy.constants.values():
        value.data = None if value.data is None else _unsigned(value.data)
    return copy


def _stateless(graph: Graph) -> Graph:
    """Return a graph that returns its new state behind its outputs."""
    copy = graph.clone()
    for value in copy.state.values():
        copy.add_output(value)
    return copy
