"""Equal calls merge; calls that differ in any operand, attribute, dtype or bit do not."""

import pytest
import torch
from clika_ref_cleanup.merge_common_subexpressions import MergeCommonSubexpressions
from pass_sketches import noise


def test_merge_cse_equal_calls_merge_to_any_depth(sketch):
    """Equal calls merge to any depth."""
    x = sketch.input(2, 3)
    twins = [sketch("exp", sketch("mul", sketch("neg", x), 2.0)) for _ in range(3)]
    sketch.returns(sketch("add", sketch("add", twins[0], twins[1]), twins[2]))
    assert sketch.clean(MergeCommonSubexpressions()) == ["neg", "mul", "exp", "add", "add"]


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        ("mul", (2,), (2.0,)),
        ("mul", (1,), (True,)),
        ("div", (0.0,), (-0.0,)),
        ("mul", (float("nan"),), (2.0,)),
        ("to", {"dtype": torch.float16}, {"dtype": torch.float64}),
        ("to", {"dtype": torch.float16}, {"dtype": torch.bfloat16}),
        ("clamp", (0.0, 1.0), (0.0, 2.0)),
        ("clamp", (None, 1.0), (1.0, None)),
        ("sum", {"dim": (0,), "keepdim": True}, {"dim": (1,), "keepdim": True}),
        ("round", {"decimals": 0}, {"decimals": 1}),
        ("full", {"size": (2,), "fill_value": 1}, {"size": (2,), "fill_value": True}),
        ("full", {"size": (2,), "fill_value": 0.0}, {"size": (2,), "fill_value": -0.0}),
    ],
    ids=str,
)
def test_merge_cse_different_calls_stay(sketch, kind, one, other):
    """Calls that differ in an operand, attribute, dtype or bit stay."""
    x = sketch.input(2, 3)

    def call(given):
        operands = () if kind == "full" else (x,)
        return sketch(kind, *operands, **given) if isinstance(given, dict) else sketch(kind, *operands, *given)

    sketch.returns(sketch("isnan", call(one)), sketch("isinf", call(other)), sketch("isnan", sketch("exp", call(one))))
    assert sketch.clean(MergeCommonSubexpressions()).count(kind) == 2


def test_merge_cse_different_operands_stay(sketch):
    """Calls on different operands stay."""
    x, y = sketch.input(2, name="x"), sketch.input(2, name="y")
    w, v = sketch.constant(torch.ones(2), "w"), sketch.constant(torch.ones(2), "v")
    sketch.returns(sketch("add", sketch("neg", x), w), sketch("add", sketch("neg", y), w), sketch("add", x, v))
    assert len(sketch.clean(MergeCommonSubexpressions())) == 5


def test_merge_cse_random_calls_stay(sketch):
    """Random calls never merge."""
    x = sketch.input(2)
    sketch.returns(sketch("add", sketch(noise, x), sketch(noise, x)))
    assert sketch.clean(MergeCommonSubexpressions()) == ["noise", "noise", "add"]


def test_merge_cse_two_outputs_keep_names(sketch):
    """Two outputs keep two names."""
    x = sketch.input(2)
    sketch.returns(sketch("neg", x), sketch("neg", x), sketch("abs", sketch("neg", x)))
    assert sketch.clean(MergeCommonSubexpressions()) == ["neg", "neg", "abs"]


def test_merge_cse_returned_twin_names_first(sketch):
    """An output gives its name to the first of equal calls."""
    x = sketch.input(2)
    sketch("exp", sketch("neg", x))
    sketch.returns(sketch("neg", x))
    assert sketch.clean(MergeCommonSubexpressions()) == ["neg", "exp"]


def test_merge_cse_all_outputs_of_node_merge(sketch):
    """All outputs of a node merge at once."""
    x = sketch.input(4, 2)
    a, b = sketch("split_with_sizes", x, split_sizes=(1, 3))
    c, d = sketch("split_with_sizes", x, split_sizes=(1, 3))
    sketch.returns(sketch("neg", a), sketch("add", b, d), sketch("abs", c))
    assert sketch.clean(MergeCommonSubexpressions()).count("split_with_sizes") == 1


def test_merge_cse_dynamic_attributes_merge_by_expression(sketch):
    """Dynamic attributes merge by expression."""
    x = sketch.input("b", 3)
    b = x.type.shape[0]
    flat, same, other = (sketch("reshape", x, shape=(n,)) for n in (3 * b, b * 3, 3 * b))
    sketch.returns(sketch("add", sketch("add", flat, same), other))
    assert sketch.clean(MergeCommonSubexpressions()).count("reshape") == 1
