"""Decisions of the first process arrive complete at the others."""

from calibrated_nets import compile_net

from clika_ref.distributed.decisions import _from_message, _to_message


def test_decision_message_round_trip_equal():
    """A decision that another process reads equals the original."""
    found = compile_net().clika_state.quantized.found
    again = _from_message(*_to_message(found), found.plan.scheme)
    assert (again.layers, again.what_if, again.observer, again.bytes) == (
        *([*found.layers], [*found.what_if]),
        *(found.observer, found.bytes),
    )
    assert again.observers == found.observers != {}
    assert [*again.kept_in_float] == [*found.kept_in_float]
