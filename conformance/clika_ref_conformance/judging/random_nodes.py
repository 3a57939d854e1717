"""Find the nodes that make a graph's results random: a pass may remove dead ones, but must keep the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from clika_ref.core.execution import interpret, read_sizes
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.symbols import resolve
from clika_ref_conformance.eager_calls import call_eagerly, resolve_attrs

PROBE_SEEDS = range(4)
"""A call with the same result for each of these seeds is not random, such as dropout of probability 0."""

PROBE_FILLS = (0.5, -0.5, 3.0)
"""Fill values for an operand: if the results are the same for each, a node reads only the operand's type."""

MAX_DRAWS = 256
"""Equal draws that make a call count as deterministic; a change of 1 element in 10 stays undetected once in 5e11."""

Values = Mapping[Value, Tensor]


def count_random_nodes(graph: Graph, inputs: Sequence[Tensor]) -> tuple[int, int]:
    """Return the number of random nodes of a graph, and the number of those that make its results random."""
    values: dict[Value, Tensor] = dict(zip(graph.inputs, inputs, strict=True))
    values.update((v, v.data) for v in graph.constants.values() if v.data is not None)
    with torch.no_grad():
        interpret(graph, inputs, lambda node, results: values.update(zip(node.outputs, results, strict=True)))
    sizes = read_sizes(graph, inputs)
    varying = {node for node in graph.nodes if node.is_random and _is_seed_dependent(node, values, sizes)}
    live = _find_live_nodes(graph, values, sizes)
    return sum(node.is_random for node in graph.nodes), len(varying.intersection(live))


def count_deciding_nodes(graph: Graph, inputs: Sequence[Tensor]) -> int:
    """Return the number of random nodes that change the results of a graph if only they get another seed.

    The random node of ``noise / noise`` does not, although the quotient reads both operands.
    """
    same = _graph_result_bytes(graph, inputs, None, 0)
    random = [node for node in graph.nodes if node.is_random]
    return sum(
        any(_graph_result_bytes(graph, inputs, node, seed) != same for seed in PROBE_SEEDS[1:]) for node in random
    )


def _graph_result_bytes(graph: Graph, inputs: Sequence[Tensor], other: Node | None, seed: int) -> bytes:
    """Return the bytes of all results of a graph, with one node drawing from ``seed`` and all others from 0."""
    nodes = [*graph.nodes]
    seeds = [seed if node is other else 0 for node in nodes]
    following = dict(zip(nodes, [*seeds[1:], 0], strict=True))

    def hook(node: Node, _: tuple[Tensor, ...]) -> None:
        torch.default_generator.manual_seed(following[node])

    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.default_generator.manual_seed(seeds[0])
        outputs, state = interpret(graph, inputs, hook)
    return b"".join(bytes_of(t).numpy().tobytes() for t in (*outputs, *state.values()))


def is_random_call(node: Node, values: Values, sizes: Mapping[str, int]) -> bool:
    """Return whether a random call may give two runs different results, unlike a dropout of probability 0.

    Floating operands are replaced by 0.5 and -0.5, as `rrelu` draws only for elements below zero. So determinism that
    depends on the actual elements, such as `bernoulli` of probabilities 0 and 1, is not detected.
    """
    for fill in PROBE_FILLS[:2]:
        filled = {v: _fill_floats(values[v], fill) for v in node.inputs if isinstance(v, Value)}
        with torch.random.fork_rng(devices=()), suppress(RuntimeError, ValueError):  # the fill value may be illegal
            torch.default_generator.manual_seed(0)
            if _has_difference(_call_bytes(node, filled, sizes) for _ in range(MAX_DRAWS)):
                return True
    return False


def _is_seed_dependent(node: Node, values: Values, sizes: Mapping[str, int]) -> bool:
    """Return whether a call gives different results for different seeds.

    Floating operands are replaced by 0.5: zeros from an earlier dropout, in one of two graphs, would hide a further
    one.
    """
    halves = {v: _fill_floats(values[v], 0.5) for v in node.inputs if isinstance(v, Value)}
    return _has_difference(_call_bytes_for_seed(node, halves, sizes, seed) for seed in PROBE_SEEDS)


def _find_live_nodes(graph: Graph, values: Values, sizes: Mapping[str, int]) -> list[Node]:
    """Return the nodes with results that are read, from the last to the first."""
    chance: set[Value] = set()
    for node in graph.nodes:
        if node.is_random or not chance.isdisjoint(v for v in node.inputs if isinstance(v, Value)):
            chance.update(node.outputs)
    needed: set[Value] = {*graph.outputs, *graph.state.values()}
    found: list[Node] = []
    for node in graph.nodes_backward():
        if not needed.isdisjoint(node.outputs):
            found.append(node)
            operands = [v for v in node.inputs if isinstance(v, Value)]
            needed.update(v for v in operands if v not in chance or _is_read(node, v, values, sizes))
    return found


def _is_read(node: Node, operand: Value, values: Values, sizes: Mapping[str, int]) -> bool:
    """Return whether the result of a node depends on the elements of an operand, and not only on its type."""
    if not operand.type.dtype.is_floating_point:
        return True
    try:
        return _has_difference(
            _call_bytes_for_seed(node, {**values, operand: _fill_floats(values[operand], f)}, sizes, 0)
            for f in PROBE_FILLS
        )
    except (RuntimeError, ValueError):  # it rejects a fill value, so it reads the elements
        return True


def _has_difference(results: Iterator[bytes]) -> bool:
    """Return whether any result differs from the first; stops at the first difference."""
    first = next(results)
    return any(result != first for result in results)


def _call_bytes_for_seed(node: Node, values: Values, sizes: Mapping[str, int], seed: int) -> bytes:
    """Return the bytes of all results of a call, computed with a seed."""
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would format a stack for each other device
        return _call_bytes(node, values, sizes)


def _call_bytes(node: Node, values: Values, sizes: Mapping[str, int]) -> bytes:
    """Return the bytes of all results of a call."""
    operands = [values[v] if isinstance(v, Value) else resolve(v, sizes) for v in node.inputs]
    results = call_eagerly(node.op, operands, resolve_attrs(node.op, node.attrs, sizes))
    return b"".join(bytes_of(t).numpy().tobytes() for t in results)


def _fill_floats(tensor: Tensor, value: float) -> Tensor:
    return torch.full_like(tensor, value) if tensor.is_floating_point() else tensor


def bytes_of(tensor: Tensor | None) -> Tensor:
    """Return the bytes of a tensor."""
    assert tensor is not None
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)  # a single element may have any stride, which `view` rejects
    return flat.copy_(tensor.detach().reshape(-1)).view(torch.uint8)
