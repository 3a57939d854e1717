"""Loops for `DistributeLoops`, as random drawing produces no bodies.

Each function takes a builder of an empty graph, as the conformance suite expects of ``motifs``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Node, Value
from clika_ref.core.types import TensorType

ROWS, BATCH, CHANNELS = 5, 2, 4


def _loop(build: Builder, step: Callable[[Builder, Value, Value], tuple[Value, Value]]) -> tuple[Value, Value]:
    """Add a loop over the rows of an input; ``step`` returns the state, and the result of a row."""
    state = TensorType(torch.float32, (BATCH, CHANNELS))
    rows = TensorType(torch.float32, (ROWS, BATCH, CHANNELS))
    initial, x = build.graph.add_input(state, "initial"), build.graph.add_input(rows, "x")
    body = build.graph.new_body("loop")
    results = step(Builder(body, build.operators), body.add_input(state, "h"), body.add_input(state, "row"))
    for value in results:
        body.add_output(value)
    node = Node(build.operators["scan"], [initial, x], {"carried": 1, "scanned": 1}, bodies=[body])
    build.graph.insert(node, [state, rows])
    final, collected = node.outputs
    return final, collected


def linear_recurrence(build: Builder) -> tuple[Value, Value]:
    """A moving average, with a softmax of each state."""

    def step(inside: Builder, h: Value, row: Value) -> tuple[Value, Value]:
        average = inside("add", inside("mul", h, 0.75), inside("sin", row))
        return average, inside("softmax", average, dim=-1)

    return _loop(build, step)


def nonlinear_recurrence(build: Builder) -> tuple[Value, Value]:
    """A state that no layer computes, between calls that need no state."""

    def step(inside: Builder, h: Value, row: Value) -> tuple[Value, Value]:
        largest = inside("maximum", inside("mul", h, 0.5), inside("sin", row))
        return largest, inside("exp", largest)

    return _loop(build, step)
