"""What is asked of calls by how they are written as ONNX: of such as are alike, once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from clika_ref.core.ir import Node, Value

REMEMBERED = 256
"""Calls whose answer is kept: who draws graphs asks of each call before it is taken, and of the graph again."""


def once_per_call(ask: Callable[[Node], str | None]) -> Callable[[Node], str | None]:
    """Ask a function once of all nodes that are lowered alike, from operands of the same types and attributes."""
    found: dict[Any, str | None] = {}

    @functools.wraps(ask)
    def asked(node: Node) -> str | None:
        operands = tuple(v.type if isinstance(v, Value) else repr(v) for v in node.inputs)
        call = (node.op.lowering, operands, repr(node.attrs), tuple(v.type for v in node.outputs))
        if call not in found:
            if len(found) == REMEMBERED:
                found.clear()
            found[call] = ask(node)
        return found[call]

    return asked
