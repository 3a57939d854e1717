"""Sizes of a graph's constants, in the file and in float."""

from __future__ import annotations

from clika_ref.core.ir import Graph, Node, Use, Value
from clika_ref.export.explanation import QDQ_OPERATORS

BITS_PER_BYTE = 8
"""Bits per byte."""


def bits_per_element(constant: Value, reader: Node | None) -> int:
    """Return the bits per element of a constant, as stored for its reader."""
    bits = reader.attrs.get("bits") if reader is not None and reader.op_type in QDQ_OPERATORS else None
    return bits or constant.type.dtype.itemsize * BITS_PER_BYTE


def count_constant_bytes(graph: Graph) -> tuple[int, int]:
    """Return the size in bytes of all used constants: in float without scales, and as stored.

    Args:
        graph: the lowered graph.
    """
    before = after = 0
    for value in graph.constants.values():
        uses = [use for use in value.uses if isinstance(use.user, Node)]
        if not uses:
            continue
        reader = uses[0].user
        assert isinstance(reader, Node)
        count = value.type.element_count
        after += count * bits_per_element(value, reader) // BITS_PER_BYTE
        if not all(map(_is_scale, uses)):
            before += count * (reader.output if reader.op_type in QDQ_OPERATORS else value).type.dtype.itemsize
    return before, after


def _is_scale(use: Use) -> bool:
    """Whether a constant is used as a scale or zero point."""
    return isinstance(use.user, Node) and use.user.op_type in QDQ_OPERATORS and use.position != 0
