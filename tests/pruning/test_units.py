"""Units: merged units are removed together, a crossing with either of its units, and fixed ones never."""

import torch

from clika_ref.pruning.units import Units


def test_units_merged_units_removed_together():
    """Merged units are removed together and keep both families."""
    units = Units()
    a, b = units.fresh(3), units.fresh(3)
    units.merge_all(a, b)
    assert units.roots(a).tolist() == units.roots(b).tolist()
    assert len(units.families(int(a[0]))) == 2
    gone = frozenset(units.free([int(b[1])]))
    assert units.remaining_indices(a, gone).tolist() == [0, 2]


def test_units_crossing_removed_with_either_unit():
    """A crossing is removed with either of its units."""
    units = Units()
    heads, inner = units.fresh(2).tolist(), units.fresh(3).tolist()
    places = torch.tensor([units.cross([h, i]) for h in heads for i in inner])
    assert units.remaining_indices(places, frozenset({heads[0]})).tolist() == [3, 4, 5]
    assert units.remaining_indices(places, frozenset({inner[1]})).tolist() == [0, 2, 3, 5]
    assert units.cross([heads[0], inner[0]]) == int(places[0])


def test_units_fixed_unit_fixes_merged_and_crossed():
    """A fixed unit fixes all units that are merged or crossed with it."""
    units = Units()
    heads, inner = units.fresh(2).tolist(), units.fresh(2).tolist()
    place, other = units.cross([heads[0], inner[0]]), int(units.fresh(1))
    units.fix(other, "it is returned")
    units.merge(place, other)
    assert units.reason(heads[0]) == units.reason(inner[0]) == "it is returned"
    assert units.free([heads[1], inner[1]]) == [heads[1], inner[1]]


def test_units_merged_crossings_of_different_units_fixed():
    """Merged crossings of different units stay."""
    units = Units()
    a, b, c, d = units.fresh(4).tolist()
    units.merge(units.cross([a, b]), units.cross([c, d]))
    assert not units.free([a, b, c, d])


def test_units_merged_with_own_crossing_fixed():
    """A unit that is merged with its own crossing stays, with the other unit."""
    units = Units()
    a, b = units.fresh(2).tolist()
    units.merge(units.cross([a, b]), a)
    assert not units.free([a, b])
