"""One choice for layers whose channels go together: the most careful of theirs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Node
from clika_ref.pruning.groups import Group
from clika_ref.pruning.layers import ARGUMENT, Choice
from clika_ref.pruning_settings import STRUCTURED


def agreed(group: Group, chosen: Mapping[Node, Choice]) -> Choice:
    """Return what holds for a group; ``skipped`` says why nothing of it is to go.

    Of several thresholds and shares the least holds; what one layer keeps as it is, or wants masked, all keep.

    Raises:
        ModelError: the user asks by name for channels of a layer that go together with those of one that keeps its own.
    """
    theirs = [chosen[node] for node in group.producers]
    named = next((c.named for c in theirs if c.named and c.mask_type == STRUCTURED), "")
    for node, choice in zip(group.producers, theirs, strict=True):
        if choice.skipped or choice.mask_type != STRUCTURED:
            kept = choice.skipped or f"mask_type={choice.mask_type!r}"
            reason = f"goes together with {node.name!r} in {node.origin.scope or '<root>'}, which has {kept}"
            if named:
                msg = f"{ARGUMENT}: {named!r}: its output {reason}; choose the same for both"
                raise ModelError(msg)
            return replace(choice, skipped=choice.skipped or reason)
    return Choice(STRUCTURED, _least(c.threshold for c in theirs), _least(c.sparsity for c in theirs), named=named)


def _least(numbers: Iterable[float | None]) -> float | None:
    return min((n for n in numbers if n is not None), default=None)
