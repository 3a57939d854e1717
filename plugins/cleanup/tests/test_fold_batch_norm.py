"""Batch norm folds into the layer before it, and into nothing that it must not."""

import pytest
import torch
from clika_ref_cleanup.fold_batch_norm import FoldBatchNorm, fold_batch_norm
from clika_ref_cleanup.merge_equal_constants import MergeEqualConstants

from clika_ref.core.inference import infer_types
from clika_ref.core.registry import load_registry
from clika_ref.core.rewriter import MatchStats, apply_rules
from clika_ref.quantization.qdq import norm_folding

LAYERS = [
    ("conv1d", (2, 4, 9), (6, 4, 3), {}),
    ("conv1d", (2, 4, 9), (6, 2, 3), {"groups": 2}),
    ("conv2d", (2, 4, 9, 8), (6, 4, 3, 2), {"stride": (2, 1), "padding": (1, 1)}),
    ("conv2d", (2, 6, 9, 8), (6, 1, 3, 2), {"groups": 6}),
    ("conv3d", (1, 2, 5, 4, 5), (6, 1, 2, 2, 2), {"groups": 2}),
    ("linear", (5, 4), (6, 4), {}),
    ("conv_transpose1d", (2, 4, 5), (4, 6, 3), {}),
    ("conv_transpose1d", (2, 4, 5), (4, 3, 3), {"groups": 2}),
    ("conv_transpose2d", (2, 4, 5, 4), (4, 3, 3, 2), {"groups": 2, "stride": (2, 1)}),
    ("conv_transpose3d", (1, 6, 3, 3, 3), (6, 2, 2, 2, 2), {"groups": 3}),
]


def normalized(sketch, y, channels=6, dtype=torch.float32, **attrs):
    generator = torch.Generator().manual_seed(0)
    facts = [torch.rand(channels, generator=generator) + 0.5 for _ in range(4)]
    names = ("bn.weight", "bn.bias", "bn.running_mean", "bn.running_var")
    operands = [sketch.constant(t.to(dtype), name) for t, name in zip(facts, names, strict=True)]
    return sketch("batch_norm", y, *operands, **attrs)


def layer(sketch, case, *, bias=True, dtype=torch.float32):
    kind, shape, weight, attrs = case
    x = sketch("tanh", sketch.input(*shape, dtype=dtype))
    generator = torch.Generator().manual_seed(1)
    w = sketch.constant(torch.randn(weight, generator=generator).to(dtype), "conv.weight")
    b = sketch.constant(torch.randn(6, generator=generator).to(dtype), "conv.bias") if bias else None
    return sketch(kind, x, w, b, **attrs)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_it_folds_into_each_layer(sketch, case, bias):
    y = normalized(sketch, layer(sketch, case, bias=bias))
    assert sketch.returns(y).clean(FoldBatchNorm()) == ["tanh", case[0]]


def test_a_layer_keeps_the_name_by_which_people_know_it(sketch):
    found = layer(sketch, LAYERS[0])
    name = found.name
    sketch.returns(sketch("relu", normalized(sketch, found))).clean(FoldBatchNorm())
    assert [node.name for node in sketch.graph.nodes if node.kind == LAYERS[0][0]] == [name]


def test_the_folded_weights_are_rounded_once(sketch):
    y = layer(sketch, ("linear", (5, 4), (6, 4), {}), dtype=torch.float16)
    sketch.returns(normalized(sketch, y, dtype=torch.float16)).clean(FoldBatchNorm())
    assert sketch.graph.constants["conv.weight_1"].deferred_data, "a second set of weights exists before it is written"
    constants = {name: v.data.detach().double() for name, v in sketch.graph.constants.items()}
    gamma, beta, mean, var = (constants[f"bn.{n}"] for n in ("weight", "bias", "running_mean", "running_var"))
    scale = gamma / (var + 1e-5).sqrt()
    assert torch.equal(constants["conv.weight_1"], (constants["conv.weight"] * scale[:, None]).half().double())
    assert torch.equal(constants["conv.bias_1"], ((constants["conv.bias"] - mean) * scale + beta).half().double())


def test_batch_norm_without_scale_and_shift_folds(sketch):
    y = layer(sketch, LAYERS[2], bias=False)
    mean, var = sketch.constant(torch.full((6,), 0.5), "m"), sketch.constant(torch.full((6,), 2.0), "v")
    sketch.returns(sketch("batch_norm", y, None, None, mean, var, eps=0.5))
    assert sketch.clean(FoldBatchNorm()) == ["tanh", "conv2d"]
    assert sketch.graph.outputs[0].producer.inputs[2].name == "conv.bias"


def test_two_layers_with_one_weight_get_a_copy_each(sketch):
    x, w = sketch("tanh", sketch.input(1, 6, 5)), sketch.constant(torch.randn(6, 6, 3), "shared")
    for _ in range(2):
        sketch.returns(normalized(sketch, sketch("conv1d", x, w, None)))
    third = sketch("conv1d", x, w, None)
    assert sketch.returns(third).clean(FoldBatchNorm()) == ["tanh", "conv1d", "conv1d", "conv1d"]
    assert sketch.graph.outputs[2].producer.inputs[1] is w


def skipped(sketch, y, *more):
    """Return why the pass leaves a graph as it is."""
    before = sketch.returns(y, *more).kinds
    assert sketch.clean(FoldBatchNorm()) == before
    misses = MatchStats()
    apply_rules(sketch.graph, [fold_batch_norm], sketch.build.operators, misses)
    return misses.closest["fold-batch-norm"][0].reason


CONV = ("conv2d", (2, 4, 9, 8), (6, 4, 3, 2), {})


def test_a_layer_that_others_read_stays(sketch):
    y = layer(sketch, CONV)
    assert "has other readers" in skipped(sketch, normalized(sketch, y), sketch("abs", y))


def test_a_layer_that_is_returned_stays(sketch):
    y = layer(sketch, CONV)
    assert "has other readers" in skipped(sketch, normalized(sketch, y), y)


def test_training_stays(sketch):
    assert "its own input" in skipped(sketch, normalized(sketch, layer(sketch, CONV), training=True))


def test_missing_statistics_stay(sketch):
    assert "its own input" in skipped(sketch, sketch("batch_norm", layer(sketch, CONV), training=True))


def test_a_computed_weight_stays(sketch):
    x, w = sketch.input(2, 4, 9, 8), sketch("neg", sketch.constant(torch.randn(6, 4, 3, 2)))
    assert "computed" in skipped(sketch, normalized(sketch, sketch("conv2d", x, w, None)))


def test_statistics_that_a_call_overwrites_stay(sketch):
    y = normalized(sketch, layer(sketch, CONV))
    sketch.graph.set_state("bn.running_mean", sketch("neg", sketch.graph.constants["bn.running_mean"]))
    assert "overwritten" in skipped(sketch, y)


def test_side_1_of_a_linear_layer_on_sequences_is_not_its_channels(sketch):
    y = layer(sketch, ("linear", (5, 6, 4), (6, 4), {}))
    assert "not its channels" in skipped(sketch, normalized(sketch, y))


def test_side_1_of_an_unbatched_convolution_is_not_its_channels(sketch):
    y = layer(sketch, ("conv2d", (4, 8, 8), (6, 4, 3, 3), {}))
    assert "not its channels" in skipped(sketch, normalized(sketch, y))


def test_batch_norm_before_a_layer_stays(sketch):
    y = normalized(sketch, sketch.input(2, 6, 5))
    sketch.returns(sketch("conv1d", y, sketch.constant(torch.randn(6, 6, 3)), None, padding=(1,)))
    assert "padding prevents folding" in skipped(sketch, sketch("relu", y))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e38])
def test_statistics_that_overflow_stay(sketch, number):
    y = normalized(sketch, layer(sketch, CONV))
    with torch.no_grad():
        sketch.graph.constants["bn.weight"].data[2] = number
        sketch.graph.constants["bn.running_var"].data[2] = 1e-8
    assert "overflows" in skipped(sketch, y)


def test_the_types_of_folded_layers_are_those_that_are_inferred(sketch):
    for case in LAYERS:
        sketch.returns(normalized(sketch, layer(sketch, case)))
    FoldBatchNorm()(sketch.graph, sketch.build.operators)
    for node in sketch.graph.nodes:
        assert infer_types(node.op, node.inputs, node.attrs) == tuple(v.type for v in node.outputs)


@pytest.mark.parametrize("part", [1, 7, 10**6])
def test_a_product_is_the_same_in_any_number_of_parts(monkeypatch, part):
    monkeypatch.setattr(norm_folding, "ELEMENTS_PER_PART", part)
    weight, factors = torch.randn(6, 4, 3, 3), torch.randn(6, 1, 1, 1, dtype=torch.float64)
    assert torch.equal(norm_folding.scale_in_parts(weight, factors), (weight.double() * factors).float())


def test_a_layer_that_is_called_twice_is_folded_into_one_weight_that_merging_need_not_compute(sketch, monkeypatch):
    x, w = sketch("tanh", sketch.input(1, 6, 5)), sketch.constant(torch.randn(6, 6, 3), "shared")
    statistics = [sketch.constant(torch.rand(6) + 0.5, f"bn.{name}") for name in ("weight", "bias", "mean", "var")]
    for operand in (x, sketch("relu", x)):
        sketch.returns(sketch("batch_norm", sketch("conv1d", operand, w, None), *statistics))
    operators = load_registry().operators
    with monkeypatch.context() as patch:
        patch.setattr(norm_folding, "scale_in_parts", None)
        FoldBatchNorm()(sketch.graph, operators)
        MergeEqualConstants()(sketch.graph, operators)
    one, other = (value.producer for value in sketch.graph.outputs)
    assert one.inputs[1] is other.inputs[1]
    assert one.inputs[1].data.shape == w.type.shape


def test_a_weight_is_folded_into_one_whatever_is_added_behind_it(sketch):
    x, w = sketch.input(1, 6, 5), sketch.constant(torch.randn(6, 6, 3), "shared")
    gamma, var = (sketch.constant(torch.rand(6) + 0.5, f"bn.{name}") for name in ("weight", "var"))
    for i in range(2):
        bias, beta, mean = (sketch.constant(torch.randn(6), f"{name}{i}") for name in ("bias", "beta", "mean"))
        sketch.returns(sketch("batch_norm", sketch("conv1d", x, w, bias), gamma, beta, mean, var))
    assert sketch.clean(FoldBatchNorm(), MergeEqualConstants()) == ["conv1d", "conv1d"]
    one, other = (value.producer for value in sketch.graph.outputs)
    assert one.inputs[1] is other.inputs[1]
