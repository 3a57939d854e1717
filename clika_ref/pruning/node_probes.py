"""Run single nodes on sample elements, to observe their effect on dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.guards import is_met
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.symbols import resolve

MIN_ELEMENT, MAX_ELEMENT = 0.5, 1.5
"""Range of the sample elements: roots, logarithms and quotients of them are not NaN."""


def minimize_batch(graph: Graph, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return sizes with the smallest batch of at least two samples that the guards of a graph accept.

    The cost of running nodes grows with the batch, and the results do not depend on it.
    """
    found = dict(sizes)
    for name in [s.name for s in graph.symbols.values() if s.source.dim == 0 and s.name in sizes]:
        candidates = ({**found, name: count} for count in range(2, found[name]))
        found = next((candidate for candidate in candidates if _is_allowed(graph, candidate)), found)
    return found


def _is_allowed(graph: Graph, sizes: Mapping[str, int]) -> bool:
    """Whether sizes satisfy all guards on these sizes alone."""
    names = {s.expr for s in graph.symbols.values() if s.name in sizes}
    return all(is_met(guard, sizes) for guard in graph.guards if guard.relation.free_symbols <= names)


@dataclass(frozen=True)
class NodeProbe:
    """A node with sample elements for its operands, and its results for them."""

    node: Node
    operands: Sequence[Any]
    results: Sequence[Tensor]
    sizes: Mapping[str, int]

    def run(self, operands: Sequence[Any], attrs: Mapping[str, Any] | None = None) -> list[Tensor]:
        """Run the node on other elements, or with other attributes."""
        return _run(self.node, operands, self.node.attrs if attrs is None else attrs, self.sizes)

    def is_floating(self, position: int) -> bool:
        """Whether an operand is a float tensor with at least one dim."""
        operand = self.operands[position]
        return isinstance(operand, Tensor) and operand.is_floating_point() and operand.ndim > 0

    @property
    def negated(self) -> NodeProbe | None:
        """The same with negated elements; None if the node then returns NaN."""
        operands = [-o if isinstance(o, Tensor) and o.is_floating_point() else o for o in self.operands]
        results = self.run(operands)
        return None if any(r.isnan().any() for r in results) else replace(self, operands=operands, results=results)

    @property
    def cache_key(self) -> Any:
        """A key that is equal for nodes with the same behavior; None if it depends on data."""
        described: list[Any] = []
        for operand in self.operands:
            if isinstance(operand, Tensor) and not operand.is_floating_point():
                return None
            described.append((operand.dtype, *operand.shape) if isinstance(operand, Tensor) else repr(operand))
        return self.node.op_type, repr(self.node.attrs), *described

    @property
    def chooses(self) -> bool:
        """Whether the operands include integers or booleans known only from data."""
        values = [v for v in self.node.inputs if isinstance(v, Value) and not v.is_constant]
        return any(not v.type.dtype.is_floating_point for v in values)


def probe_node(node: Node, sizes: Mapping[str, int], *, chosen: int = 0) -> NodeProbe | str:
    """Return a node with sample elements for its operands, or the reason why there are none.

    Args:
        node: a node of a graph.
        sizes: the values of the graph's symbols, by name.
        chosen: the value of integers known only from data.
    """
    if node.is_random:
        return "it draws random numbers"
    try:
        operands = [
            _make_elements(v, sizes, chosen) if isinstance(v, Value) else resolve(v, sizes) for v in node.inputs
        ]
        results = _run(node, operands, node.attrs, sizes)
    except KeyError as error:
        return f"the size {error} depends on the data"
    if any(r.isnan().any() for r in results):
        return "it returns NaN for finite inputs"
    return NodeProbe(node, operands, results, sizes)


def _run(node: Node, operands: Sequence[Any], attrs: Mapping[str, Any], sizes: Mapping[str, int]) -> list[Tensor]:
    chosen = {name: resolve(v, sizes) for name, v in attrs.items()}
    if node.op.takes_device and chosen["device"] is None:
        chosen["device"] = torch.device("cpu")
    with torch.no_grad():
        result = node.op(*operands, **chosen)
    return [result] if isinstance(result, Tensor) else [*result]


def _make_elements(value: Value, sizes: Mapping[str, int], chosen: int) -> Tensor:
    dtype, shape = value.type.dtype, resolve(value.type.shape, sizes)
    if dtype.is_floating_point:
        drawn = torch.empty(shape).uniform_(MIN_ELEMENT, MAX_ELEMENT, generator=torch.Generator().manual_seed(0))
        return drawn.to(dtype)
    if value.is_constant and value.data is not None:
        return value.data.detach().cpu()
    return torch.full(shape, bool(1 - chosen) if dtype == torch.bool else chosen, dtype=dtype)
