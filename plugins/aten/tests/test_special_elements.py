"""Activations, norms and losses at elements and sizes that samples do not draw."""

from __future__ import annotations

import math

import pytest
import torch
from clika_ref_aten import (
    activation,
    attention,
    classification_loss,
    counting,
    distance,
    gating,
    grids,
    indexing,
    layer_normalization,
    linear,
    logic,
    loss,
    padding,
    powers,
    randomness,
    recurrent,
    resampling,
    vector_norms,
)
from clika_ref_aten import normalization as norms
from one_operator import Case, assert_runtime_equals_eager, build_case_graph, find_mismatch, run_onnx

from clika_ref.core.errors import PassError, TargetError
from clika_ref.core.inference import infer_types
from clika_ref.core.ir import Graph, Node
from clika_ref.core.symbols import Symbol, SymbolSource, make_symbol
from clika_ref.core.types import TensorType
from clika_ref.onnx_export.emission import emit

SPECIAL = [-math.inf, math.inf, math.nan, 0.0, -0.0, 1.0, -1.0, 60.0, -60.0, 200.0, -200.0, 6e4, -6e4]
ELEMENTWISE = [
    *(op for op in vars(activation).values() if getattr(op, "sampler", None) and op.name not in ("threshold", "prelu")),
    gating.silu,
    gating.mish,
    gating.softplus,
    gating.log_sigmoid,
]
NAN = math.nan


@pytest.mark.parametrize("op", ELEMENTWISE, ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", activation.FLOATS, ids=str)
def test_activation_keeps_nan_and_infinity(op, dtype):
    """Activations keep NaN and infinity and do not overflow."""
    assert_runtime_equals_eager(op, torch.tensor(SPECIAL, dtype=dtype))


HALF, WHOLE, POSITIVE = torch.full((3, 4), 0.25).half(), torch.full((3, 4), 0.75), torch.tensor(2.0)


@pytest.mark.parametrize(
    ("op", "operands", "attrs"),
    [
        (classification_loss.cross_entropy_loss, (HALF, WHOLE, None), {"reduction": 0}),
        (classification_loss.cross_entropy_loss, (HALF, WHOLE, WHOLE[0]), {"reduction": 1, "label_smoothing": 0.3}),
        (classification_loss.cross_entropy_loss, (WHOLE, HALF, WHOLE[0].double()), {"reduction": 2}),
        (loss.huber_loss, (HALF, WHOLE), {"reduction": 0}),
        (loss.binary_cross_entropy, (HALF, HALF, WHOLE), {"reduction": 2}),
        (loss.soft_margin_loss, (HALF, WHOLE), {"reduction": 1}),
        (linear.addr, (POSITIVE, HALF[:, 0], HALF[0]), {}),
        (vector_norms.weight_norm, (HALF[..., None], WHOLE[:1, :, None]), {"dim": 1}),
        (vector_norms.weight_norm, (HALF, POSITIVE), {"dim": -1}),
    ],
)
def test_mixed_dtype_operands_equal_eager(op, operands, attrs):
    """Operands of two dtypes give eager's dtype."""
    assert_runtime_equals_eager(op, *operands, **attrs)


@pytest.mark.parametrize("training", [False, True])
def test_batch_norm_float16_far_mean_equals_eager(training):
    """FP16 batch norm of a far mean uses its float32 statistics."""
    mean, var = torch.full((4,), 100.0), torch.rand(4) + 0.5
    x = (torch.randn(3, 4, 5) + 100).half()
    assert_runtime_equals_eager(norms.batch_norm, x, torch.rand(4), torch.rand(4), mean, var, training=training)


def test_norms_empty_batch_and_size_1_equal_eager():
    """Norms of empty batches and of dims of size 1 equal eager's."""
    assert_runtime_equals_eager(norms.group_norm, torch.randn(0, 4, 3), None, None, num_groups=2)
    assert_runtime_equals_eager(norms.batch_norm, torch.randn(0, 4, 3), None, None, torch.rand(4), torch.rand(4))
    assert_runtime_equals_eager(layer_normalization.layer_norm, torch.randn(0, 4), None, None, normalized_shape=(4,))
    assert_runtime_equals_eager(
        layer_normalization.layer_norm, torch.randn(3, 1), torch.rand(1), None, normalized_shape=(1,)
    )


def test_norm_references_do_not_write_statistics():
    """The references do not write running statistics."""
    mean, var = torch.zeros(4), torch.ones(4)
    norms.batch_norm(torch.randn(3, 4, 5), None, None, mean, var, training=True)
    norms.instance_norm(torch.randn(3, 4, 5), None, None, mean, var)
    norms.running_mean_update(torch.randn(3, 4, 5), mean, momentum=0.5)
    norms.running_var_update(torch.randn(3, 4, 5), var, momentum=0.5)
    assert torch.equal(mean, torch.zeros(4))
    assert torch.equal(var, torch.ones(4))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_cross_entropy_ignored_targets_equal_eager(reduction, label_smoothing):
    """Ignored targets cost zero, and their mean over none is NaN."""
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    x = torch.tensor([[math.inf, 1.0, 2.0], [NAN, 1.0, 2.0], [1000.0, -1000.0, 0.0]])
    assert_runtime_equals_eager(
        classification_loss.cross_entropy_loss, x, torch.tensor([-100, -100, 1]), None, **options
    )
    assert_runtime_equals_eager(classification_loss.cross_entropy_loss, x, torch.full((3,), -100), None, **options)


def test_cosine_similarity_zero_and_huge_equal_eager():
    """The cosine similarity of zero and huge vectors equals eager's."""
    assert_runtime_equals_eager(distance.cosine_similarity, torch.zeros(2, 3), torch.randn(2, 3))
    assert_runtime_equals_eager(distance.cosine_similarity, torch.randn(2, 3) * 1e15, torch.randn(2, 3) * 1e15)


def build_graph_of_unknown_length(op, *sides, **attrs):
    """Return a graph of one call on a tensor with ``n`` as its first dims."""
    graph = Graph(op.name)
    graph.symbols["n"] = Symbol("n", 1, None, SymbolSource("x", 0))
    x = graph.add_input(TensorType(torch.float32, sides), "x")
    call = op.call(x, **attrs)
    graph.add_output(
        graph.insert(Node(op, call.operands, call.attrs), infer_types(op, call.operands, call.attrs)).output
    )
    return graph


def test_emit_pdist_and_multinomial_of_dynamic_size_raise():
    """Calls that ONNX cannot do at dynamic sizes raise with advice."""
    n = make_symbol("n")
    with pytest.raises(TargetError, match=r"pdist with a dynamic number of rows \(n\).*Use torch.cdist"):
        emit(build_graph_of_unknown_length(distance.pdist, n, 3))
    drawing = build_graph_of_unknown_length(randomness.multinomial, n, 5, num_samples=n, replacement=True)
    with pytest.raises(TargetError, match="fixed number of samples, not n; draw without replacement"):
        emit(drawing)


def build_graph_with_dims(op, *shapes, **attrs):
    """Return a graph of one call on tensors with dims ``n``, read from the last tensor that has one."""
    graph = Graph(op.name)
    values = [graph.add_input(TensorType(torch.float32, shape), f"x{i}") for i, shape in enumerate(shapes)]
    for value in values:
        if make_symbol("n") in value.type.shape:
            graph.symbols["n"] = Symbol(
                "n", 1, None, SymbolSource(value.name, value.type.shape.index(make_symbol("n")))
            )
    call = op.call(*values, **attrs)
    node = graph.insert(Node(op, call.operands, call.attrs), infer_types(op, call.operands, call.attrs))
    graph.add_output(node.outputs[0])
    return graph


def test_emit_gru_dynamic_hidden_size_raises():
    """A number that ONNX needs at compilation is named if it is dynamic."""
    n = make_symbol("n")
    shapes = [(5, 2, 3), (1, 2, n), (3 * n, 3), (3 * n, n)]
    options = {"has_biases": False, "num_layers": 1, "bidirectional": False, "batch_first": False}
    with pytest.raises(TargetError, match=r"ONNX's GRU needs a constant for hidden_size, but n .*static"):
        emit(build_graph_with_dims(recurrent.gru, *shapes, **options))


def test_emit_upsample_fixed_size_of_dynamic_input_raises():
    """A fixed size with a factor raises if the input size is dynamic."""
    options = {"output_size": (4, 7), "scales": (0.5, 1.5)}
    with pytest.raises(TargetError, match=r"from the dynamic size n to 4 by a factor of 0\.5"):
        emit(build_graph_with_dims(resampling.upsample_bicubic2d_aa, (1, 3, make_symbol("n"), 5), **options))


@pytest.mark.parametrize("offs", [[2, 1], [1, 7], [-(2**31), 3]])
def test_grouped_mm_invalid_offsets_rejected(offs):
    """Offsets that are not sorted, negative or beyond the rows are rejected, and not read as sizes of a result."""
    with pytest.raises(IndexError, match="not sorted numbers of up to 6 rows"):
        linear.grouped_mm(torch.ones(6, 3), torch.ones(2, 3, 4), torch.tensor(offs, dtype=torch.int32))


def test_emit_grouped_mm_dynamic_group_count_raises():
    """A dynamic number of groups raises."""
    graph = build_graph_with_dims(linear.grouped_mm, (6, 3), (make_symbol("n"), 3, 4), (make_symbol("n"),))
    with pytest.raises(TargetError, match=r"a number of groups known only at run time \(n\).*fix its length"):
        emit(graph)


def test_infer_types_glu_odd_dim_raises():
    """glu of an odd dim raises."""
    with pytest.raises(PassError, match=r"glu\(float32\[2, 3\], dim=1\): the size of the dim is odd"):
        infer_types(gating.glu, (TensorType(torch.float32, (2, 3)),), {"dim": 1})


@pytest.mark.parametrize("pad", [(2, -2), (-3, 1), (-1, 3)])
def test_pad_circular_too_large_raises(pad):
    """Circular padding by more than the remaining elements raises."""
    message = r"circular padding of dim 1 by \d: it needs as many elements, but \d are left"
    with pytest.raises(PassError, match=r"pad\(float32\[2, 3\].*" + message):
        infer_types(padding.pad_, (TensorType(torch.float32, (2, 3)),), {"pad": pad, "mode": "circular", "value": None})
    with pytest.raises(ValueError, match=message):
        padding.pad_(torch.rand(2, 3), pad=pad, mode="circular")


def test_linear_bias_of_other_dtype_raises():
    """A bias of another dtype raises for every memory layout."""
    x, weight, bias = torch.rand(2, 3, 4), torch.rand(5, 4), torch.rand(5, dtype=torch.float64)
    for rows in (x, x.transpose(0, 1)):
        with pytest.raises(
            ValueError, match=r"linear of torch\.float32 does not support a bias of torch\.float64. Convert it to"
        ):
            linear.linear(rows, weight, bias)


def test_weight_norm_of_empty_weight_runs():
    """weight_norm of an empty weight does not end the process."""
    assert_runtime_equals_eager(vector_norms.weight_norm, torch.zeros(0, 3), torch.zeros(0, 1))
    assert_runtime_equals_eager(vector_norms.weight_norm, torch.zeros(2, 0), torch.zeros(2, 1))


def test_weight_norm_negative_dim_equals_eager():
    """weight_norm accepts negative dims."""
    v = torch.arange(1.0, 11.0).reshape(2, 5, 1)
    assert_runtime_equals_eager(vector_norms.weight_norm, v, torch.tensor([0.5, 2.0]).reshape(2, 1, 1), dim=-3)


def test_addmm_factor_0_ignores_infinities():
    """A product with the factor 0 is left out, whatever its elements."""
    x, infinite = torch.tensor([[1.0, 2.0]]), torch.full((3, 2), math.inf)
    for beta in (0, 2.0):
        assert_runtime_equals_eager(linear.addmm, x, torch.ones(1, 3), infinite, beta=beta, alpha=0)
        assert_runtime_equals_eager(linear.addmv, x[0], infinite.T, torch.ones(3), beta=beta, alpha=0)
        assert_runtime_equals_eager(linear.addbmm, x, torch.ones(4, 1, 3), infinite.expand(4, 3, 2), beta=beta, alpha=0)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_distance_infinity_norm_nan_equals_eager(position):
    """Maximum distances keep NaN, except those of pdist, as in eager."""
    x, other = torch.ones(2, 3), torch.zeros(2, 3)
    x[0, position] = NAN
    for op in (distance.cdist, distance.pairwise_distance, distance.dist):
        assert_runtime_equals_eager(op, x, other, p=math.inf)
    assert_runtime_equals_eager(distance.pdist, x, p=math.inf)
    assert_runtime_equals_eager(distance.triplet_margin_loss, x, other, other, p=math.inf, reduction=0)


def test_distance_norm_0_keeps_nan():
    """Distances that count differences keep NaN."""
    x = torch.tensor([[NAN, 1.0], [math.inf, 0.0], [0.0, 0.0], [1e-40, 2.0]])
    assert_runtime_equals_eager(distance.cdist, x, torch.zeros(2, 2), p=0.0)
    assert_runtime_equals_eager(distance.pdist, x, p=0.0)
    assert_runtime_equals_eager(distance.pairwise_distance, x, torch.zeros(4, 2), p=0.0, eps=0.0)


def test_native_layer_norm_mean_of_infinities_equals_nan():
    """The mean that a layer norm returns for infinities is NaN."""
    x = torch.tensor([[math.inf, 1.0, 2.0], [-math.inf, math.inf, 2.0], [NAN, 1.0, 2.0], [3.0, 1.0, 2.0]])
    assert_runtime_equals_eager(layer_normalization.native_layer_norm, x, None, None, normalized_shape=(3,), eps=1e-5)
    for position in (0, 15, 31):
        long = torch.ones(1, 32)
        long[0, position] = math.inf
        _, mean, _ = layer_normalization.native_layer_norm(long, None, None, normalized_shape=(32,), eps=1e-5)
        assert mean.isnan(), position


@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_and_addmm_float64_factors_keep_digits(scale):
    """Factors of float64 MACs keep their digits."""
    query, key, value = (torch.randn(2, 3, 5, dtype=torch.float64) for _ in range(3))
    assert_runtime_equals_eager(attention.scaled_dot_product_attention, query, key, value, None, scale=scale)
    for op, shapes in ((linear.addmm, [(2, 4), (2, 3), (3, 4)]), (linear.addmv, [(2,), (2, 3), (3,)])):
        assert_runtime_equals_eager(op, *(torch.randn(s, dtype=torch.float64) for s in shapes), beta=0.1, alpha=0.7)


@pytest.mark.parametrize("p", [1, 2])
def test_margin_loss_nan_and_idle_weights_equal_eager(p):
    """Margin losses skip NaN, and the weights of classes that count nothing."""
    target = torch.tensor([1, 0])
    for x in (torch.tensor([[NAN, 1.0, 2.0], [0.5, 0.0, 0.1]]), torch.tensor([[-9.0, 1.0, -9.0], [5.0, 0.0, 0.1]])):
        assert_runtime_equals_eager(classification_loss.multi_margin_loss, x, target, torch.full((3,), math.inf), p=p)
        assert_runtime_equals_eager(classification_loss.multi_margin_loss, x, target, p=p, reduction=0)
        assert_runtime_equals_eager(
            classification_loss.multilabel_margin_loss, x, torch.tensor([[1, -1, 0], [0, 2, -1]])
        )


def test_hypot_infinite_operand_returns_infinity():
    """An infinite leg makes an infinite hypotenuse, even with NaN."""
    every = torch.tensor([*SPECIAL, 3e38, 1e-40, NAN])
    assert_runtime_equals_eager(powers.hypot, every[:, None].expand(-1, len(every)).clone(), every)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_pow_exponent_keeps_digits_for_large_base(dtype):
    """An exponent keeps digits that the dtype of a large base cannot hold."""
    x = torch.tensor(6e3, dtype=dtype)
    (found,) = run_onnx(build_case_graph(Case(powers.pow_, [x, 0.7], {})), [x])
    assert found.dtype == dtype
    assert found == (x.double() ** 0.7).to(dtype)


def test_logical_operators_use_promoted_dtype():
    """Logical operators compare with zero in the promoted dtype."""
    far = torch.tensor(2**40)
    for op in (logic.logical_and, logic.logical_or, logic.logical_xor):
        assert_runtime_equals_eager(op, torch.tensor([0, 1], dtype=torch.int32), far)
        assert_runtime_equals_eager(op, torch.tensor([0, 1]), far)


@pytest.mark.parametrize("ord", [math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_vector_norm_infinity_order_keeps_nan(ord, position):
    """Norms of infinite order keep NaN."""
    x = torch.tensor([[2.0, 1.0, -3.0], [1.0, -math.inf, 1.0]])
    x[0, position] = NAN
    assert_runtime_equals_eager(vector_norms.linalg_vector_norm, x, ord=ord, dim=(-1,))
    assert_runtime_equals_eager(vector_norms.linalg_vector_norm, x, ord=ord, keepdim=True)


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("shape", [(3, 4), (1, 5), (2, 1, 3)])
def test_grid_sampler_far_points_take_border(shape, mode, align_corners):
    """Points far beyond the border take the border, as infinite ones do."""
    far = torch.tensor([math.inf, -math.inf, 1e9, -3e7, 2.5, -1.1, 0.3])
    points = torch.cartesian_prod(*[far] * len(shape)).reshape(1, -1, *[1] * (len(shape) - 1), len(shape))
    x = torch.arange(1.0, 1 + math.prod(shape)).reshape(1, 1, *shape)
    assert_runtime_equals_eager(
        grids.grid_sampler, x, points, interpolation_mode=mode, padding_mode=1, align_corners=align_corners
    )


@pytest.mark.parametrize("bins", [1, 4, 5])
@pytest.mark.parametrize("value", [2.5, 3e7, -1e8])
def test_histc_equal_elements_counted_in_middle(value, bins):
    """Equal elements are counted in the middle bin."""
    for low in (0, 1):
        case = Case(counting.histc, [torch.full((3,), value)], {"bins": bins, "min": low, "max": low})
        assert find_mismatch(case, case.eager(), run_onnx(build_case_graph(case), case.tensors)) is None


NUMBERS = torch.tensor(3.0), torch.tensor(-2.0)
FEW = {
    "weight_norm of a vector": (vector_norms.weight_norm, [torch.tensor([3.0, -4.0]), torch.ones(2)], {"dim": 0}),
    "cosine of numbers": (distance.cosine_similarity, [*NUMBERS], {"dim": 0}),
    "distance of numbers": (distance.pairwise_distance, [*NUMBERS], {"keepdim": True}),
    "margin of a number": (classification_loss.multilabel_margin_loss, [NUMBERS[0], torch.tensor(-1)], {}),
    "truths": (linear.addr, [torch.eye(2).bool(), torch.tensor([True, False]), torch.tensor([False, True])], {}),
    "none taken": (indexing.take_along_dim, [torch.ones(3, 0), torch.ones(3, 0, dtype=torch.int64)], {"dim": 1}),
}


@pytest.mark.parametrize(("op", "operands", "attrs"), FEW.values(), ids=FEW.keys())
def test_vectors_scalars_and_bools_equal_eager(op, operands, attrs):
    """Vectors, scalars and bools are accepted as in eager."""
    call = op.call(*operands, **attrs)
    case = Case(op, list(call.operands), call.attrs)
    assert find_mismatch(case, case.eager(), run_onnx(build_case_graph(case), case.tensors)) is None
