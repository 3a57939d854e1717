"""Remove ``detach`` and ``overwritten`` where gradients are no longer needed."""

from __future__ import annotations

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Node, Value
from clika_ref.core.passes import Phase
from clika_ref.core.rewriter import Skip, rule
from clika_ref_cleanup.cleanup_pass import RulePass


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


class RemoveDetach(RulePass):
    """Remove both on the clone that is lowered. The stored graph keeps them, since they determine the gradients."""

    name = "remove-detach"
    rules = (remove_detach, remove_overwritten)
    phase = Phase.FUSE
    removes = "detach node"
