"""A product of a tensor and its own sigmoid becomes ``silu``, and no other product does."""

import pytest
import torch
from clika_ref_cleanup.mul_to_silu import MulToSilu


@pytest.mark.parametrize("is_first", [True, False])
def test_mul_to_silu_either_order(sketch, is_first):
    """The order of the operands does not matter, and the result keeps its name."""
    x = sketch.input("n", 4)
    gate = sketch("sigmoid", x)
    product = sketch("mul", *((x, gate) if is_first else (gate, x)))
    name = product.name
    assert sketch.returns(sketch("relu", product)).clean(MulToSilu()) == ["silu", "relu"]
    assert next(iter(sketch.graph.nodes)).name == name


def test_mul_to_silu_other_gates_stay(sketch):
    """The sigmoid of another tensor, and one with a second reader, stay."""
    x, y = sketch.input(3, 4, name="x"), sketch.input(3, 4, name="y")
    gate = sketch("sigmoid", y)
    other = sketch("mul", x, sketch("sigmoid", sketch("relu", x)))
    kept = ["sigmoid", "relu", "sigmoid", "mul", "mul", "mul", "add", "mul"]
    products = sketch("mul", y, gate), sketch("mul", x, gate)
    sketch.returns(sketch("mul", sketch("add", *products), other))
    assert sketch.clean(MulToSilu()) == kept


def test_mul_to_silu_integers_stay(sketch):
    """A product of integers stays: ``silu`` takes none."""
    n = sketch.input(3, 4, dtype=torch.int64)
    product = sketch("mul", n, sketch("sigmoid", n))
    assert sketch.returns(product).clean(MulToSilu()) == ["sigmoid", "mul"]


def test_mul_to_silu_product_with_number_stays(sketch):
    """A product with a number stays."""
    x = sketch.input(3, 4)
    assert sketch.returns(sketch("mul", sketch("sigmoid", x), 2.0)).clean(MulToSilu()) == ["sigmoid", "mul"]
