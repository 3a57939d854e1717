"""Remove dropout without effect."""

from __future__ import annotations

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Node
from clika_ref.core.rewriter import Skip, rule
from clika_ref_cleanup.cleanup_pass import RulePass


@rule("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
def remove_dropout(node: Node, build: Builder):
    """``dropout(x)`` is ``x`` outside training, or if its probability is 0."""
    x = node.inputs[0]
    if node.attrs["train"] and node.attrs["p"] != 0:
        return Skip("drops elements: traced in training mode")
    return x if x.type == node.output.type else Skip("changes the type", 1)


class RemoveDropout(RulePass):
    """Remove dropout layers that are traced in eval mode or have probability 0."""

    name = "remove-dropout"
    rules = (remove_dropout,)
    removes = "Dropout layer"
