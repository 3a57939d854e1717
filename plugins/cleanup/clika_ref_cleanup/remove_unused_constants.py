"""Remove constants that nobody reads, once others have taken their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from clika_ref.core.accuracy import EXACT, ErrorClass
from clika_ref.core.ir import Graph
from clika_ref.core.operators import Operator
from clika_ref.core.passes import Phase


@dataclass(frozen=True)
class RemoveUnusedConstants:
    """Forget parameters and buffers that the lowered clone no longer reads; the stored graph keeps all."""

    name: ClassVar[str] = "remove-unused-constants"
    phase: ClassVar[Phase] = Phase.FUSE
    after: ClassVar[tuple[str, ...]] = (
        "fold-batch-norm",
        "fold-constants",
        "merge-equal-constants",
        "remove-dead-nodes",
    )
    error: ClassVar[ErrorClass] = EXACT
    removes: ClassVar[str] = "unread constants"

    def __call__(self, graph: Graph, _: Mapping[str, Operator], /) -> None:
        """Drop them."""
        graph.drop_unused_constants()
