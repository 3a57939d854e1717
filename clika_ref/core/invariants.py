"""The invariants of a graph, which its four mutators keep and a pass may break."""

# pyright: reportPrivateUsage=false
# It reads the links of the IR.

from __future__ import annotations

from clika_ref.core.errors import PassError
from clika_ref.core.ir import Graph, Use, Value


def verify(graph: Graph) -> None:
    """Check every invariant of a graph, in linear time.

    Raises:
        PassError: one is broken; the message shows the node, the graph is attached as a note.
    """
    known: set[Value] = {*graph.inputs, *graph.constants.values()}
    names = {v.name for v in known}
    expected: dict[Value, int] = {}
    # A message is written only where an invariant is broken: printing long size expressions takes most of the time.
    for node in graph.nodes:
        for position, value in enumerate(node.inputs):
            if isinstance(value, Value):
                if value not in known:
                    raise _broken(graph, f"{node!r} reads %{value.name} before it is computed")
                if Use(node, position) not in value._uses:
                    raise _broken(graph, f"the use of %{value.name} by {node!r} is not listed")
                expected[value] = expected.get(value, 0) + 1
        for index, value in enumerate(node.outputs):
            if value.producer is not node or value.index != index:
                raise _broken(graph, f"{value!r} does not know its {node!r}")
            if value.name in names:
                raise _broken(graph, f"two values are named {value.name!r}; one is made by {node!r}")
            known.add(value)
            names.add(value.name)
    for value in (*graph.outputs, *graph.state.values()):
        if value not in known:
            raise _broken(graph, f"the graph returns %{value.name}, which nothing computes")
        expected[value] = expected.get(value, 0) + 1
    for value in known:
        if len(value._uses) != expected.get(value, 0):
            raise _broken(graph, f"%{value.name} lists uses that do not exist")


def _broken(graph: Graph, message: str) -> PassError:
    error = PassError(message)
    error.add_note(str(graph))
    return error
