"""Calls that relate to earlier ones: equal or inverse attributes, casts back, and special numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import torch

from clika_ref.core.ir import Graph, Node

SPECIAL_NUMBERS = (0, 1, -1, 2, 0.0, -0.0, 1.0)
"""Numbers that passes look for."""

ECHO_SHARE = 1 / 2
"""Share of calls that reuse attributes of an earlier one, if there is any."""

ZERO_TUPLE_SHARE = 1 / 6
"""Share of integer tuples that become zeros."""

SPECIAL_NUMBER_SHARE = 1 / 2
"""Share of numbers that are replaced by `SPECIAL_NUMBERS` ones."""


def insert_special_numbers(random: Random, operands: Sequence[Any]) -> list[Any]:
    """Replace some drawn numbers by those that passes look for."""
    return [
        random.choice([n for n in SPECIAL_NUMBERS if isinstance(n, int) or isinstance(item, float)])
        if isinstance(item, int | float) and not isinstance(item, bool) and random.random() < SPECIAL_NUMBER_SHARE
        else item
        for item in operands
    ]


def reuse_attributes(random: Random, graph: Graph, kind: str, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes with some values taken from the graph: from calls of this op type, or dtypes of values.

    A permutation may become its inverse, and integers may become zeros, often a no-op.
    """
    if random.random() > ECHO_SHARE:
        return dict(attrs)
    earlier = [node for node in graph.nodes if node.op_type == kind]
    found = dict(attrs)
    for name, value in attrs.items():
        if isinstance(value, torch.dtype):
            seen = [v.type.dtype for v in (*graph.inputs, *(o for node in graph.nodes for o in node.outputs))]
            found[name] = random.choice(seen) if seen else value
        elif (
            isinstance(value, tuple) and value and set(map(type, value)) == {int} and random.random() < ZERO_TUPLE_SHARE
        ):
            found[name] = (0,) * len(value)
        elif earlier:
            found[name] = _reuse_attribute(random, random.choice(earlier), name)
    return found


def _reuse_attribute(random: Random, node: Node, name: str) -> Any:
    value = node.attrs[name]
    if isinstance(value, tuple) and len(value) > 1 and random.random() < 1 / 2:
        order = [d % len(value) for d in value if isinstance(d, int)]
        if sorted(order) == list(range(len(value))):
            return tuple(sorted(order, key=order.__getitem__))
    return value
