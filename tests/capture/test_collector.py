"""The garbage collector is spared what exists already, and gets it back."""

import gc

import pytest

from clika_ref.capture.collector import spared


@pytest.fixture(autouse=True)
def nothing_frozen():
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_objects_are_frozen_while_the_context_lasts_and_thawed_after_an_error():
    def fail():
        with spared():
            assert gc.get_freeze_count() > 0
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_froze_stays_frozen():
    gc.freeze()
    with spared():
        pass
    assert gc.get_freeze_count() > 0
