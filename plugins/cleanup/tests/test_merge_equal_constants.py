"""Equal constants merge on the lowered clone, if their dtype, shape and every bit agree."""

import torch
from clika_ref_cleanup.merge_equal_constants import MergeEqualConstants


def merge_constants(sketch, *tensors):
    x = sketch.input(2)
    sketch.returns(*(sketch("add", x, sketch.constant(t, f"c{i}")) for i, t in enumerate(tensors)))
    sketch.clean(MergeEqualConstants())
    return [node.inputs[1].name for node in sketch.graph.nodes]


def test_merge_equal_constants_reads_equal_ones_once(sketch):
    """Equal constants are read once."""
    one = torch.tensor([1.0, torch.nan])
    assert merge_constants(sketch, one, one.clone(), one.flip(0).flip(0)) == ["c0", "c0", "c0"]


def test_merge_equal_constants_other_dtype_shape_or_bits_stay(sketch):
    """Constants that differ in dtype, shape or bits stay."""
    zeros = torch.zeros(2)
    others = (
        -zeros,
        torch.tensor([0.0, 1e-45]),
        zeros.half(),
        zeros.bfloat16(),
        zeros.to(torch.int32),
        zeros[:1],
        zeros[0],
    )
    assert merge_constants(sketch, zeros, *others) == [f"c{i}" for i in range(len(others) + 1)]


def test_merge_equal_constants_one_different_element_stays(sketch):
    """A single element distinguishes large constants."""
    zeros = torch.zeros(50_000, 2)
    others = [zeros.index_fill(0, torch.tensor(i), 1.0) for i in (3, 25_001, 49_998)]
    assert merge_constants(sketch, zeros, *others, zeros.clone()) == ["c0", "c1", "c2", "c3", "c0"]


def test_merge_equal_constants_state_stays(sketch):
    """State stays separate."""
    sketch.graph.set_state("c1", sketch.input(2, name="new"))
    assert merge_constants(sketch, torch.ones(2), torch.ones(2), torch.ones(2)) == ["c0", "c1", "c0"]


def test_merge_equal_constants_single_element_of_any_stride(sketch):
    """A single element of any stride is read."""
    alone = [sketch.constant(torch.arange(8)[3:4].as_strided((1,), (4,)), f"part{i}") for i in range(2)]
    sketch.returns(sketch("add", *alone)).clean(MergeEqualConstants())
    (node,) = sketch.graph.nodes
    assert node.inputs[0] is node.inputs[1]
