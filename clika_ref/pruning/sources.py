"""Where the results of a node come from along one side of an operand: found by running it on elements that are NaN."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clika_ref.pruning.probing import Probe
from clika_ref.pruning.units import ABSENT


@dataclass(frozen=True)
class Sources:
    """Where the results of a node come from along one side of an operand."""

    places: Sequence[Tensor]
    """For each element of each result its place along that side; `ABSENT` where none reaches it."""
    tied: Tensor
    """``int64[n, 2]``: places which reach one element together, the first of which stands for both in `places`."""

    def are(self, others: Sources | None) -> bool:
        """Whether others are the same."""
        if others is None:
            return False
        pairs = zip((*self.places, self.tied), (*others.places, others.tied), strict=True)
        return all(torch.equal(own, other) for own, other in pairs)

    @property
    def reach_nothing(self) -> bool:
        """Whether no element comes from that side."""
        return all(bool((p == ABSENT).all()) for p in self.places)


def sources(asked: Probe, position: int, axis: int) -> Sources | None:
    """Return for each element of each result the place along a side of one operand that it depends on.

    Numbers of places are told by their bits: for each bit, once all places that have it are NaN, and once all others.
    So ``2 * log2(n)`` runs tell all places, without a word about the operator. An element that no place reaches is
    `ABSENT`. Where one place of each half reaches an element, as in GLU, these are tied; where others do, they are
    mixed, and None is returned. Where all NaN is lost, as fused attention loses it, elements are changed instead, and
    what results then differ in is looked at; and where an operand counts for negative elements alone, as the slope of
    PReLU does, it is asked with these.

    Args:
        asked: the node, with elements.
        position: of the operand, a float tensor.
        axis: of its side.
    """
    found: Sources | None = None
    length = asked.operands[position].shape[axis]
    every = torch.ones(length, dtype=torch.bool)
    for tried in _tries(asked):
        operand = tried.operands[position]
        for others in (torch.full_like(operand, torch.nan), 2 - operand):  # elements lie around 1 or -1
            places = _sources(tried, position, axis, others, every)
            if places is None:
                return _of_halves(tried, position, axis, others) if length > 2 else None
            found = Sources(places, torch.empty(0, 2, dtype=torch.int64))
            if not found.reach_nothing:
                return found
    return found


def _of_halves(asked: Probe, position: int, axis: int, others: Tensor) -> Sources | None:
    """Return the sources of elements that come from one place of each half of a side."""
    length = others.shape[axis]
    is_first = torch.arange(length) < length // 2
    of_first, of_second = (_sources(asked, position, axis, others, half) for half in (is_first, ~is_first))
    if of_first is None or of_second is None:
        return None
    halves = [*zip(of_first, of_second, strict=True)]
    numbers = torch.cat([(a * length + b)[(a != ABSENT) & (b != ABSENT)] for a, b in halves]).unique()
    tied = torch.stack([numbers // length, numbers % length], 1)
    return Sources([torch.where(a == ABSENT, b, a) for a, b in halves], tied)


def _tries(asked: Probe) -> Iterator[Probe]:
    yield asked
    negated = asked.negated
    if negated is not None:
        yield negated


def _sources(asked: Probe, position: int, axis: int, others: Tensor, among: Tensor) -> list[Tensor] | None:
    """Return which of some places reach each element, as elements of another tensor show in place of an operand's."""
    shape = [-1 if i == axis else 1 for i in range(others.ndim)]
    places, is_asked = torch.arange(others.shape[axis]).reshape(shape), among.reshape(shape)
    found = [torch.zeros(r.shape, dtype=torch.int64) for r in asked.results]
    reached: list[Tensor] = []
    for bit in range(max(1, (places.numel() - 1).bit_length())):
        has_bit = (places >> bit & 1).bool()
        with_bit, without = (
            _shown(asked, position, mask, others) for mask in (has_bit & is_asked, ~has_bit & is_asked)
        )
        if any(bool((yes & no).any()) for yes, no in zip(with_bit, without, strict=True)):
            return None
        now = [yes | no for yes, no in zip(with_bit, without, strict=True)]
        if reached and not all(map(torch.equal, reached, now)):  # what only some bits tell has been lost on the way
            return None
        reached = now
        for told, yes in zip(found, with_bit, strict=True):
            told[yes] += 1 << bit
    return [f.masked_fill_(~r, ABSENT) for f, r in zip(found, reached, strict=True)]


def _shown(asked: Probe, position: int, mask: Tensor, others: Tensor) -> list[Tensor]:
    """Return which elements of results are other ones where elements of an operand are."""
    marked = torch.where(mask, others, asked.operands[position])
    changed = asked.run([*asked.operands[:position], marked, *asked.operands[position + 1 :]])
    return [c != r for c, r in zip(changed, asked.results, strict=True)]
