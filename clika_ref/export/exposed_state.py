"""State as inputs and outputs of a file, which keeps nothing between calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from clika_ref.compiled.stateful_runners import NEXT_SUFFIX
from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph, list_read_constants
from clika_ref.reporting.log import CompilationLog

MAX_SHOWN_NAMES = 4
"""Maximum number of names in the warning."""


@dataclass(frozen=True)
class ExposedState:
    """A graph without state: its last inputs and outputs are the state before and after a call."""

    graph: Graph
    tensors: Sequence[Tensor]
    """The current value for each of these inputs."""
    output_names: tuple[str, ...]
    """The name of each of these outputs."""


def expose_state(graph: Graph) -> ExposedState:
    """Return a copy of a graph with an input for each buffer that a call writes, and an output for its next value.

    An input that a call writes only gets an output.

    Raises:
        ModelError: a branch or a loop reads such a buffer.
    """
    copy = Graph(graph.name)
    copy.symbols, copy.guards, copy.aliases = dict(graph.symbols), list(graph.guards), dict(graph.aliases)
    buffers = [graph.constants[name] for name in graph.state if name in graph.constants]
    mapping = {value: copy.add_input(value.type, value.name) for value in (*graph.inputs, *buffers)}
    for name, value in graph.constants.items():
        if value not in mapping:
            mapping[value] = copy.add_constant(value.deferred_data or value.data, name, value.type)
    for node in graph.nodes:
        read = {value for body in node.bodies for value in list_read_constants(body)}
        if not read.isdisjoint(buffers):
            name = next(value.name for value in buffers if value in read)
            raise ModelError(
                f"cannot export {graph.name} with state='io': {node.origin} reads {name!r}, which forward writes, in a "
                "branch or a loop. Read it before, and pass it as an operand."
            )
        copy.insert_copy(node, mapping)
    for value in (*graph.outputs, *graph.state.values()):
        copy.add_output(mapping[value])
    tensors = [data for value in buffers if (data := value.data) is not None]
    return ExposedState(copy, tensors, tuple(f"{name}{NEXT_SUFFIX}" for name in graph.state))


def warn_of_lost_state(graph: Graph, log: CompilationLog) -> None:
    """Warn about the state that a file does not keep."""
    names = [*graph.state]
    if names:
        shown = ", ".join(map(repr, names[:MAX_SHOWN_NAMES]))
        more = f" and {len(names) - MAX_SHOWN_NAMES} more" if len(names) > MAX_SHOWN_NAMES else ""
        log.warning(
            f"forward writes {shown}{more}, but the artifact keeps nothing between calls: each starts with the current "
            "contents. ClikaCompileOptions(state='io') makes them inputs and outputs."
        )
