"""A slice of rows moves before the linear layer that computes them, and other slices stay."""

import pytest
import torch
from clika_ref_cleanup.merge_common_subexpressions import MergeCommonSubexpressions
from clika_ref_cleanup.push_slices import PushSlices

from clika_ref.core.symbols import make_symbol


def build_heads(sketch, x, length, name="weight"):
    """Return ``linear(x)`` as heads, ``float32[3, head, length, element]``."""
    made = sketch("linear", x, sketch.constant(torch.arange(24.0).reshape(6, 4) / 8, name), None)
    return sketch("permute", sketch("reshape", made, shape=(3, length, 2, 3)), dims=(0, 2, 1, 3))


def cut(sketch, x, dim, *, start=2, end=5, step=1):
    return sketch("slice", x, dim=dim, start=start, end=end, step=step)


def test_push_slices_through_reshape_and_permute(sketch):
    """The slice is made of the input of the layer, and the layer keeps its name."""
    heads = build_heads(sketch, sketch.input(3, 5, 4), 5)
    layer, result = heads.producer.inputs[0].producer.inputs[0], cut(sketch, heads, 2)
    names = layer.name, result.name
    assert sketch.returns(sketch("relu", result)).clean(PushSlices()) == [
        "slice",
        "linear",
        "reshape",
        "permute",
        "relu",
    ]
    by_name = {value.name: node for node in sketch.graph.nodes for value in node.outputs}
    assert [by_name[name].op_type for name in names] == ["linear", "permute"]
    assert by_name[names[0]].output.type.shape == (3, 3, 6)


def test_push_slices_of_one_input_become_one(sketch):
    """Layers that read the same rows share one slice, of dynamic length."""
    n = make_symbol("n")
    x = sketch.input(3, "n", 4)
    heads = [build_heads(sketch, x, n, name) for name in ("first", "second")]
    sketch.returns(*(cut(sketch, h, 2, start=2, end=n) for h in heads))
    found = sketch.clean(PushSlices(), MergeCommonSubexpressions(), sizes={"n": 6})
    assert found.count("slice") == 1
    assert found.count("linear") == 2


@pytest.mark.parametrize(
    ("dim", "has_other_reader"),
    [(1, False), (3, False), (2, True)],
    ids=["some heads", "some elements", "all rows are read elsewhere"],
)
def test_push_slices_others_stay(sketch, dim, has_other_reader):
    """Slices of features, or of a result that is read as a whole, stay."""
    heads = build_heads(sketch, sketch.input(3, 5, 4), 5)
    sketch.returns(cut(sketch, heads, dim, start=1, end=2), *([sketch("relu", heads)] if has_other_reader else []))
    kinds = sketch.kinds
    assert sketch.clean(PushSlices()) == kinds


def test_push_slices_after_other_operator_stays(sketch):
    """A slice of an activation stays: the rows may depend on each other."""
    heads = build_heads(sketch, sketch.input(3, 5, 4), 5)
    sketch.returns(cut(sketch, sketch("softmax", heads, dim=2), 2))
    assert "slice" in sketch.clean(PushSlices())[-1:]
