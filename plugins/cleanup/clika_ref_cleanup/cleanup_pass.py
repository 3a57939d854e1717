"""The bases of the passes of this package: usual facts about a pass, and a pass that consists of rewrite rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from clika_ref.core.accuracy import EXACT
from clika_ref.core.ir import Graph, Value
from clika_ref.core.operators import Operator
from clika_ref.core.passes import Pass, Phase
from clika_ref.core.rewriter import Rule, apply_rules


@dataclass(frozen=True)
class CleanupPass(Pass):
    """A pass on the stored graph that changes no number. Subclasses declare a ``name``, and facts that differ."""

    phase = Phase.CLEAN
    after = ()
    error = EXACT
    removes = "unnecessary node"


def keep_name(graph: Graph, old: Value, new: Value) -> Value:
    """Return a replacement of a value, with its name; outputs of the graph keep theirs anyway."""
    if not any(use.user is graph for use in old.uses):
        new.name, old.name = old.name, new.name
    return new


class RulePass(CleanupPass):
    """A pass that applies ``rules`` until none applies."""

    rules: ClassVar[Sequence[Rule]]

    def __call__(self, graph: Graph, operators: Mapping[str, Operator], /) -> None:
        """Apply the rules to all matching nodes."""
        apply_rules(graph, self.rules, operators)
