"""Run a graph node by node: the interpreter, which defines the semantics of a graph."""

# pyright: reportPrivateUsage=false, reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# This file reads private links of the IR; sympy has no type annotations.

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from clika_ref.core.errors import ClikaError
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.symbols import resolve

if TYPE_CHECKING:
    from clika_ref.core.symbols import Symbol


def read_sizes(graph: Graph, inputs: Sequence[torch.Tensor]) -> dict[str, int]:
    """Return the size of each symbol of a graph, read from ``inputs``: one tensor for each input, in order."""
    by_name = {value.name: tensor for value, tensor in zip(graph.inputs, inputs, strict=True)}
    return {s.name: _read_symbol(s, by_name[s.source.name]) for s in graph.symbols.values() if s.source.name in by_name}


def _read_symbol(symbol: Symbol, tensor: torch.Tensor) -> int:
    return int(tensor) if symbol.source.dim is None else tensor.shape[symbol.source.dim]


Hook: TypeAlias = "Callable[[Node, tuple[torch.Tensor, ...]], Any]"
"""Called after each node with the node and its results. A truthy return value replaces the results."""


EnterHook: TypeAlias = "Callable[[Graph, Sequence[torch.Tensor]], Any]"
"""Called with a body and its inputs, each time that it runs."""


def interpret(
    graph: Graph, inputs: Sequence[torch.Tensor], hook: Hook | None = None, enter: EnterHook | None = None
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Compute a graph node by node; return its outputs and the new values of its state.

    Args:
        graph: the graph to run.
        inputs: one tensor for each input of the graph, in order.
        hook: called after each node, also of bodies, each time that it runs.
        enter: called before each run of a body.

    Raises:
        ClikaError: a node failed; the message names the node, its module and the user's line.
    """
    constants = {v: v.data for v in graph.constants.values() if v.data is not None}
    return _GraphRun(constants, find_device([*inputs, *constants.values()]), hook, enter).run(graph, inputs)


def find_device(tensors: Sequence[torch.Tensor]) -> torch.device:
    """Return the device of the first of ``tensors``, of any shapes; the CPU if there are none."""
    return tensors[0].device if tensors else torch.device("cpu")


@dataclass(frozen=True)
class _GraphRun:
    constants: dict[Value, torch.Tensor]
    device: torch.device
    hook: Hook | None
    enter: EnterHook | None

    def run(self, graph: Graph, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Compute a graph or a body."""
        values = ChainMap(dict(zip(graph.inputs, inputs, strict=True)), self.constants)  # a loop copies no constants
        sizes = read_sizes(graph, inputs)
        late: dict[str, list[Symbol]] = {}
        for symbol in graph.symbols.values():
            late.setdefault(symbol.source.name, []).append(symbol)
        last_use = {v: node for node in graph.nodes for v in node.inputs if isinstance(v, Value)}
        for node in graph.nodes:
            results = self._run_node(node, values, sizes)
            if self.hook is not None:
                results = self.hook(node, results) or results
            for value, result in zip(node.outputs, results, strict=True):
                values[value] = result
                sizes.update({s.name: _read_symbol(s, result) for s in late.get(value.name, ())})
            for value in node.inputs:
                if isinstance(value, Value) and last_use[value] is node and _is_intermediate(graph, value):
                    values.pop(value, None)
        return [values[v] for v in graph.outputs], {name: values[v] for name, v in graph.state.items()}

    def _run_node(
        self, node: Node, values: Mapping[Value, torch.Tensor], sizes: dict[str, int]
    ) -> tuple[torch.Tensor, ...]:
        operands = [values[v] if isinstance(v, Value) else resolve(v, sizes) for v in node.inputs]
        attrs = {name: resolve(v, sizes) for name, v in node.attrs.items()}
        if node.op.takes_device and attrs["device"] is None:
            attrs["device"] = self.device
        bodies = {name: self._to_function(body) for name, body in zip(node.op.bodies, node.bodies, strict=True)}
        try:
            result = node.op(*operands, **attrs, **bodies)
        except Exception as error:
            raise ClikaError(f"{node!r} in {node.origin}: execution failed: {error}") from error
        return (result,) if isinstance(result, torch.Tensor) else tuple(result)

    def _to_function(self, body: Graph) -> Callable[..., tuple[torch.Tensor, ...]]:
        def call(*operands: Any) -> tuple[torch.Tensor, ...]:
            inputs = [to_tensor(x, self.device) for x in operands]
            if self.enter is not None:
                self.enter(body, inputs)
            return tuple(self.run(body, inputs)[0])

        return call


def to_tensor(operand: Any, device: torch.device) -> torch.Tensor:
    """Return an operand of a body as a tensor: one of any shape as it is, and a size as a 0-d one on ``device``."""
    return operand if isinstance(operand, torch.Tensor) else torch.tensor(operand, device=device)


def _is_intermediate(graph: Graph, value: Value) -> bool:
    return value.producer is not None and all(use.user is not graph for use in value.uses)
