"""Merge constants that hold the same elements."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from clika_ref.core.accuracy import EXACT, ErrorClass
from clika_ref.core.ir import Graph, Value
from clika_ref.core.operators import Operator
from clika_ref.core.passes import Phase
from clika_ref.core.rewriting import keeps_name, substitute


@dataclass(frozen=True)
class MergeEqualConstants:
    """Read one constant where several have the same dtype, shape, device and bits.

    On the lowered clone only: in the stored graph two parameters that start out equal are trained apart.
    """

    name: ClassVar[str] = "merge-equal-constants"
    phase: ClassVar[Phase] = Phase.FUSE
    after: ClassVar[tuple[str, ...]] = ("fold-batch-norm", "fold-constants")
    error: ClassVar[ErrorClass] = EXACT
    removes: ClassVar[str] = "repeated constants"

    def __call__(self, graph: Graph, _: Mapping[str, Operator], /) -> None:
        """Compare elements only within groups of one dtype and shape."""
        groups: dict[Hashable, list[Value]] = {}
        for name, value in graph.constants.items():
            data = value.data
            if data is not None and value.uses and name not in graph.state and data.device.type != "meta":
                groups.setdefault((data.dtype, tuple(data.shape), data.device), []).append(value)
        for group in groups.values():
            first: dict[bytes, Value] = {}
            for value in group if len(group) > 1 else ():
                kept = first.setdefault(_digest(value), value)
                if kept is not value and keeps_name(graph, value, kept):
                    substitute(graph, value, kept)


def _digest(value: Value) -> bytes:
    assert value.data is not None
    elements = value.data.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(elements.numpy().data).digest()
