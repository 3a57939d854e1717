"""Which nodes of a graph make its results random: a pass may drop what is dead, but draws for nobody else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.execution import interpret, read_sizes
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.symbols import resolve

SEEDS = range(4)
"""A call that gives the same for each of these is not random: dropout of probability 0."""

FILLS = (0.5, -0.5, 3.0)
"""An operand of which a node reads no more than the type may hold each of these, and the results are the same."""

DRAWS = 256
"""Draws of a call after which it depends on chance no longer: what changes 1 element in 10 is missed once in 5e11."""

Values = Mapping[Value, Tensor]


def random_nodes(graph: Graph, inputs: Sequence[Tensor]) -> tuple[int, int]:
    """Return how many nodes of a graph are random, and how many of these make its results so."""
    values: dict[Value, Tensor] = dict(zip(graph.inputs, inputs, strict=True))
    values.update((v, v.data) for v in graph.constants.values() if v.data is not None)
    with torch.no_grad():
        interpret(graph, inputs, lambda node, results: values.update(zip(node.outputs, results, strict=True)))
    sizes = read_sizes(graph, inputs)
    varying = {node for node in graph.nodes if node.is_random and _varies(node, values, sizes)}
    live = _live(graph, values, sizes)
    return sum(node.is_random for node in graph.nodes), len(varying.intersection(live))


def deciding_nodes(graph: Graph, inputs: Sequence[Tensor]) -> int:
    """Return how many random nodes change what a graph returns if they alone draw something else.

    That of ``noise / noise`` does not, though either operand of the quotient is read.
    """
    same = _returned(graph, inputs, None, 0)
    random = [node for node in graph.nodes if node.is_random]
    return sum(any(_returned(graph, inputs, node, seed) != same for seed in SEEDS[1:]) for node in random)


def _returned(graph: Graph, inputs: Sequence[Tensor], other: Node | None, seed: int) -> bytes:
    """Return the bytes of all that a graph returns, where one node draws with a seed and all others with 0."""
    nodes = [*graph.nodes]
    seeds = [seed if node is other else 0 for node in nodes]
    following = dict(zip(nodes, [*seeds[1:], 0], strict=True))

    def hook(node: Node, _: tuple[Tensor, ...]) -> None:
        torch.default_generator.manual_seed(following[node])

    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.default_generator.manual_seed(seeds[0])
        outputs, state = interpret(graph, inputs, hook)
    return b"".join(bits(t).numpy().tobytes() for t in (*outputs, *state.values()))


def depends_on_chance(node: Node, values: Values, sizes: Mapping[str, int]) -> bool:
    """Whether a random call may give two runs different results: it does not with a dropout of probability 0.

    Floating operands are one half and its negative, as `rrelu` draws for what is below zero only: what `bernoulli`
    does with probabilities of 0 and 1, which these very operands may hold, is not seen.
    """
    for fill in FILLS[:2]:
        filled = {v: _filled(values[v], fill) for v in node.inputs if isinstance(v, Value)}
        with torch.random.fork_rng(devices=()), suppress(RuntimeError, ValueError):  # not every element is legal
            torch.default_generator.manual_seed(0)
            if _differ(_computed(node, filled, sizes) for _ in range(DRAWS)):
                return True
    return False


def _varies(node: Node, values: Values, sizes: Mapping[str, int]) -> bool:
    """Whether a call gives one seed something else than another.

    Floating operands are one half: what is dropped out already, in one of two graphs, is not seen to be dropped again.
    """
    halves = {v: _filled(values[v], 0.5) for v in node.inputs if isinstance(v, Value)}
    return _differ(_result(node, halves, sizes, seed) for seed in SEEDS)


def _live(graph: Graph, values: Values, sizes: Mapping[str, int]) -> list[Node]:
    """Return the nodes whose results are read, from the last to the first."""
    chance: set[Value] = set()
    for node in graph.nodes:
        if node.is_random or not chance.isdisjoint(v for v in node.inputs if isinstance(v, Value)):
            chance.update(node.outputs)
    needed: set[Value] = {*graph.outputs, *graph.state.values()}
    found: list[Node] = []
    for node in graph.reversed_nodes():
        if not needed.isdisjoint(node.outputs):
            found.append(node)
            operands = [v for v in node.inputs if isinstance(v, Value)]
            needed.update(v for v in operands if v not in chance or _is_read(node, v, values, sizes))
    return found


def _is_read(node: Node, operand: Value, values: Values, sizes: Mapping[str, int]) -> bool:
    """Whether the result of a node depends on the elements of an operand, and not on its type alone."""
    if not operand.type.dtype.is_floating_point:
        return True
    try:
        return _differ(_result(node, {**values, operand: _filled(values[operand], f)}, sizes, 0) for f in FILLS)
    except (RuntimeError, ValueError):  # some elements are not legal: it reads them
        return True


def _differ(results: Iterator[bytes]) -> bool:
    """Whether one of some results is not like the first; those behind it are not computed."""
    first = next(results)
    return any(result != first for result in results)


def _result(node: Node, values: Values, sizes: Mapping[str, int], seed: int) -> bytes:
    """Return the bytes of all results of a call, computed under a seed."""
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)  # alone, as `torch.manual_seed` formats a stack for each other device
        return _computed(node, values, sizes)


def _computed(node: Node, values: Values, sizes: Mapping[str, int]) -> bytes:
    """Return the bytes of all results of a call."""
    operands = [values[v] if isinstance(v, Value) else resolve(v, sizes) for v in node.inputs]
    attrs: dict[str, Any] = {name: resolve(value, sizes) for name, value in node.attrs.items()}
    if node.op.takes_device and attrs["device"] is None:
        attrs["device"] = torch.device("cpu")
    with torch.no_grad():
        results = node.op(*operands, **attrs)
    tensors = [results] if isinstance(results, Tensor) else results
    return b"".join(bits(t).numpy().tobytes() for t in tensors)


def _filled(tensor: Tensor, value: float) -> Tensor:
    return torch.full_like(tensor, value) if tensor.is_floating_point() else tensor


def bits(tensor: Tensor | None) -> Tensor:
    """Return the bytes of a tensor."""
    assert tensor is not None
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)  # a single element may have any stride, which view refuses
    return flat.copy_(tensor.detach().reshape(-1)).view(torch.uint8)
