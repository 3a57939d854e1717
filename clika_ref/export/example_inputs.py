"""Generate inputs: dummy inputs of the traced shapes, and an example to compare an artifact on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from clika_ref.capture.random_inputs import DISTRIBUTION_COUNT, UNSAFE_ON_OTHER_INPUTS, redraw
from clika_ref.capture.signature import ConstantLeaf, NumberLeaf, Signature
from clika_ref.core.errors import ClikaError
from clika_ref.core.execution import interpret
from clika_ref.core.ir import Graph, Node, walk
from clika_ref.core.symbols import resolve

FINITE, INFINITE, NOT_A_NUMBER, FAILED = range(4)
"""Possible outcomes of an input, best first: infinite values occur in masks, and NaN has no order for comparisons."""


def choose_example(graph: Graph, dummy: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the inputs of a graph with varied floats, because all-ones inputs give ties in argmax and top-k.

    That is the first random draw with finite results at every node; otherwise the best one, including the dummy.
    """
    if any(node.op_type in UNSAFE_ON_OTHER_INPUTS for node in walk(graph)):
        return dummy
    best, found = dummy, FAILED
    for draw in range(DISTRIBUTION_COUNT + 1):
        inputs = redraw(dummy, draw, positions=False) if draw < DISTRIBUTION_COUNT else dummy
        outcome = _outcome(graph, inputs)
        if outcome < found:
            best, found = inputs, outcome
        if found == FINITE:
            break
    return best


def _outcome(graph: Graph, inputs: Sequence[torch.Tensor]) -> int:
    worst = FINITE

    def look(_: Node, results: tuple[torch.Tensor, ...]) -> None:
        nonlocal worst
        worst = max([worst, *(_classify(r) for r in results if r.is_floating_point() or r.is_complex())])

    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            interpret(graph, [t.clone() for t in inputs], look)
    except ClikaError:
        return FAILED
    return worst


def _classify(result: torch.Tensor) -> int:
    if result.itemsize == 1:  # some 8-bit formats do not support these checks
        result = result.float()
    if bool(result.isfinite().all()):
        return FINITE
    return NOT_A_NUMBER if bool(result.isnan().any()) else INFINITE


def make_dummy_inputs(graph: Graph, signature: Signature, device: torch.device) -> dict[str, Any]:
    """Return ones of the traced shapes on a device, and constants as traced, in the structure of a call."""
    sizes = {s.name: s.example for s in graph.symbols.values() if s.example is not None}
    types = {v.name: v.type for v in graph.inputs}
    leaves: list[Any] = []
    for leaf in signature.leaves:
        if isinstance(leaf, ConstantLeaf):
            leaves.append(leaf.value)
        elif isinstance(leaf, NumberLeaf):
            leaves.append(next(s.example for s in graph.symbols.values() if s.source.name == leaf.name))
        else:
            shape = resolve(types[leaf.name].shape, sizes)
            leaves.append(torch.ones(shape, dtype=types[leaf.name].dtype, device=device))
    return signature.to_arguments(leaves)
