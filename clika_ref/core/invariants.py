"""The invariants of a graph. Its four mutators keep them; a pass may break them."""

# pyright: reportPrivateUsage=false
# This file reads private links of the IR.

from __future__ import annotations

from collections import Counter

from clika_ref.core.errors import PassError
from clika_ref.core.ir import Graph, Value


def verify(graph: Graph) -> None:
    """Check every invariant of a graph in linear time.

    Raises:
        PassError: an invariant is broken; the message shows the node, and the graph is attached as a note.
    """
    known: set[Value] = {*graph.inputs, *graph.constants.values()}
    listed, read, count = sum(value.use_count for value in known), 0, len(graph.inputs) + len(graph.constants)
    # Format a message only on failure: printing long size expressions would take most of the time.
    for node in graph.nodes:
        for position, value in enumerate(node.inputs):
            if isinstance(value, Value):
                if value not in known:
                    raise _make_error(graph, f"{node!r} reads %{value.name} before it is computed")
                if not value.is_read_by(node, position):
                    raise _make_error(graph, f"the use of %{value.name} by {node!r} is not listed")
                read += 1
        for index, value in enumerate(node.outputs):
            if value.producer is not node or value.index != index:
                raise _make_error(graph, f"{value!r} does not refer to {node!r}, which produces it")
            known.add(value)
            listed += value.use_count
        count += len(node.outputs)
    returned = [*enumerate(graph.outputs), *graph.state.items()]
    for position, value in returned:
        if value not in known:
            raise _make_error(graph, f"the graph returns %{value.name}, but no node computes it")
        if not value.is_read_by(graph, position):
            raise _make_error(graph, f"the use of %{value.name} by the graph is not listed")
    if len({value.name for value in known}) < count:
        made = [v for node in graph.nodes for v in node.outputs]
        names = Counter(v.name for v in (*graph.inputs, *graph.constants.values(), *made))
        value = max(known, key=lambda v: (names[v.name], v.producer is not None))
        raise _make_error(graph, f"two values have the name {value.name!r}; {value.producer!r} produces one of them")
    if listed > read + len(returned):  # every read is listed (checked above), so the surplus is never read
        reads = Counter([v for n in graph.nodes for v in n.inputs if isinstance(v, Value)] + [v for _, v in returned])
        raise _make_error(
            graph, f"%{next(v.name for v in known if v.use_count > reads[v])} lists uses that do not exist"
        )


def _make_error(graph: Graph, message: str) -> PassError:
    error = PassError(message)
    error.add_note(str(graph))
    return error
