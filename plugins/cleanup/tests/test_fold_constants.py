"""Nodes with constant operands are computed once, within limits; the stored graph keeps every parameter."""

import pytest
import torch
from clika_ref_cleanup.fold_constants import FoldConstants, FoldLiterals
from clika_ref_cleanup.plugin import clika_ref_passes
from pass_sketches import noise

from clika_ref.core.operators import operator
from clika_ref.core.passes import Phase, Pipeline


@operator()
def dequantize(x: torch.Tensor) -> torch.Tensor:
    """Replace the operator of that name."""
    return x * 0.5


def build_causal_mask(sketch, length=3):
    rows = sketch("unsqueeze", sketch("arange", end=length), dim=1)
    return sketch("where", sketch("ge", rows, sketch("arange", end=length)), 0.0, float("-inf"))


@pytest.mark.parametrize("fold", [FoldLiterals(), FoldConstants()])
def test_fold_literals_numbers_become_one_constant(sketch, fold):
    """Nodes that depend on numbers only become one constant."""
    x = sketch.input("b", 3, 3)
    assert sketch.returns(sketch("add", x, build_causal_mask(sketch))).clean(fold) == ["add"]
    (value,) = sketch.graph.constants.values()
    expected = torch.zeros(3, 3).masked_fill(~torch.ones(3, 3).tril().bool(), float("-inf"))
    assert torch.equal(value.data, expected)


def test_fold_literals_names_use_clika_prefix(sketch):
    """Folded literals have the prefix of names that compression adds."""
    sketch.returns(sketch("add", sketch.input(3), sketch("arange", end=3))).clean(FoldLiterals())
    assert list(sketch.graph.constants) == ["clika.literal_arange"]


def test_fold_literals_lifted_tensors_fold(sketch):
    """Tensors written in the code are literals and fold with their nodes."""
    two = sketch.constant(torch.tensor([2]), "clika.block.lifted_tensor_0")
    named_alike = sketch.constant(torch.tensor([2]), "block.lifted_tensor_0")
    trained = sketch.constant(torch.tensor([2.0]), "clika.lifted_tensor_1")
    x = sketch.input(3)
    y = sketch("add", x, sketch("mul", sketch("arange", end=3), two))
    y = sketch("add", sketch("add", y, sketch("neg", named_alike)), sketch("neg", trained))
    assert sketch.returns(y).clean(FoldLiterals()) == ["add", "neg", "add", "neg", "add"]
    assert set(sketch.graph.constants) == {"clika.literal_mul", named_alike.name, trained.name}


def test_fold_literals_users_share_one_constant(sketch):
    """Several users share one constant."""
    x, m = sketch.input(3, 3), build_causal_mask(sketch)
    assert sketch.returns(sketch("add", x, m), sketch("mul", x, m)).clean(FoldLiterals()) == ["add", "mul"]
    assert len(sketch.graph.constants) == 1


def test_fold_constants_parameter_folds_on_clone_only(sketch):
    """A parameter is folded on the lowered clone only."""
    x, w = sketch.input(2, 3), sketch.constant(torch.arange(12.0).reshape(4, 3))
    sketch.returns(sketch("matmul", x, sketch("permute", w, dims=(1, 0))))
    assert sketch.clean(FoldLiterals()) == ["permute", "matmul"]
    assert sketch.clean(FoldConstants()) == ["matmul"]
    (folded,) = (v for v in sketch.graph.constants.values() if v.uses)
    assert folded.data.is_contiguous()
    assert not folded.data.requires_grad
    assert torch.equal(folded.data, w.data.T)


def test_pipeline_clean_keeps_constants_of_stored_graph(sketch, operators):
    """The CLEAN pipeline folds no constant of the stored graph."""
    x, w, buffer = sketch.input(3), sketch.constant(torch.ones(3)), sketch.constant(torch.arange(3), "buffer")
    sketch.returns(sketch("add", x, sketch("neg", w)), sketch("add", x, sketch("neg", buffer)))
    passes = {p.name: p for p in clika_ref_passes()}
    Pipeline.of(passes, operators, Phase.CLEAN).run(sketch.graph)
    assert sketch.kinds == ["neg", "add", "neg", "add"]
    assert set(sketch.graph.constants) == {"weight", "buffer"}


def test_fold_constants_random_nodes_stay(sketch):
    """Random nodes and their users stay."""
    x, w = sketch.input(3), sketch.constant(torch.ones(3))
    sketch.returns(sketch("add", x, sketch("neg", sketch(noise, w))))
    assert sketch.clean(FoldConstants()) == ["noise", "neg", "add"]


def test_fold_constants_dequantize_stays(sketch):
    """Kept operators stay."""
    x, w = sketch.input(3), sketch.constant(torch.ones(3))
    sketch.returns(sketch("add", x, sketch("abs", sketch(dequantize, sketch("neg", w)))))
    assert sketch.clean(FoldConstants()) == ["dequantize", "abs", "add"]


def test_fold_constants_state_stays(sketch):
    """State is read at each call."""
    x, count = sketch.input(3), sketch.constant(torch.ones(3), "count")
    sketch.graph.set_state("count", sketch("add", count, 1.0))
    sketch.returns(sketch("mul", x, sketch("neg", count)))
    assert sketch.clean(FoldConstants()) == ["add", "neg", "mul"]


def test_fold_constants_dynamic_sizes_stay(sketch):
    """Dynamic sizes are never folded."""
    x = sketch.input("b", 3)
    b = x.type.shape[0]
    ones = sketch("full", size=(b,), fill_value=1.0, types=(sketch.input("b", name="y").type,))
    expanded = sketch("expand", sketch.constant(torch.ones(1, 3)), size=(b, 3))
    scaled = sketch("mul", sketch.constant(torch.ones(3), "v"), b)
    sketch.returns(sketch("neg", ones), sketch("add", x, expanded), sketch("add", x, scaled))
    before = sketch.kinds
    assert sketch.clean(FoldConstants()) == sketch.clean(FoldLiterals()) == before


def test_fold_literals_limit_bounds_added_bytes(sketch):
    """The limit bounds the added bytes."""
    x = sketch.input(8)
    sketch.returns(sketch("add", x, sketch("neg", sketch("full", size=(8,), fill_value=2.0))))
    assert sketch.clean(FoldLiterals(limit_bytes=31)) == ["full", "neg", "add"]
    assert sketch.clean(FoldLiterals(limit_bytes=32)) == ["add"]


def test_fold_constants_large_constant_replaced_by_equal_size(sketch):
    """A large constant may be replaced by one of its size."""
    x, w = sketch.input(8, 4), sketch.constant(torch.randn(8, 4))
    y = sketch("matmul", x, sketch("mul", sketch("reshape", sketch("permute", w, dims=(1, 0)), shape=(4, 8)), 2.0))
    assert sketch.returns(y).clean(FoldConstants(limit_bytes=8)) == ["matmul"]


@pytest.mark.parametrize("position", ["read twice", "grows", "read after"])
def test_fold_constants_large_kept_constant_not_repeated(sketch, position):
    """A large constant that stays is not repeated."""
    w = sketch.constant(torch.randn(8, 4))
    y = sketch("expand", w, size=(2, 8, 4)) if position == "grows" else sketch("permute", w, dims=(1, 0))
    sketch.returns(sketch("add", sketch.input(*y.type.shape), y))
    if position == "read twice":
        sketch.returns(sketch("add", sketch.input(8, 4, name="y"), w))
    if position == "read after":
        sketch.returns(*(sketch("add", sketch.input(4, 8), sketch(kind, y)) for kind in ("neg", "abs")))
    left = {
        "read twice": ["permute", "add", "add"],
        "grows": ["expand", "add"],
        "read after": ["add", "neg", "add", "abs", "add"],
    }
    assert sketch.clean(FoldConstants(limit_bytes=8)) == left[position]


def test_fold_literals_constant_output_keeps_node_and_name(sketch):
    """An output that depends on constants only keeps its node and name."""
    sketch.returns(sketch("add", sketch("arange", end=3), 1), sketch.constant(torch.ones(2)))
    assert sketch.clean(FoldLiterals()) == ["add"]


def test_fold_constants_folds_all_outputs_of_node(sketch):
    """All outputs of a node are folded."""
    x, w = sketch.input(2), sketch.constant(torch.arange(5.0))
    a, b = sketch("split_with_sizes", w, split_sizes=(2, 3))
    sketch.returns(sketch("add", x, a), sketch("neg", b), sketch("abs", sketch("sum", b)))
    assert sketch.clean(FoldConstants()) == ["add", "neg", "abs"]


def test_fold_constants_scalar_and_empty_fold(sketch):
    """A scalar and an empty constant are folded."""
    x = sketch.input(0, 3)
    y = sketch("mul", x, sketch("neg", sketch.constant(torch.tensor(2.0))))
    sketch.returns(sketch("add", y, sketch("neg", sketch.constant(torch.ones(0, 3), "empty"))))
    assert sketch.clean(FoldConstants()) == ["mul", "add"]


def test_fold_constants_deferred_data_leads_to_parameter(sketch):
    """A folded constant leads to its parameter through all folded nodes."""
    w = sketch.constant(torch.randn(6, 4), "w")
    one, other = sketch("split_with_sizes", sketch("mul", w, 2.0), split_sizes=(2, 4), dim=0)
    x = sketch.input("n", 4)
    sketch.returns(sketch("linear", x, one, None), sketch("linear", x, sketch("neg", other), None))
    assert sketch.clean(FoldConstants()) == ["linear", "linear"]
    for node in sketch.graph.nodes:
        formula = node.inputs[1].deferred_data
        while formula.sources[0] is not w:
            formula = formula.sources[0].deferred_data
        assert formula.function.name == "mul"


def test_fold_literals_views_of_one_memory_copied(sketch):
    """Literals that are views of one memory are copied."""
    x, numbers = sketch.input(2, 3), sketch("arange", end=6)
    rows = [sketch("reshape", numbers, shape=shape) for shape in ((2, 3), (1, 2, 3))]
    sketch.returns(*(sketch("add", x, row) for row in rows)).clean(FoldLiterals())
    one, other = sketch.graph.constants.values()
    assert one.data.untyped_storage().data_ptr() != other.data.untyped_storage().data_ptr()
    assert one.deferred_data is other.deferred_data is None, "numbers of the stored graph follow from nothing"
