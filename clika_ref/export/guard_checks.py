"""Make guards part of a file: nodes that fail where a guard does not hold, as the module does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import sympy
from torch import Tensor

from clika_ref.core.accuracy import EXACT
from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import operator
from clika_ref.core.symbols import Guard
from clika_ref.core.types import Origin
from clika_ref.reporting.log import CompilationLog

MAX_SHOWN_GUARDS = 5
"""Maximum number of guards in a warning."""

IMPOSSIBLE_SIZE = 2**30
"""A size that no dim has, so that a reshape to it fails."""


@operator(error=EXACT)
def check_sizes(x: Tensor, *, holds: bool, guard: str) -> Tensor:
    """Return ``x``, of rank 1 or more, if a relation between sizes ``holds``; else raise an error that names the guard.

    Raises:
        ModelError: the relation does not hold.
    """
    if not holds:
        raise ModelError(f"the sizes of the inputs violate {guard}. Pass inputs of other sizes.")
    return x.clone()


@check_sizes.onnx
def _lower_check(op: Any, x: Any, *, holds: Any, guard: str) -> Any:  # noqa: ARG001 - the name of the node
    """ONNX has no assertion. A reshape fails in each runtime if the number of elements differs, and moves no data.

    A second one states the static dims again, which a computed shape hides. OpenVINO drops a reshape from one dim to
    one dim, so that a vector becomes a row in between.
    """
    shape = op.shape(x)
    is_vector = len(shape) == 1
    same = [1, -1] if is_vector else [0] * len(shape)  # 0: the size of x
    impossible = [IMPOSSIBLE_SIZE, *(1 for _ in same[1:])]
    relation = holds if isinstance(holds, sympy.Basic) else sympy.true if holds else sympy.false
    checked = op.Reshape(x, op.Where(op.sizes.emit_vector(relation), op.ints(same), op.ints(impossible)))
    own = [-1] if is_vector else [size if isinstance(size, int) else 0 for size in shape]
    return op.Reshape(checked, op.ints(own)) if any(own) else checked


def insert_guard_checks(graph: Graph, guards: Sequence[Guard]) -> list[Guard]:
    """Insert a check of each guard between a value, in general an input, and its readers.

    Args:
        graph: the graph; guards on sizes of its inputs are checked.
        guards: the guards to check.

    Returns:
        The guards that nothing checks: those on sizes that depend on values, and on numbers if no dim is dynamic.
    """
    inputs = {value.name for value in graph.inputs}
    known = {symbol.expr for symbol in graph.symbols.values() if symbol.source.name in inputs}
    unchecked: list[Guard] = []
    for guard in guards:
        source, before = _choose_checked_value(graph, guard)
        if source is None or not guard.relation.free_symbols <= known:
            unchecked.append(guard)
            continue
        attributes = {"holds": guard.relation, "guard": str(guard)}
        node = Node(check_sizes, [source], attributes, Origin(lines=(guard.line,)))
        graph.insert(node, [source.type], before, [str(guard)])
        graph.replace(source, node.output)
        graph.set_input(node, 0, source)
    return unchecked


def _choose_checked_value(graph: Graph, guard: Guard) -> tuple[Value | None, Node | None]:
    """Return a value with a dynamic dim that a guard is checked on, and the node before which it exists.

    Best is an input with a size of the guard, and of least rank, such as the ids of tokens. A static value would not
    do: a runtime merges the reshape of one with the next.
    """
    nodes = list(graph.nodes)
    inputs = [value for value in graph.inputs if value.use_count and _has_dynamic_dim(value)]
    if inputs:
        used = guard.relation.free_symbols

        def rank_input(value: Value) -> tuple[bool, int]:
            return used.isdisjoint(value.type.shape), value.type.rank

        return min(inputs, key=rank_input), next(iter(nodes), None)
    for node, following in zip(nodes, [*nodes[1:], None], strict=True):
        for value in node.outputs:
            if value.use_count and _has_dynamic_dim(value) and node.op is not check_sizes:
                return value, following
    return None, None


def _has_dynamic_dim(value: Value) -> bool:
    return any(not isinstance(size, int) for size in value.type.shape)


def warn_of_unchecked_guards(guards: Sequence[Guard], graph: Graph, log: CompilationLog) -> None:
    """Warn about guards that the artifact does not check; a long list is written to the log file."""
    if not guards:
        return
    shown = guards[:MAX_SHOWN_GUARDS]
    where = ", listed in the log" if log.path else "; logs_dir writes a log of all"
    more = f"; and {len(guards) - len(shown)} more{where}" if len(guards) > len(shown) else ""
    noun, them = ("guard", "it") if len(guards) == 1 else ("guards", "them")
    log.warning(
        f"the artifact does not check the {noun} {'; '.join(map(str, shown))}{more}. "
        f"{''.join(_describe_computed_sizes(graph, shown))}"
        f"Inputs that violate {them} may fail or give wrong results. Check them before each call."
    )
    if more:
        lines = "\n".join(f"+ {guard}" for guard in guards)
        log.detail(f"The artifact does not check these guards:\n{lines}")


def _describe_computed_sizes(graph: Graph, guards: Sequence[Guard]) -> Iterator[str]:
    """Yield a sentence for each size or number in guards that is not one of an input, but depends on values."""
    used = {symbol for guard in guards for symbol in guard.relation.free_symbols}
    inputs = {value.name for value in graph.inputs}
    results: dict[str, Node] = {value.name: node for node in graph.nodes for value in node.outputs}
    for symbol in graph.symbols.values():
        if symbol.expr in used and symbol.source.name not in inputs:
            part = "the value" if symbol.source.dim is None else f"dim {symbol.source.dim}"
            node = results.get(symbol.source.name)
            line = f" at {node.origin.line}" if node and node.origin.line else ""
            yield f"{symbol.name} is {part} of a result of {node.op_type if node else 'the model'}{line}. "
