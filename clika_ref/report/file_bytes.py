"""What the constants of a graph take in a file, and what they would take in float."""

from __future__ import annotations

import math

from clika_ref.core.ir import Graph, Node, Use, Value
from clika_ref.explanation import PAIR

EIGHT = 8
"""Bits of a byte."""


def elements_of(value: Value) -> int:
    """Return how many elements a constant has."""
    return math.prod(map(int, value.type.shape))


def bits_of(held: Value, reader: Node | None) -> int:
    """Return how many bits an element of a constant takes, which a node makes floats of, or reads."""
    told = reader.attrs.get("bits") if reader is not None and reader.kind in PAIR else None
    return told or held.type.dtype.itemsize * EIGHT


def constant_bytes(graph: Graph) -> tuple[int, int]:
    """Return what all constants that anything reads would take in float, without scales, and what they do take.

    Args:
        graph: as it is written.
    """
    before = after = 0
    for value in graph.constants.values():
        uses = [use for use in value.uses if isinstance(use.user, Node)]
        if not uses:
            continue
        reader = uses[0].user
        assert isinstance(reader, Node)
        count = elements_of(value)
        after += count * bits_of(value, reader) // EIGHT
        if not all(map(_is_scale, uses)):
            before += count * (reader.output if reader.kind in PAIR else value).type.dtype.itemsize
    return before, after


def _is_scale(use: Use) -> bool:
    """Whether a constant is read as the scale or the zero point of integers."""
    return isinstance(use.user, Node) and use.user.kind in PAIR and use.position != 0
