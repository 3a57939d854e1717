"""Graphs for `PushTransposes` that random generation does not produce: regions with entries in several dim orders.

Each function takes a builder of an empty graph, as the conformance suite expects of ``motifs``. Dims have distinct
sizes where possible, and no order is its own inverse, so that a wrong order is detected.
"""

from __future__ import annotations

import torch

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Value
from clika_ref.core.types import TensorType

TURN_ORDER, BACK_ORDER, SWAP_ORDER = (1, 2, 0), (2, 0, 1), (0, 2, 1)


def _input(build: Builder, name: str, *shape: int) -> Value:
    return build.graph.add_input(TensorType(torch.float32, shape), name)


def entries_of_two_orders(build: Builder) -> Value:
    """``relu(x.permute(1, 2, 0) + y.permute(0, 2, 1)).permute(2, 0, 1)``: the second entry keeps one permute."""
    x, y = _input(build, "x", 4, 2, 3), _input(build, "y", 2, 4, 3)
    added = build("add", build("permute", x, dims=TURN_ORDER), build("permute", y, dims=SWAP_ORDER))
    return build("permute", build("relu", added), dims=BACK_ORDER)


def entry_from_within(build: Builder) -> tuple[Value, Value]:
    """``y = relu(x.permute(1, 2, 0)); y + y.permute(2, 0, 1)``: a permute leads out of the region and back into it."""
    y = build("relu", build("permute", _input(build, "x", 3, 3, 3), dims=TURN_ORDER))
    added = build("add", y, build("permute", y, dims=SWAP_ORDER))
    return build("permute", build("exp", added), dims=BACK_ORDER), build("permute", added, dims=SWAP_ORDER)


def overwritten_operand(build: Builder) -> Value:
    """``(x.permute(1, 2, 0) + total).permute(2, 0, 1)`` with ``total += 1``: state, although it looks constant."""
    x = _input(build, "x", 4, 2, 3)
    total = build.constant(torch.arange(24.0).reshape(2, 3, 4) / 8 - 1, "total")
    added = build("add", build("permute", x, dims=TURN_ORDER), total)
    build.graph.set_state(total.name, build("add", total, 1.0))
    return build("permute", added, dims=BACK_ORDER)
