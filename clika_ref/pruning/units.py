"""Units: places along sides of values that can only be removed together, as a union-find."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

ABSENT = -1
"""In place of a unit where there is none."""


class Units:
    """Which places go together. A place is held by a number; places of one unit have the same `root`.

    A unit may be a *crossing* of others: where a side of ``h * d`` elements is split into ``h`` heads of ``d``, the
    place ``(i, j)`` goes where head ``i`` goes or element ``j`` of all heads. A *fixed* unit stays, for a reason.
    """

    def __init__(self) -> None:
        self._parents: list[int] = []
        self._families: dict[int, frozenset[int]] = {}
        self._crossings: dict[int, tuple[int, ...]] = {}
        self._known: dict[tuple[int, ...], int] = {}
        self._reasons: dict[int, str] = {}
        self._count = 0

    def fresh(self, count: int) -> Tensor:
        """Return that many new units, which are of one family: places along one side.

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
        """Return the number that stands for all places which go together with one."""
        parents = self._parents
        while parents[unit] != unit:
            parents[unit] = parents[parents[unit]]
            unit = parents[unit]
        return unit

    def roots(self, units: Tensor) -> Tensor:
        """Return the roots of units, elementwise; what is `ABSENT` stays so."""
        found = [ABSENT if u == ABSENT else self.root(u) for u in units.flatten().tolist()]
        return torch.tensor(found, dtype=torch.int64).reshape(units.shape)

    def crossing(self, unit: int) -> tuple[int, ...]:
        """Return the roots of the units that a unit is a crossing of; nothing where it is none."""
        return tuple(map(self.root, self._crossings.get(self.root(unit), ())))

    def plain(self, unit: int) -> tuple[int, ...]:
        """Return the roots of the units of which one must go so that a place goes."""
        crossed = self.crossing(unit)
        return tuple(dict.fromkeys(p for c in crossed for p in self.plain(c))) if crossed else (self.root(unit),)

    def families(self, unit: int) -> frozenset[int]:
        """Return the families of what was merged into a unit: it tells units apart that other sides hold."""
        return self._families[self.root(unit)]

    def cross(self, units: Sequence[int]) -> int:
        """Return the unit that goes where any of these goes."""
        roots = tuple(dict.fromkeys(map(self.root, units)))
        if len(roots) == 1:
            return roots[0]
        known = self._known.get(roots)
        if known is None:
            known = int(self.fresh(1))
            self._known[roots], self._crossings[known] = known, roots
        return known

    def merge(self, one: int, other: int) -> None:
        """Let two units go together; crossings that are not of the same units stay, and so do these."""
        a, b = self.root(one), self.root(other)
        if a == b:
            return
        if a not in self._crossings:
            a, b = b, a
        of_a, of_b = self.plain(a), self.plain(b)
        if a in self._crossings and (b in self._crossings or b in of_a):  # linked, one might become a part of itself
            for unit in (*of_a, *of_b) if set(of_a) != set(of_b) else ():
                self.fix(unit, "it goes together with another side that is divided otherwise")
            return
        self._parents[b] = a
        self._families[a] |= self._families.pop(b)
        self._crossings.pop(b, None)
        reason = self._reasons.pop(b, "")
        if reason:
            self.fix(a, reason)

    def merge_all(self, units: Tensor, others: Tensor) -> None:
        """Merge elementwise, where both are there."""
        for a, b in zip(units.tolist(), others.tolist(), strict=True):
            if min(a, b) > ABSENT:
                self.merge(a, b)

    def fix(self, unit: int, reason: str) -> None:
        """Let a unit stay; of a crossing, all that it crosses."""
        for plain in self.plain(unit):
            self._reasons.setdefault(plain, reason)

    def fix_all(self, units: Tensor, reason: str) -> None:
        """Let units stay."""
        for unit in set(units.flatten().tolist()) - {ABSENT}:
            self.fix(unit, reason)

    def pinned(self, count: int, reason: str) -> Tensor:
        """Return new units that stay."""
        units = self.fresh(count)
        self.fix_all(units, reason)
        return units

    def reason(self, unit: int) -> str:
        """Say why a plain unit stays; nothing where it may go."""
        return self._reasons.get(self.root(unit), "")

    def free(self, units: Iterable[int]) -> list[int]:
        """Return the plain units that may go among those that the given ones consist of, in order."""
        plain = dict.fromkeys(p for unit in units if unit != ABSENT for p in self.plain(unit))
        return [unit for unit in plain if not self.reason(unit)]

    def kept(self, units: Tensor, gone: frozenset[int]) -> Tensor:
        """Return the places along a side that stay where plain units go, given the units of the side."""
        stays = [i for i, unit in enumerate(units.tolist()) if gone.isdisjoint(self.plain(unit))]
        return torch.tensor(stays, dtype=torch.int64)
