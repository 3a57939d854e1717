"""Units: indices along dims of tensors that can only be removed together, as a union-find."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

ABSENT_UNIT = -1
"""Used in place of a unit if there is none."""


class Units:
    """A union-find of coupled indices. Each index has a number; indices of one unit have the same `root`.

    A unit may be a *crossing* of others. If a dim of ``h * d`` elements is split into ``h`` heads of ``d``, index ``(i,
    j)`` is removed with head ``i``, or with element ``j`` of all heads. A *fixed* unit is kept, for a reason.
    """

    def __init__(self) -> None:
        self._parents: list[int] = []
        self._families: dict[int, frozenset[int]] = {}
        self._crossings: dict[int, tuple[int, ...]] = {}
        self._known: dict[tuple[int, ...], int] = {}
        self._reasons: dict[int, str] = {}
        self._count = 0

    def fresh(self, count: int) -> Tensor:
        """Return ``count`` new units of one family: the indices along one dim.

        >>> Units().fresh(3)
        tensor([0, 1, 2])
        """
        first = len(self._parents)
        self._parents.extend(range(first, first + count))
        family = frozenset({self._count})
        self._count += 1
        self._families.update(dict.fromkeys(range(first, first + count), family))
        return torch.arange(first, first + count)

    def root(self, unit: int) -> int:
        """Return the representative of the unit that an index belongs to."""
        parents = self._parents
        while parents[unit] != unit:
            parents[unit] = parents[parents[unit]]
            unit = parents[unit]
        return unit

    def roots(self, units: Tensor) -> Tensor:
        """Return the roots of units, elementwise; `ABSENT_UNIT` stays `ABSENT_UNIT`."""
        found = [ABSENT_UNIT if u == ABSENT_UNIT else self.root(u) for u in units.flatten().tolist()]
        return torch.tensor(found, dtype=torch.int64).reshape(units.shape)

    def crossing(self, unit: int) -> tuple[int, ...]:
        """Return the roots of the units that a unit is a crossing of; empty if it is none."""
        return tuple(map(self.root, self._crossings.get(self.root(unit), ())))

    def plain(self, unit: int) -> tuple[int, ...]:
        """Return the roots of the plain units that an index is removed with."""
        crossed = self.crossing(unit)
        return tuple(dict.fromkeys(p for c in crossed for p in self.plain(c))) if crossed else (self.root(unit),)

    def families(self, unit: int) -> frozenset[int]:
        """Return the families of all indices merged into a unit; units of different dims differ in them."""
        return self._families[self.root(unit)]

    def cross(self, units: Sequence[int]) -> int:
        """Return the unit that is removed with any of these units."""
        roots = tuple(dict.fromkeys(map(self.root, units)))
        if len(roots) == 1:
            return roots[0]
        known = self._known.get(roots)
        if known is None:
            known = int(self.fresh(1))
            self._known[roots], self._crossings[known] = known, roots
        return known

    def merge(self, one: int, other: int) -> None:
        """Merge two units; crossings of different units cannot be merged, so their units are fixed."""
        a, b = self.root(one), self.root(other)
        if a == b:
            return
        if a not in self._crossings:
            a, b = b, a
        of_a, of_b = self.plain(a), self.plain(b)
        if a in self._crossings and (b in self._crossings or b in of_a):  # merging could make it a part of itself
            for unit in (*of_a, *of_b) if set(of_a) != set(of_b) else ():
                self.fix(unit, "it is tied to another dim that is divided differently")
            return
        self._parents[b] = a
        self._families[a] |= self._families.pop(b)
        self._crossings.pop(b, None)
        reason = self._reasons.pop(b, "")
        if reason:
            self.fix(a, reason)

    def merge_all(self, units: Tensor, others: Tensor) -> None:
        """Merge elementwise, if both are present."""
        for a, b in zip(units.tolist(), others.tolist(), strict=True):
            if min(a, b) > ABSENT_UNIT:
                self.merge(a, b)

    def fix(self, unit: int, reason: str) -> None:
        """Keep a unit; for a crossing, all units that it crosses."""
        for plain in self.plain(unit):
            self._reasons.setdefault(plain, reason)

    def fix_all(self, units: Tensor, reason: str) -> None:
        """Keep several units."""
        for unit in set(units.flatten().tolist()) - {ABSENT_UNIT}:
            self.fix(unit, reason)

    def add_fixed(self, count: int, reason: str) -> Tensor:
        """Return new fixed units."""
        units = self.fresh(count)
        self.fix_all(units, reason)
        return units

    def reason(self, unit: int) -> str:
        """Return why a plain unit is kept; empty if it may be removed."""
        return self._reasons.get(self.root(unit), "")

    def free(self, units: Iterable[int]) -> list[int]:
        """Return the removable plain units among those that the given units consist of, in order."""
        plain = dict.fromkeys(p for unit in units if unit != ABSENT_UNIT for p in self.plain(unit))
        return [unit for unit in plain if not self.reason(unit)]

    def remaining_indices(self, units: Tensor, gone: frozenset[int]) -> Tensor:
        """Return the indices along a dim that remain after removing plain units, given the units of the dim."""
        stays = [i for i, unit in enumerate(units.tolist()) if gone.isdisjoint(self.plain(unit))]
        return torch.tensor(stays, dtype=torch.int64)
