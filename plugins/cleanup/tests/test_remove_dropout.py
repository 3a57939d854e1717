"""Dropout is removed in eval mode, and stays in training mode."""

import pytest
from clika_ref_cleanup.remove_dropout import RemoveDropout


@pytest.mark.parametrize("attrs", [{"p": 0.5, "train": False}, {"p": 0.0, "train": True}, {"p": 0, "train": False}])
def test_remove_dropout_idle_dropout_removed(sketch, attrs):
    """Dropout that drops nothing is removed."""
    x = sketch("relu", sketch.input(2, "n"))
    assert sketch.returns(sketch("dropout", x, **attrs)).clean(RemoveDropout()) == ["relu"]


def test_remove_dropout_training_stays(sketch):
    """Dropout in training mode stays."""
    y = sketch("dropout", sketch.input(2, 3), p=0.5, train=True)
    assert sketch.returns(sketch("neg", y)).clean(RemoveDropout()) == ["dropout", "neg"]


def test_remove_dropout_interior_may_have_other_users(sketch):
    """An interior node may be an output or have other users."""
    a = sketch("relu", sketch.input(2, 3))
    b = sketch("dropout", a, p=0.1, train=False)
    sketch.returns(b, sketch("add", a, b), sketch("dropout", b, p=0.1, train=False))
    # The last one stays: it makes an output of its own name.
    assert sketch.clean(RemoveDropout()) == ["relu", "add", "dropout"]


def test_remove_dropout_input_to_output_keeps_name(sketch):
    """Dropout between an input and an output keeps the name of the output."""
    assert sketch.returns(sketch("dropout", sketch.input(2), p=0.1, train=False)).clean(RemoveDropout()) == ["dropout"]
