"""What the first process decides, as the others read it: all of it."""

from calibrated_nets import compiled

from clika_ref.distributed.deciding import _read, _written


def test_what_is_decided_is_the_same_on_the_other_side():
    found = compiled()._clika_quantized.found
    again = _read(*_written(found), found.plan.scheme)
    assert (again.layers, again.what_if, again.observer, again.bytes) == (
        *([*found.layers], [*found.what_if]),
        *(found.observer, found.bytes),
    )
    assert again.observers == found.observers != {}
    assert [*again.spared] == [*found.spared]
