"""Remove dropout without effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from clika_ref.core.accuracy import EXACT, ErrorClass
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph, Node
from clika_ref.core.operators import Operator
from clika_ref.core.passes import Phase
from clika_ref.core.rewriter import Skip, apply_rules, rule


@rule("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
def remove_dropout(node: Node, build: Builder):
    """``dropout(x)`` is ``x`` outside training, or if its probability is 0."""
    x = node.inputs[0]
    if node.attrs["train"] and node.attrs["p"] != 0:
        return Skip("drops elements: traced in training mode")
    return x if x.type == node.output.type else Skip("changes the type", 1)


@dataclass(frozen=True)
class RemoveDropout:
    """Remove dropout layers that are traced in eval mode or have probability 0."""

    name: ClassVar[str] = "remove-dropout"
    phase: ClassVar[Phase] = Phase.CLEAN
    after: ClassVar[tuple[str, ...]] = ()
    error: ClassVar[ErrorClass] = EXACT
    removes: ClassVar[str] = "Dropout layers"

    def __call__(self, graph: Graph, operators: Mapping[str, Operator], /) -> None:
        """Apply the rule to all matching nodes."""
        apply_rules(graph, [remove_dropout], operators)
