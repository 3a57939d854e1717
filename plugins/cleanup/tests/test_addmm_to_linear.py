"""Products with a weight become linear layers, and no other products do."""

import pytest
import torch
from clika_ref_cleanup.addmm_to_linear import AddmmToLinear


def build_addmm(sketch, *, bias=(5,), dtype=torch.float32, **attrs):
    x = sketch("relu", sketch.input("n", 4, dtype=dtype))
    weight = sketch.constant(torch.arange(20.0).reshape(4, 5).to(dtype), "h.weight")
    offset = sketch.constant(torch.ones(bias, dtype=dtype), "h.bias")
    return sketch("addmm", offset, x, weight, **attrs)


def test_addmm_to_linear_weight_transposed_when_read(sketch):
    """addmm with a weight becomes linear, with a deferred transposed weight."""
    assert sketch.returns(build_addmm(sketch)).clean(AddmmToLinear()) == ["relu", "linear"]
    *_, layer = sketch.graph.nodes
    assert layer.inputs[1].deferred_data is not None, "no copy of the weight is made before it is written"
    assert torch.equal(layer.inputs[1].data, torch.arange(20.0).reshape(4, 5).T)
    assert layer.inputs[1].name.startswith("h.weight")


@pytest.mark.parametrize("is_returned", [True, False])
def test_addmm_to_linear_keeps_name(sketch, is_returned):
    """The layer keeps its name."""
    found = build_addmm(sketch)
    name = found.name
    sketch.returns(found if is_returned else sketch("relu", found)).clean(AddmmToLinear())
    assert [node.name for node in sketch.graph.nodes if node.op_type == "linear"] == [name]


@pytest.mark.parametrize(
    "changes",
    [{"alpha": 2}, {"beta": 0.5}, {"bias": (1,)}, {"bias": ()}, {"bias": (3, 5)}, {"dtype": torch.int64}],
)
def test_addmm_to_linear_other_forms_stay(sketch, changes):
    """A product that is no layer with a bias stays."""
    assert sketch.returns(build_addmm(sketch, **changes)).clean(AddmmToLinear()) == ["relu", "addmm"]


def test_addmm_to_linear_computed_matrices_stay(sketch):
    """A product of two computed matrices stays."""
    x, y = sketch.input(3, 4, name="x"), sketch.input(4, 5, name="y")
    product = sketch("addmm", sketch.constant(torch.ones(5)), x, y)
    assert sketch.returns(product).clean(AddmmToLinear()) == ["addmm"]


def test_addmm_to_linear_overwritten_weight_stays(sketch):
    """A weight that a call overwrites stays."""
    sketch.returns(build_addmm(sketch))
    sketch.graph.set_state("h.weight", sketch("abs", sketch.graph.constants["h.weight"]))
    assert sketch.clean(AddmmToLinear()) == ["relu", "addmm", "abs"]
