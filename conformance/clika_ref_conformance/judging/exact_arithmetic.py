"""A graph in float64: what it returns where no operation rounds, with the casts that it spells out still rounding."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from clika_ref.core.execution import read_sizes
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.symbols import resolve
from clika_ref_conformance.judging.rounding import Call, as_list, flattened, is_float, mapped, rounded

Compute = Callable[[Node, Call], Sequence[torch.Tensor]]
"""Computes one node from its call."""

WIDE = torch.float64


def walk(
    graph: Graph,
    inputs: Sequence[torch.Tensor],
    compute: Compute,
    *,
    wide: bool,
    nodes: Collection[Node] | None = None,
) -> dict[Value, torch.Tensor]:
    """Run a graph node by node with ``compute``; return every value.

    Every result is contiguous, since kernels round by layout, and make NaN or an infinity by it: eager's ``gelu`` of
    an infinity is NaN where vectors of 512 bits are computed, and the infinity where the elements lie apart.

    Args:
        graph: what to run.
        inputs: one tensor for each input of the graph, in order.
        compute: returns the results of a node.
        wide: whether floating inputs and constants become float64.
        nodes: those that are run, with all that they need; all of them where none are named.

    """
    constants = {v: v.data.detach() for v in graph.constants.values() if v.data is not None}
    given = {**dict(zip(graph.inputs, inputs, strict=True)), **constants}
    values = {v: t.to(WIDE) if wide and is_float(t) else t for v, t in given.items()}
    sizes = dict(read_sizes(graph, inputs))
    late = [s for s in graph.symbols.values() if s.name not in sizes]
    for node in graph.nodes:
        if nodes is not None and node not in nodes:
            continue
        operands = tuple(values[v] if isinstance(v, Value) else resolve(v, sizes) for v in node.inputs)
        attrs = {name: resolve(v, sizes) for name, v in node.attrs.items()}
        results = compute(node, Call(node.op.name, node.op, operands, attrs))
        for value, result in zip(node.outputs, results, strict=True):
            values[value] = result.contiguous()
            for symbol in late:
                if symbol.side.name == value.name:
                    dim = symbol.side.dim
                    sizes[symbol.name] = int(result) if dim is None else result.shape[dim]
    return values


def needed_for(graph: Graph, outputs: Collection[Value]) -> set[Node]:
    """Return the nodes that some values of a graph depend on; all of them where sizes are read from results."""
    made = {v.name for node in graph.nodes for v in node.outputs}
    if any(symbol.side.name in made for symbol in graph.symbols.values()):
        return set(graph.nodes)
    values, nodes = set(outputs), set[Node]()
    for node in graph.reversed_nodes():
        if not values.isdisjoint(node.outputs):
            nodes.add(node)
            values.update(v for v in node.inputs if isinstance(v, Value))
    return nodes


def eagerly(_node: Node, call: Call) -> list[torch.Tensor]:
    """Compute a node as eager does, in the dtypes that it declares."""
    return call.run()


@contextmanager
def float64_by_default() -> Iterator[None]:
    """Make float64 what integers become where they are divided."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(WIDE)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def widened(node: Node, call: Call) -> Call:
    """Return a call on float64 operands as one that computes in float64.

    A cast stays one: where an attribute names a floating dtype that is coarser than the first operand's, that operand
    is rounded to it; the scale of `dequantize` is not. Numbers of an operator that rounds nothing (a bound of
    ``clamp``) are rounded as eager rounds them, and so are integers of which a function is computed in floats: the
    sine of a number of which float32 does not hold the last digits is any other number.
    """
    asked = [d for d in call.attrs.values() if isinstance(d, torch.dtype) and d.is_floating_point]
    operands = call.operands
    first = next(iter(node.inputs), None)
    if asked and isinstance(first, Value) and _is_coarser(asked[0], first.type.dtype):
        operands = (rounded(operands[0], asked[0]), *operands[1:])
    attrs = {k: WIDE if isinstance(v, torch.dtype) and v.is_floating_point else v for k, v in call.attrs.items()}
    dtype = declared_dtype(node)
    if node.op.error.kind == "norm" and attrs.get("eps", 0) is None and dtype is not None:
        attrs["eps"] = torch.finfo(
            torch.promote_types(dtype, torch.float32)
        ).eps  # what eager takes where it is left out
    if node.op.error.kind == "exact" and dtype is not None and dtype is not WIDE:
        operands = tuple(_as_in(o, dtype) for o in operands)
        attrs = {k: _as_in(v, dtype) for k, v in attrs.items()}
    if node.op.error.kind == "ulp" and dtype is not None and not asked and not any(map(is_float, flattened(operands))):
        operands = tuple(rounded(o, dtype) if isinstance(o, torch.Tensor) else o for o in operands)
    return Call(call.name, call.function, operands, attrs)


def _is_coarser(dtype: torch.dtype, than: torch.dtype) -> bool:
    return than.is_floating_point and torch.finfo(dtype).eps > torch.finfo(than).eps


def _as_in(item: Any, dtype: torch.dtype) -> Any:
    return torch.tensor(item, dtype=dtype).item() if isinstance(item, float) else item


def declared_dtype(node: Node) -> torch.dtype | None:
    """Return the floating dtype that a node computes in: that of its result, or else of its first floating operand."""
    values = (*node.outputs, *(v for v in node.inputs if isinstance(v, Value)))
    return next((v.type.dtype for v in values if v.type.dtype.is_floating_point), None)


def computing_dtype(node: Node) -> torch.dtype:
    """Return the floating dtype whose rounding bounds a node: of a composition, the coarsest that takes part."""
    dtype = declared_dtype(node) or torch.float32
    if node.op.error.kind in ("compose", "norm"):
        every = [v.type.dtype for v in node.inputs if isinstance(v, Value) and v.type.dtype.is_floating_point]
        dtype = max((dtype, *every), key=lambda d: torch.finfo(d).eps)
    return dtype


def computed(node: Node, call: Call, eager: Mapping[Value, torch.Tensor]) -> tuple[Call, list[torch.Tensor]]:
    """Return a node's call in float64, and its results.

    What is made from nothing (``arange``) is a constant and has eager's elements. Where the reference does not know
    float64, or draws at random, it is run in the declared dtypes.
    """
    if node.is_random or not any(isinstance(o, torch.Tensor) for o in call.operands):
        return call, [_wide(eager[v]) for v in node.outputs]
    wide = widened(node, call)
    try:
        results = wide.run()
    except (RuntimeError, TypeError, ValueError):
        narrow = iter([v.type.dtype for v in node.inputs if isinstance(v, Value) and v.type.dtype.is_floating_point])
        results = as_list(call.function(*mapped(call.operands, lambda t: t.to(next(narrow))), **call.attrs))
    return wide, [_wide(r) for r in results]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(WIDE) if tensor.is_floating_point() else tensor
