"""Trace the results of a node to indices along one dim of an operand, by running it on NaN elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clika_ref.pruning.node_probes import NodeProbe
from clika_ref.pruning.units import ABSENT_UNIT
from clika_ref.quantization.qdq.layer_weights import reshape_along_dim


@dataclass(frozen=True)
class IndexSources:
    """The indices along one dim of an operand that the results of a node depend on."""

    indices: Sequence[Tensor]
    """For each element of each result, its index along that dim; `ABSENT_UNIT` if it depends on none."""
    tied: Tensor
    """``int64[n, 2]``: indices that affect the same elements; the first represents both in `places`."""

    def is_same(self, others: IndexSources | None) -> bool:
        """Whether another one is equal."""
        if others is None:
            return False
        pairs = zip((*self.indices, self.tied), (*others.indices, others.tied), strict=True)
        return all(torch.equal(own, other) for own, other in pairs)

    @property
    def has_no_source(self) -> bool:
        """Whether no element depends on that dim."""
        return all(bool((p == ABSENT_UNIT).all()) for p in self.indices)


def trace_sources(asked: NodeProbe, position: int, axis: int) -> IndexSources | None:
    """Return for each element of each result the index along a dim of one operand that it depends on.

    Indices are decoded bit by bit: for each bit, the node runs once with NaN at all indices that have it, and once at
    all others. ``2 * log2(n)`` runs thus determine all indices, without any declaration by the operator. An element
    that depends on no index is `ABSENT_UNIT`. If it depends on one index of each half, as in GLU, these are tied; for
    any other mixture, None is returned.

    Some operators hide NaN, such as fused attention: then elements are changed instead, and the differing results are
    used. Some operands only matter for negative elements, such as the slope of PReLU: then these are tried as well.

    Args:
        asked: the node, with elements.
        position: the position of the operand, a float tensor.
        axis: its dim.
    """
    found: IndexSources | None = None
    length = asked.operands[position].shape[axis]
    every = torch.ones(length, dtype=torch.bool)
    for probe in _probe_variants(asked):
        operand = probe.operands[position]
        for others in (torch.full_like(operand, torch.nan), 2 - operand):  # elements are around 1 or -1
            positions = _trace_indices(probe, position, axis, others, every)
            if positions is None:
                return _trace_halves(probe, position, axis, others) if length > 2 else None
            found = IndexSources(positions, torch.empty(0, 2, dtype=torch.int64))
            if not found.has_no_source:
                return found
    return found


def _trace_halves(asked: NodeProbe, position: int, axis: int, others: Tensor) -> IndexSources | None:
    """Return the sources of elements that depend on one index of each half of a dim."""
    length = others.shape[axis]
    is_first = torch.arange(length) < length // 2
    of_first, of_second = (_trace_indices(asked, position, axis, others, half) for half in (is_first, ~is_first))
    if of_first is None or of_second is None:
        return None
    halves = [*zip(of_first, of_second, strict=True)]
    numbers = torch.cat([(a * length + b)[(a != ABSENT_UNIT) & (b != ABSENT_UNIT)] for a, b in halves]).unique()
    tied = torch.stack([numbers // length, numbers % length], 1)
    return IndexSources([torch.where(a == ABSENT_UNIT, b, a) for a, b in halves], tied)


def _probe_variants(asked: NodeProbe) -> Iterator[NodeProbe]:
    yield asked
    negated = asked.negated
    if negated is not None:
        yield negated


def _trace_indices(asked: NodeProbe, position: int, axis: int, others: Tensor, among: Tensor) -> list[Tensor] | None:
    """Return the index that each element depends on, found by replacing elements of an operand by ``others``."""
    positions = reshape_along_dim(torch.arange(others.shape[axis]), axis, others.ndim)
    is_asked = reshape_along_dim(among, axis, others.ndim)
    found = [torch.zeros(r.shape, dtype=torch.int64) for r in asked.results]
    reached: list[Tensor] = []
    for bit in range(max(1, (positions.numel() - 1).bit_length())):
        has_bit = (positions >> bit & 1).bool()
        with_bit, without = (
            _find_changes(asked, position, mask, others) for mask in (has_bit & is_asked, ~has_bit & is_asked)
        )
        if any(bool((yes & no).any()) for yes, no in zip(with_bit, without, strict=True)):
            return None
        now = [yes | no for yes, no in zip(with_bit, without, strict=True)]
        if reached and not all(map(torch.equal, reached, now)):  # a dependence that only some bits show was hidden
            return None
        reached = now
        for indices, yes in zip(found, with_bit, strict=True):
            indices[yes] += 1 << bit
    return [f.masked_fill_(~r, ABSENT_UNIT) for f, r in zip(found, reached, strict=True)]


def _find_changes(asked: NodeProbe, position: int, mask: Tensor, others: Tensor) -> list[Tensor]:
    """Return the changed elements of the results after replacing elements of an operand."""
    marked = torch.where(mask, others, asked.operands[position])
    changed = asked.run([*asked.operands[:position], marked, *asked.operands[position + 1 :]])
    return [c != r for c, r in zip(changed, asked.results, strict=True)]
