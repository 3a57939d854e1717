"""Where the results of a node come from along one side of an operand: found by running it on elements that are NaN."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from clika_ref.pruning.probing import Probe
from clika_ref.pruning.units import ABSENT


def sources(asked: Probe, position: int, axis: int) -> list[Tensor] | None:
    """Return for each element of each result the place along a side of one operand that it depends on.

    Numbers of places are told by their bits: for each bit, once all places that have it are NaN, and once all others.
    So ``2 * log2(n)`` runs tell all places, without a word about the operator. An element that no place reaches is
    `ABSENT`; where several places reach one element, they are mixed, and None is returned. Where all NaN is lost, as
    fused attention loses it, elements are changed instead, and what results then differ in is looked at; and where an
    operand counts for negative elements alone, as the slope of PReLU does, it is asked with these.

    Args:
        asked: the node, with elements.
        position: of the operand, a float tensor.
        axis: of its side.
    """
    found: list[Tensor] | None = []
    for tried in _tries(asked):
        operand = tried.operands[position]
        for others in (torch.full_like(operand, torch.nan), 2 - operand):  # elements lie around 1 or -1
            found = _sources(tried, position, axis, others)
            if found is None or not all(bool((f == ABSENT).all()) for f in found):
                return found
    return found


def _tries(asked: Probe) -> Iterator[Probe]:
    yield asked
    negated = asked.negated
    if negated is not None:
        yield negated


def _sources(asked: Probe, position: int, axis: int, others: Tensor) -> list[Tensor] | None:
    """Return the sources, which elements of another tensor show in the place of an operand's."""
    places = torch.arange(others.shape[axis]).reshape([-1 if i == axis else 1 for i in range(others.ndim)])
    found = [torch.zeros(r.shape, dtype=torch.int64) for r in asked.results]
    reached: list[Tensor] = []
    for bit in range(max(1, (places.numel() - 1).bit_length())):
        has_bit = (places >> bit & 1).bool()
        with_bit, without = (_shown(asked, position, mask, others) for mask in (has_bit, ~has_bit))
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
