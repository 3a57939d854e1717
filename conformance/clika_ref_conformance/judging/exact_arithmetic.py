"""Evaluate a graph in float64, where no operation rounds except the graph's explicit casts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from clika_ref.core.execution import read_sizes
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.symbols import resolve
from clika_ref_conformance.eager_calls import as_list
from clika_ref_conformance.judging.rounding import (
    ConcreteCall,
    flatten_operands,
    is_float,
    map_floats,
    round_to,
)

ComputeNode = Callable[[Node, ConcreteCall], Sequence[torch.Tensor]]
"""Function that computes one node from its call."""

REFERENCE_DTYPE = torch.float64


def evaluate_graph(
    graph: Graph,
    inputs: Sequence[torch.Tensor],
    compute: ComputeNode,
    *,
    wide: bool,
    nodes: Collection[Node] | None = None,
) -> dict[Value, torch.Tensor]:
    """Run a graph node by node with ``compute``; return every value.

    Every result is contiguous, since rounding, NaN and infinities in kernels depend on the layout. For example, eager's
    ``gelu`` of an infinity is NaN in 512-bit vector code, and infinite for strided elements.

    Args:
        graph: graph to run.
        inputs: one tensor for each input of the graph, in order.
        compute: returns the results of a node.
        wide: whether floating inputs and constants become float64.
        nodes: nodes to run, with all their dependencies; all nodes by default.
    """
    constants = {v: v.data.detach() for v in graph.constants.values() if v.data is not None}
    given = {**dict(zip(graph.inputs, inputs, strict=True)), **constants}
    values = {v: t.to(REFERENCE_DTYPE) if wide and is_float(t) else t for v, t in given.items()}
    sizes = dict(read_sizes(graph, inputs))
    late = [s for s in graph.symbols.values() if s.name not in sizes]
    for node in graph.nodes:
        if nodes is not None and node not in nodes:
            continue
        operands = tuple(values[v] if isinstance(v, Value) else resolve(v, sizes) for v in node.inputs)
        attrs = {name: resolve(v, sizes) for name, v in node.attrs.items()}
        results = compute(node, ConcreteCall(node.op.name, node.op, operands, attrs))
        for value, result in zip(node.outputs, results, strict=True):
            values[value] = result.contiguous()
            for symbol in late:
                if symbol.source.name == value.name:
                    dim = symbol.source.dim
                    sizes[symbol.name] = int(result) if dim is None else result.shape[dim]
    return values


def find_dependencies(graph: Graph, outputs: Collection[Value]) -> set[Node]:
    """Return the nodes that values of a graph depend on; all nodes if sizes are read from results."""
    made = {v.name for node in graph.nodes for v in node.outputs}
    if any(symbol.source.name in made for symbol in graph.symbols.values()):
        return set(graph.nodes)
    values, nodes = set(outputs), set[Node]()
    for node in graph.nodes_backward():
        if not values.isdisjoint(node.outputs):
            nodes.add(node)
            values.update(v for v in node.inputs if isinstance(v, Value))
    return nodes


def compute_eagerly(_node: Node, call: ConcreteCall) -> list[torch.Tensor]:
    """Compute a node as eager does, in its declared dtypes."""
    return call.run()


@contextmanager
def use_float64_by_default() -> Iterator[None]:
    """Make float64 the default dtype, the result of dividing integers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(REFERENCE_DTYPE)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def widen_call(node: Node, call: ConcreteCall) -> ConcreteCall:
    """Convert a call on float64 operands to one that computes in float64.

    Casts are kept: if an attribute names a floating dtype coarser than the first operand's, that operand is rounded to
    it. The scale of `dequantize` is not rounded. Numbers of an operator that does not round (a bound of ``clamp``) are
    rounded as in eager. So are integer operands of functions that compute in floats: the sine of an integer that
    float32 cannot represent exactly is arbitrary.
    """
    asked = [d for d in call.attrs.values() if isinstance(d, torch.dtype) and d.is_floating_point]
    operands = call.operands
    first = next(iter(node.inputs), None)
    if asked and isinstance(first, Value) and _is_coarser(asked[0], first.type.dtype):
        operands = (round_to(operands[0], asked[0]), *operands[1:])
    attrs = {
        k: REFERENCE_DTYPE if isinstance(v, torch.dtype) and v.is_floating_point else v for k, v in call.attrs.items()
    }
    dtype = floating_dtype_of(node)
    if node.op.error.kind == "norm" and attrs.get("eps", 0) is None and dtype is not None:
        attrs["eps"] = torch.finfo(torch.promote_types(dtype, torch.float32)).eps  # eager's default for `eps`
    if node.op.error.kind == "exact" and dtype is not None and dtype is not REFERENCE_DTYPE:
        operands = tuple(_round_number(o, dtype) for o in operands)
        attrs = {k: _round_number(v, dtype) for k, v in attrs.items()}
    if (
        node.op.error.kind == "ulp"
        and dtype is not None
        and not asked
        and not any(map(is_float, flatten_operands(operands)))
    ):
        operands = tuple(round_to(o, dtype) if isinstance(o, torch.Tensor) else o for o in operands)
    return ConcreteCall(call.name, call.function, operands, attrs)


def _is_coarser(dtype: torch.dtype, than: torch.dtype) -> bool:
    return than.is_floating_point and torch.finfo(dtype).eps > torch.finfo(than).eps


def _round_number(item: Any, dtype: torch.dtype) -> Any:
    return torch.tensor(item, dtype=dtype).item() if isinstance(item, float) else item


def floating_dtype_of(node: Node) -> torch.dtype | None:
    """Return the floating dtype that a node computes in: its result's, or else that of its first floating operand."""
    values = (*node.outputs, *(v for v in node.inputs if isinstance(v, Value)))
    return next((v.type.dtype for v in values if v.type.dtype.is_floating_point), None)


def coarsest_dtype_of(node: Node) -> torch.dtype:
    """Return the floating dtype with the rounding that bounds a node; for a composition, the coarsest one involved."""
    dtype = floating_dtype_of(node) or torch.float32
    if node.op.error.kind in ("compose", "norm"):
        every = [v.type.dtype for v in node.inputs if isinstance(v, Value) and v.type.dtype.is_floating_point]
        dtype = max((dtype, *every), key=lambda d: torch.finfo(d).eps)
    return dtype


def compute_exactly(
    node: Node, call: ConcreteCall, eager: Mapping[Value, torch.Tensor]
) -> tuple[ConcreteCall, list[torch.Tensor]]:
    """Return a node's call in float64, and its results.

    Random results, and results without tensor operands (``arange``), have eager's elements. If the reference does not
    support float64, it runs in the declared dtypes.
    """
    if node.is_random or not any(isinstance(o, torch.Tensor) for o in call.operands):
        return call, [_to_float64(eager[v]) for v in node.outputs]
    wide = widen_call(node, call)
    try:
        results = wide.run()
    except (RuntimeError, TypeError, ValueError):
        narrow = iter([v.type.dtype for v in node.inputs if isinstance(v, Value) and v.type.dtype.is_floating_point])
        results = as_list(call.function(*map_floats(call.operands, lambda t: t.to(next(narrow))), **call.attrs))
    return wide, [_to_float64(r) for r in results]


def _to_float64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(REFERENCE_DTYPE) if tensor.is_floating_point() else tensor
