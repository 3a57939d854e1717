"""A wrapper of ``op`` that changes some ONNX nodes: most faults of lowerings concern one attribute or operand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class PatchedOp:
    """A replacement for the ``op`` of a lowering, with other functions for some operator types.

    Each function is called as ``(op, *operands, **attributes)`` with the original ``op``. It applies to all nodes of
    its operator type, however a lowering creates them.
    """

    def __init__(self, op: Any, **instead: Callable[..., Any]) -> None:
        self._op = op
        self._instead = instead

    def __getattr__(self, name: str) -> Any:
        if name not in self._instead:
            return getattr(self._op, name)

        def write(*operands: Any, **attributes: Any) -> Any:
            return self._instead[name](self._op, *operands, **attributes)

        return write

    def node(self, op_type: str, *operands: Any, **attributes: Any) -> Any:
        """Add a node of any operator type, altered or not."""
        if op_type in self._instead:
            return self._instead[op_type](self._op, *operands, **attributes)
        return self._op.node(op_type, *operands, **attributes)


def override_attributes(op: Any, op_type: str, **attributes: Any) -> PatchedOp:
    """Return an ``op`` that overrides some attributes of one operator type; None omits an attribute."""

    def write(op: Any, *operands: Any, **given: Any) -> Any:
        return op.node(op_type, *operands, **{**given, **attributes})

    return PatchedOp(op, **{op_type: write})
