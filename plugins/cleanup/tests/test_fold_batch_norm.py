"""A batch norm is folded into the layer before it, and only where the results stay equal."""

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


def add_batch_norm(sketch, y, channels=6, dtype=torch.float32, **attrs):
    generator = torch.Generator().manual_seed(0)
    facts = [torch.rand(channels, generator=generator) + 0.5 for _ in range(4)]
    names = ("bn.weight", "bn.bias", "bn.running_mean", "bn.running_var")
    operands = [sketch.constant(t.to(dtype), name) for t, name in zip(facts, names, strict=True)]
    return sketch("batch_norm", y, *operands, **attrs)


def add_layer(sketch, case, *, bias=True, dtype=torch.float32):
    kind, shape, weight, attrs = case
    x = sketch("tanh", sketch.input(*shape, dtype=dtype))
    generator = torch.Generator().manual_seed(1)
    w = sketch.constant(torch.randn(weight, generator=generator).to(dtype), "conv.weight")
    b = sketch.constant(torch.randn(6, generator=generator).to(dtype), "conv.bias") if bias else None
    return sketch(kind, x, w, b, **attrs)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_fold_batch_norm_folds_into_each_layer(sketch, case, bias):
    """Batch norm folds into each layer."""
    y = add_batch_norm(sketch, add_layer(sketch, case, bias=bias))
    assert sketch.returns(y).clean(FoldBatchNorm()) == ["tanh", case[0]]


def test_fold_batch_norm_keeps_layer_name(sketch):
    """The layer keeps its name."""
    found = add_layer(sketch, LAYERS[0])
    name = found.name
    sketch.returns(sketch("relu", add_batch_norm(sketch, found))).clean(FoldBatchNorm())
    assert [node.name for node in sketch.graph.nodes if node.op_type == LAYERS[0][0]] == [name]


def test_fold_batch_norm_weights_rounded_once(sketch):
    """The folded weights are deferred and rounded once."""
    y = add_layer(sketch, ("linear", (5, 4), (6, 4), {}), dtype=torch.float16)
    sketch.returns(add_batch_norm(sketch, y, dtype=torch.float16)).clean(FoldBatchNorm())
    assert sketch.graph.constants["conv.weight_1"].deferred_data, "a second set of weights exists before it is written"
    constants = {name: v.data.detach().double() for name, v in sketch.graph.constants.items()}
    gamma, beta, mean, var = (constants[f"bn.{n}"] for n in ("weight", "bias", "running_mean", "running_var"))
    scale = gamma / (var + 1e-5).sqrt()
    assert torch.equal(constants["conv.weight_1"], (constants["conv.weight"] * scale[:, None]).half().double())
    assert torch.equal(constants["conv.bias_1"], ((constants["conv.bias"] - mean) * scale + beta).half().double())


def test_fold_batch_norm_without_affine_folds(sketch):
    """Batch norm without scale and shift folds."""
    y = add_layer(sketch, LAYERS[2], bias=False)
    mean, var = sketch.constant(torch.full((6,), 0.5), "m"), sketch.constant(torch.full((6,), 2.0), "v")
    sketch.returns(sketch("batch_norm", y, None, None, mean, var, eps=0.5))
    assert sketch.clean(FoldBatchNorm()) == ["tanh", "conv2d"]
    assert sketch.graph.outputs[0].producer.inputs[2].name == "conv.bias"


def test_fold_batch_norm_shared_weight_copied_per_layer(sketch):
    """Two layers with one weight get a copy each."""
    x, w = sketch("tanh", sketch.input(1, 6, 5)), sketch.constant(torch.randn(6, 6, 3), "shared")
    for _ in range(2):
        sketch.returns(add_batch_norm(sketch, sketch("conv1d", x, w, None)))
    third = sketch("conv1d", x, w, None)
    assert sketch.returns(third).clean(FoldBatchNorm()) == ["tanh", "conv1d", "conv1d", "conv1d"]
    assert sketch.graph.outputs[2].producer.inputs[1] is w


def read_skip_reasons(sketch, y, *more):
    """Return the reasons why the pass does not change a graph."""
    before = sketch.returns(y, *more).kinds
    assert sketch.clean(FoldBatchNorm()) == before
    misses = MatchStats()
    apply_rules(sketch.graph, [fold_batch_norm], sketch.build.operators, misses)
    return misses.closest["fold-batch-norm"][0].reason


CONV = ("conv2d", (2, 4, 9, 8), (6, 4, 3, 2), {})


def test_fold_batch_norm_layer_read_elsewhere_stays(sketch):
    """A layer with other users stays."""
    y = add_layer(sketch, CONV)
    assert "has other readers" in read_skip_reasons(sketch, add_batch_norm(sketch, y), sketch("abs", y))


def test_fold_batch_norm_returned_layer_stays(sketch):
    """A layer that is an output stays."""
    y = add_layer(sketch, CONV)
    assert "has other readers" in read_skip_reasons(sketch, add_batch_norm(sketch, y), y)


def test_fold_batch_norm_training_stays(sketch):
    """Batch norm in training mode stays."""
    assert "its own input" in read_skip_reasons(sketch, add_batch_norm(sketch, add_layer(sketch, CONV), training=True))


def test_fold_batch_norm_missing_statistics_stay(sketch):
    """Batch norm without statistics stays."""
    assert "its own input" in read_skip_reasons(sketch, sketch("batch_norm", add_layer(sketch, CONV), training=True))


def test_fold_batch_norm_computed_weight_stays(sketch):
    """A computed weight stays."""
    x, w = sketch.input(2, 4, 9, 8), sketch("neg", sketch.constant(torch.randn(6, 4, 3, 2)))
    assert "computed" in read_skip_reasons(sketch, add_batch_norm(sketch, sketch("conv2d", x, w, None)))


def test_fold_batch_norm_overwritten_statistics_stay(sketch):
    """Statistics that a call overwrites stay."""
    y = add_batch_norm(sketch, add_layer(sketch, CONV))
    sketch.graph.set_state("bn.running_mean", sketch("neg", sketch.graph.constants["bn.running_mean"]))
    assert "overwritten" in read_skip_reasons(sketch, y)


def test_fold_batch_norm_linear_on_sequences_stays(sketch):
    """Dim 1 of a linear layer on sequences is not its channels."""
    y = add_layer(sketch, ("linear", (5, 6, 4), (6, 4), {}))
    assert "is not the channel dim" in read_skip_reasons(sketch, add_batch_norm(sketch, y))


def test_fold_batch_norm_unbatched_convolution_stays(sketch):
    """Dim 1 of an unbatched convolution is not its channels."""
    y = add_layer(sketch, ("conv2d", (4, 8, 8), (6, 4, 3, 3), {}))
    assert "is not the channel dim" in read_skip_reasons(sketch, add_batch_norm(sketch, y))


def test_fold_batch_norm_before_layer_stays(sketch):
    """Batch norm before a padded layer stays."""
    y = add_batch_norm(sketch, sketch.input(2, 6, 5))
    sketch.returns(sketch("conv1d", y, sketch.constant(torch.randn(6, 6, 3)), None, padding=(1,)))
    assert "padding prevents" in read_skip_reasons(sketch, sketch("relu", y))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e38])
def test_fold_batch_norm_overflowing_statistics_stay(sketch, number):
    """Statistics that overflow stay."""
    y = add_batch_norm(sketch, add_layer(sketch, CONV))
    with torch.no_grad():
        sketch.graph.constants["bn.weight"].data[2] = number
        sketch.graph.constants["bn.running_var"].data[2] = 1e-8
    assert "overflows" in read_skip_reasons(sketch, y)


def test_fold_batch_norm_types_equal_inferred(sketch):
    """The types of folded layers equal the inferred ones."""
    for case in LAYERS:
        sketch.returns(add_batch_norm(sketch, add_layer(sketch, case)))
    FoldBatchNorm()(sketch.graph, sketch.build.operators)
    for node in sketch.graph.nodes:
        assert infer_types(node.op, node.inputs, node.attrs) == tuple(v.type for v in node.outputs)


@pytest.mark.parametrize("part", [1, 7, 10**6])
def test_scale_in_parts_any_part_size_equal(monkeypatch, part):
    """The result is the same for any number of parts."""
    monkeypatch.setattr(norm_folding, "ELEMENTS_PER_PART", part)
    weight, factors = torch.randn(6, 4, 3, 3), torch.randn(6, 1, 1, 1, dtype=torch.float64)
    assert torch.equal(norm_folding.scale_in_parts(weight, factors), (weight.double() * factors).float())


def test_fold_batch_norm_layer_called_twice_shares_weight(sketch, monkeypatch):
    """A layer called twice gets one folded weight, merged without computing it."""
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


def test_fold_batch_norm_other_shifts_share_weight(sketch):
    """Equal scales give one folded weight, whatever the shift."""
    x, w = sketch.input(1, 6, 5), sketch.constant(torch.randn(6, 6, 3), "shared")
    gamma, var = (sketch.constant(torch.rand(6) + 0.5, f"bn.{name}") for name in ("weight", "var"))
    for i in range(2):
        bias, beta, mean = (sketch.constant(torch.randn(6), f"{name}{i}") for name in ("bias", "beta", "mean"))
        sketch.returns(sketch("batch_norm", sketch("conv1d", x, w, bias), gamma, beta, mean, var))
    assert sketch.clean(FoldBatchNorm(), MergeEqualConstants()) == ["conv1d", "conv1d"]
    one, other = (value.producer for value in sketch.graph.outputs)
    assert one.inputs[1] is other.inputs[1]
