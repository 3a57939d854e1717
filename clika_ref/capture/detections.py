"""Compare results with a data-dependent number of rows, such as the boxes of a detector, in any order."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# sympy has no type annotations.

from __future__ import annotations

from typing import TYPE_CHECKING

import sympy
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clika_ref.core.ir import Graph

ROW_TOLERANCE = 1e-3
"""Allowed difference of a number from that of the matching row, relative to the largest number of the result.

For boxes it is an intersection over union of about 0.999.
"""

MAX_UNMATCHED_SHARE = 0.02
"""Maximum share of rows without a match: those whose score or overlap is within rounding of a threshold."""


def has_same_detections(graph: Graph, reference: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> bool:
    """Whether results agree up to the order of rows, in each group of outputs with a data-dependent number of rows.

    Rounding changes the order of almost equal scores, and which of two boxes with almost equal scores is kept.

    Args:
        graph: the graph; its types state which outputs have equal numbers of rows.
        reference: its results, one tensor ``[n, ...]`` for each output.
        found: the results ``[m, ...]`` to compare.

    Returns:
        False also if the graph has outputs of another kind.
    """
    groups: dict[sympy.Basic, list[int]] = {}
    for position, output in enumerate(graph.outputs):
        count = output.type.shape[0] if output.type.shape else None
        if not isinstance(count, sympy.Basic) or not _is_data_dependent(graph, count):
            return False
        groups.setdefault(count, []).append(position)
    return all(_has_same_rows([reference[i] for i in group], [found[i] for i in group]) for group in groups.values())


def _is_data_dependent(graph: Graph, size: sympy.Basic) -> bool:
    """Whether a size depends on the elements of tensors."""
    inputs = {value.name for value in graph.inputs}
    return any(graph.symbols[str(symbol)].source.name not in inputs for symbol in size.free_symbols)


def _has_same_rows(reference: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> bool:
    """Whether rows of several results match one to one, but for a few."""
    if any(r.dtype != f.dtype or r.shape[1:] != f.shape[1:] for r, f in zip(reference, found, strict=True)):
        return False
    close = torch.ones(len(reference[0]), len(found[0]), dtype=torch.bool)
    for r, f in zip(reference, found, strict=True):
        rows, own = (t.reshape(len(t), -1 if t.numel() else 0).double() for t in (r, f))
        tolerance = ROW_TOLERANCE * float(rows.abs().max()) if r.is_floating_point() and r.numel() else 0.0
        if rows.shape[1]:
            close &= torch.cdist(rows, own, p=torch.inf) <= tolerance
    matched = _count_matches(close)
    return matched >= (1 - MAX_UNMATCHED_SHARE) * max(close.shape)


def _count_matches(close: torch.Tensor) -> int:
    """Return the number of rows that have a match of their own; the first free one of each row is taken."""
    free = torch.ones(close.shape[1], dtype=torch.bool)
    count = 0
    for row in close:
        candidates = (row & free).nonzero()
        if len(candidates):
            free[candidates[0]] = False
            count += 1
    return count
