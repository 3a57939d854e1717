"""The invariants of a graph. Its four mutators keep them; a pass may break them."""

# pyright: reportPrivateUsage=false
# This file reads private links of the IR.

from __future__ import annotations

from collections import Counter

from clika_ref.core.errors import PassError
from clika_ref.core.ir import Graph, Node, Value


def verify(graph: Graph) -> None:
    """Check every invariant of a graph and of its bodies in linear time. A body is checked with its outermost graph.

    Raises:
        PassError: an invariant is broken; the message shows the node, and the graph is attached as a note.
    """
    graph = graph.root
    reads: list[Value] = []
    values = [*graph.inputs, *graph.constants.values()]
    _verify_one(graph, reads, values)
    if len({value.name for value in values}) < len(values):
        names = Counter(v.name for v in values)
        value = max(values, key=lambda v: (names[v.name], v.producer is not None))
        raise _make_error(graph, f"two values have the name {value.name!r}; {value.producer!r} produces one of them")
    if sum(value.use_count for value in values) > len(reads):  # each read is listed, so the surplus is never read
        counts = Counter(reads)
        surplus = next(v.name for v in values if v.use_count > counts[v])
        raise _make_error(graph, f"%{surplus} lists uses that do not exist")


def _verify_one(graph: Graph, reads: list[Value], values: list[Value]) -> None:
    """Check one graph and its bodies; add its ``reads``, and the ``values`` that it computes."""
    known: set[Value] = {*graph.inputs, *graph.constants.values()}
    # Format a message only on failure: printing long size expressions would take most of the time.
    for node in graph.nodes:
        for position, value in enumerate(node.inputs):
            if isinstance(value, Value):
                if value not in known:
                    raise _make_error(graph, f"{node!r} reads %{value.name} before it is computed")
                if not value.is_read_by(node, position):
                    raise _make_error(graph, f"the use of %{value.name} by {node!r} is not listed")
                reads.append(value)
        for index, value in enumerate(node.outputs):
            if value.producer is not node or value.index != index:
                raise _make_error(graph, f"{value!r} does not refer to {node!r}, which produces it")
            known.add(value)
        values += node.outputs
        for body in node.bodies:
            _verify_body(graph, node, body, reads, values)
    for position, value in [*enumerate(graph.outputs), *graph.state.items()]:
        if value not in known:
            raise _make_error(graph, f"the graph returns %{value.name}, but no node computes it")
        if not value.is_read_by(graph, position):
            raise _make_error(graph, f"the use of %{value.name} by the graph is not listed")
        reads.append(value)


def _verify_body(graph: Graph, node: Node, body: Graph, reads: list[Value], values: list[Value]) -> None:
    if body.parent is not graph:
        raise _make_error(graph, f"the body {body.name} of {node!r} was not created by new_body of the graph")
    if body.state:
        raise _make_error(graph, f"the body {body.name} of {node!r} overwrites {', '.join(body.state)}")
    values += body.inputs
    _verify_one(body, reads, values)


def _make_error(graph: Graph, message: str) -> PassError:
    error = PassError(message)
    error.add_note(str(graph))
    return error
