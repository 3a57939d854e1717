"""Remove ``detach`` and ``overwritten`` where gradients are no longer needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from clika_ref.core.accuracy import EXACT, ErrorClass
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.passes import Phase
from clika_ref.core.rewriter import Skip, apply_rules, rule


@rule("detach")
def remove_detach(node: Node, build: Builder):
    """``detach(x)`` has the elements of ``x``."""
    return node.inputs[0]


@rule("overwritten")
def remove_overwritten(node: Node, build: Builder):
    """``overwritten(new, x)`` has the elements of ``new``, with the type of ``x``."""
    new = node.inputs[0]
    if not isinstance(new, Value) or new.type != node.output.type:
        return Skip("converts or expands too")
    return new


@dataclass(frozen=True)
class RemoveDetach:
    """Remove both on the clone that is lowered. The stored graph keeps them, since they determine the gradients."""

    name: ClassVar[str] = "remove-detach"
    phase: ClassVar[Phase] = Phase.FUSE
    after: ClassVar[tuple[str, ...]] = ()
    error: ClassVar[ErrorClass] = EXACT
    removes: ClassVar[str] = "detach nodes"

    def __call__(self, graph: Graph, operators: Mapping[str, Operator], /) -> None:
        """Apply the rules to all matching nodes."""
        apply_rules(graph, [remove_detach, remove_overwritten], operators)
