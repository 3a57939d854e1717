"""Dropout goes where it drops nothing, and stays in training mode."""

import pytest
from clika_ref_cleanup.remove_dropout import RemoveDropout


@pytest.mark.parametrize("attrs", [{"p": 0.5, "train": False}, {"p": 0.0, "train": True}, {"p": 0, "train": False}])
def test_idle_dropout_goes(sketch, attrs):
    x = sketch("relu", sketch.input(2, "n"))
    assert sketch.returns(sketch("dropout", x, **attrs)).clean(RemoveDropout()) == ["relu"]


def test_dropout_in_training_mode_stays(sketch):
    y = sketch("dropout", sketch.input(2, 3), p=0.5, train=True)
    assert sketch.returns(sketch("neg", y)).clean(RemoveDropout()) == ["dropout", "neg"]


def test_an_interior_node_may_be_read_twice_and_returned(sketch):
    a = sketch("relu", sketch.input(2, 3))
    b = sketch("dropout", a, p=0.1, train=False)
    sketch.returns(b, sketch("add", a, b), sketch("dropout", b, p=0.1, train=False))
    # The last one stays: it makes an output of its own name.
    assert sketch.clean(RemoveDropout()) == ["relu", "add", "dropout"]


def test_dropout_between_an_input_and_an_output_keeps_the_name_of_the_output(sketch):
    assert sketch.returns(sketch("dropout", sketch.input(2), p=0.1, train=False)).clean(RemoveDropout()) == ["dropout"]
