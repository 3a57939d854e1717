"""Compare results with a data-dependent number of rows, such as the boxes of a detector, in any order."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# sympy has no type annotations.

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import sympy
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clika_ref.core.ir import Graph
    from clika_ref.core.types import Dim

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
    groups = list_row_groups(graph)
    if sum(map(len, groups)) < len(graph.outputs):
        return False
    return all(_has_same_rows([reference[i] for i in group], [found[i] for i in group]) for group in groups)


def list_row_groups(graph: Graph) -> list[list[int]]:
    """Return the indices of outputs with a data-dependent number of rows, grouped by that number."""
    groups: dict[sympy.Basic, list[int]] = {}
    for position, output in enumerate(graph.outputs):
        count = output.type.shape[0] if output.type.shape else None
        if isinstance(count, sympy.Basic) and is_data_dependent(graph, count):
            groups.setdefault(count, []).append(position)
    return [*groups.values()]


def is_data_dependent(graph: Graph, size: Dim) -> bool:
    """Whether a ``size`` of a graph depends on the elements of tensors."""
    if not isinstance(size, sympy.Basic):
        return False
    inputs = {value.name for value in graph.inputs}
    return any(graph.symbols[str(symbol)].source.name not in inputs for symbol in size.free_symbols)


def pair_rows(
    found: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return two results with their rows in a common order; a row without a match is paired with zeros.

    A match has the same integers, and floats that are closer than zeros are: the sum of ``||f - r||^2 / ||r||^2`` is
    below the number of float results. Rows are matched in order, each with the closest free one.

    Args:
        found: tensors ``[m, ...]`` with a common number of rows.
        reference: the tensors ``[n, ...]`` to compare with.

    Returns:
        For each result two tensors ``[n + m - matches, ...]``.
    """
    costs = _compute_row_costs(found, reference)
    partners = torch.full((len(costs),), -1)
    for row, cost in enumerate(costs):
        if len(cost) and cost.min() < torch.inf:
            partners[row] = cost.argmin()
            costs[:, partners[row]] = torch.inf
    matched = partners >= 0
    is_extra = torch.ones(costs.shape[1], dtype=torch.bool)
    is_extra[partners[matched]] = False
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for f, r in zip(found, reference, strict=True):
        own, extra = torch.zeros_like(r), f[is_extra]
        own[matched] = f[partners[matched]]
        pairs.append((torch.cat([own, extra]), torch.cat([r, torch.zeros_like(extra)])))
    return pairs


def _compute_row_costs(found: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the distance of each pair of rows ``float64[n, m]``, infinite if they do not match."""
    costs = torch.zeros(len(reference[0]), len(found[0]), dtype=torch.float64)
    float_count = 0
    for f, r in zip(found, reference, strict=True):
        own, rows = (_flatten_rows(t) for t in (f, r))
        if r.is_floating_point():
            float_count += 1
            norms = rows.square().sum(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
            costs += torch.cdist(rows, own).square() / norms
        else:
            costs[torch.cdist(rows, own, p=torch.inf) > 0] = torch.inf
    return costs.masked_fill(costs >= max(float_count, 1), torch.inf)


def _has_same_rows(reference: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> bool:
    """Whether rows of several results match one to one, but for a few."""
    if any(r.dtype != f.dtype or r.shape[1:] != f.shape[1:] for r, f in zip(reference, found, strict=True)):
        return False
    close = torch.ones(len(reference[0]), len(found[0]), dtype=torch.bool)
    for r, f in zip(reference, found, strict=True):
        rows, own = (_flatten_rows(t) for t in (r, f))
        tolerance = ROW_TOLERANCE * float(rows.abs().max()) if r.is_floating_point() and r.numel() else 0.0
        if rows.shape[1]:
            close &= torch.cdist(rows, own, p=torch.inf) <= tolerance
    matched = _count_matches(close)
    return matched >= (1 - MAX_UNMATCHED_SHARE) * max(close.shape)


def _flatten_rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``float64[n, elements]`` of ``x[n, ...]``, which may have no rows."""
    return x.reshape(len(x), math.prod(x.shape[1:])).double()


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
