"""Propagate units from an operand to the dims of a result, given the source index of each element."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clika_ref.pruning.units import ABSENT_UNIT, Units
from clika_ref.quantization.qdq.layer_weights import reshape_along_dim


def propagate_units(units: Units, own: Tensor, indices: Tensor, reason: str) -> dict[int, Tensor]:
    """Return the units along the dims of a result, by axis, so that removing indices there removes whole units.

    If each index along one dim has elements of a single unit, the units are on that dim. If a dim of ``h * d`` indices
    was split into ``h`` heads of ``d``, heads and indices within heads become new units, and the previous units become
    crossings of them. All other units are fixed.

    Args:
        units: all units.
        own: the units along the dim of the operand.
        indices: for each element of the result, its source index along that dim, or `ABSENT_UNIT`.
        reason: prefix of the reason for fixed units.

    >>> units = Units()
    >>> propagate_units(units, units.fresh(3), torch.arange(3).reshape(1, 3).expand(2, 3), "")
    {1: tensor([0, 1, 2])}
    >>> found = propagate_units(units, units.fresh(6), torch.arange(6).reshape(2, 3), "")
    >>> {axis: len(own) for axis, own in found.items()}
    {0: 2, 1: 3}
    """
    reached = torch.bincount(indices.flatten() + 1, minlength=len(own) + 1)[1:] > 0
    present, order = units.roots(own[reached]).unique(return_inverse=True)
    numbers = torch.full_like(own, ABSENT_UNIT).index_put((reached,), order)
    elements = torch.where(indices == ABSENT_UNIT, ABSENT_UNIT, numbers[indices.clamp(min=0)])
    return _propagate(units, present.tolist(), elements, reason)


def _propagate(units: Units, present: Sequence[int], elements: Tensor, reason: str) -> dict[int, Tensor]:
    """Propagate units, given the number of its unit for each element."""
    if len(present) < 2 or not elements.numel():
        return _fix_units(units, present, f"{reason}: there is only one of them")
    lines = [_min_max(elements, axis) for axis in range(elements.ndim)]
    direct = [axis for axis, (lowest, highest) in enumerate(lines) if torch.equal(lowest, highest)]
    if len(direct) == 1:
        return {direct[0]: torch.tensor([*present, ABSENT_UNIT])[lines[direct[0]][0]]}
    if direct:
        return _fix_units(units, present, f"{reason}: they are on several dims, or on none")
    crossings = [units.crossing(unit) for unit in present]
    if all(len(c) == len(crossings[0]) > 1 for c in crossings):
        return _propagate_parts(units, crossings, elements, reason)
    return _split_dims(units, present, elements, [lowest for lowest, _ in lines], reason)


def _fix_units(units: Units, some: Sequence[int], reason: str) -> dict[int, Tensor]:
    for unit in some:
        units.fix(unit, reason)
    return {}


def _min_max(elements: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return the minimum and maximum unit number at each index along a dim; `ABSENT_UNIT` if there is none."""
    rows = elements.movedim(axis, 0).reshape(elements.shape[axis], -1)
    highest = rows.amax(1)
    lowest = torch.where(rows == ABSENT_UNIT, torch.iinfo(rows.dtype).max, rows).amin(1)
    return torch.where(highest == ABSENT_UNIT, ABSENT_UNIT, lowest), highest


def _propagate_parts(
    units: Units, crossings: Sequence[tuple[int, ...]], elements: Tensor, reason: str
) -> dict[int, Tensor]:
    """Propagate the parts of crossings separately."""
    found: dict[int, Tensor] = {}
    for part in zip(*crossings, strict=True):
        present, numbers = torch.tensor(part).unique(return_inverse=True)
        own = torch.where(elements == ABSENT_UNIT, ABSENT_UNIT, numbers[elements.clamp(min=0)])
        for axis, some in _propagate(units, present.tolist(), own, reason).items():
            if axis in found:
                units.fix_all(torch.cat([found[axis], some]), f"{reason}: two dims share one")
            found[axis] = some
    return found


def _split_dims(
    units: Units, present: Sequence[int], elements: Tensor, lines: Sequence[Tensor], reason: str
) -> dict[int, Tensor]:
    """Create units along the dims where each previous unit occupies indices of one kind.

    Indices are of one kind if they hold the same units: heads of several samples may follow each other along a dim.
    """
    is_there = elements != ABSENT_UNIT
    found: dict[int, Tensor] = {}
    crossed: list[list[int]] = []
    for axis, kinds in enumerate(lines):
        along = reshape_along_dim(kinds, axis, elements.ndim).expand(elements.shape)[is_there]
        first, last = (
            torch.zeros(len(present), dtype=torch.int64).scatter_reduce(
                0, elements[is_there], along, reduce, include_self=False
            )
            for reduce in ("amin", "amax")
        )
        different = kinds[kinds != ABSENT_UNIT].unique()
        if len(different) > 1 and torch.equal(first, last):
            own = torch.full((len(present),), ABSENT_UNIT).index_put((different,), units.fresh(len(different)))
            found[axis] = torch.where(kinds == ABSENT_UNIT, ABSENT_UNIT, own[kinds.clamp(min=0)])
            crossed.append(own[first].tolist())
    for unit, *parts in zip(present, *crossed, strict=True):
        if parts:
            units.merge(unit, units.cross(parts))
        else:
            units.fix(unit, f"{reason}: no dim holds exactly their elements")
    return found
