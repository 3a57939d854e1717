"""A cache for questions about nodes: nodes with equal ONNX lowerings are asked about only once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from clika_ref.core.ir import Node, Value

MAX_CACHED_CALLS = 256
"""Maximum number of cached calls. Drawing graphs asks about each candidate call, and about the whole graph again."""


def cache_per_call(ask: Callable[[Node], str | None]) -> Callable[[Node], str | None]:
    """Cache the result of ``ask`` for nodes with the same lowering, attributes, and types of operands and outputs."""
    found: dict[Any, str | None] = {}

    @functools.wraps(ask)
    def ask_cached(node: Node) -> str | None:
        operands = tuple(v.type if isinstance(v, Value) else repr(v) for v in node.inputs)
        call = (node.op.lowering, operands, repr(node.attrs), tuple(v.type for v in node.outputs))
        if call not in found:
            if len(found) == MAX_CACHED_CALLS:
                found.clear()
            found[call] = ask(node)
        return found[call]

    return ask_cached
