"""Activations, norms, losses, distances and random tensors with dynamic dims, of size 0 as well."""

from __future__ import annotations

import math

import pytest
import torch
from clika_ref_aten import (
    activation,
    adaptive_pooling,
    attention,
    classification_loss,
    cumulative,
    distance,
    dropout,
    gating,
    loss,
    randomness,
    reduction,
    scattering,
    softmax,
    sorting,
    variance,
)
from clika_ref_aten import layer_normalization as layers
from clika_ref_aten import normalization as norms
from one_operator import run_onnx

from clika_ref.core.execution import interpret
from clika_ref.core.inference import infer_types
from clika_ref.core.ir import Graph, Node
from clika_ref.core.symbols import Symbol, SymbolSource, make_symbol, resolve
from clika_ref.core.types import TensorType
from clika_ref.onnx_export.emission import emit

N, M, K = make_symbol("n"), make_symbol("m"), make_symbol("k")
SIZES = ({"n": 3, "m": 4, "k": 5}, {"n": 1, "m": 1, "k": 2}, {"n": 6, "m": 2, "k": 7})
CLASSES = TensorType(torch.int64, (N, M))
CONTINUOUS = {"label_smoothing": 0.1}
STEP = {"momentum": 0.1}
PLACE, PLACES = TensorType(torch.int64, ()), TensorType(torch.int64, (K,))

CASES = [
    (activation.prelu, [(N, M, K), (M,)], {}),
    (gating.glu, [(N, 4)], {"dim": 1}),
    (softmax.softmax, [(N, M)], {"dim": 1}),
    (norms.batch_norm, [(N, 4, M, K), (4,), (4,), (4,), (4,)], {}),
    (norms.batch_norm, [(N, M, K), None, None, (M,), (M,)], {}),
    (norms.batch_norm, [(N, M, K), None, None, None, None], {"training": True}),
    (norms.instance_norm, [(N, M, 5), None, None, None, None], {}),
    (norms.group_norm, [(N, 4, M, K), (4,), (4,)], {"num_groups": 2}),
    (norms.running_mean_update, [(N, 4, M, K), (4,)], STEP),
    (norms.running_var_update, [(N, 4, M, K), (4,)], STEP),
    (norms.running_var_update, [(N, 4, 2, K), (4,)], {**STEP, "per_instance": True}),
    (layers.layer_norm, [(N, M, K), None, None], {"normalized_shape": (M, K)}),
    (layers.layer_norm, [(N, M, 8), (8,), (8,)], {"normalized_shape": (8,)}),
    (layers.native_layer_norm, [(N, M, 8), (8,), None], {"normalized_shape": (8,), "eps": 1e-5}),
    (layers.rms_norm, [(N, M, K), (K,)], {"normalized_shape": (K,)}),
    (loss.mse_loss, [(N, M), (M,)], {}),
    (loss.smooth_l1_loss, [(N, M), (N, M)], {"reduction": 0}),
    (classification_loss.nll_loss, [(N, 4, M), CLASSES, (4,)], {}),
    (classification_loss.cross_entropy_loss, [(N, 4, M), CLASSES, (4,)], CONTINUOUS),
    (classification_loss.cross_entropy_loss, [(N, K), (N, K), None], CONTINUOUS),
    (classification_loss.multi_margin_loss, [(N, K), TensorType(torch.int64, (N,)), None], {}),
    (distance.cosine_similarity, [(N, 1, K), (1, M, K)], {"dim": -1}),
    (distance.pairwise_distance, [(N, M), (M,)], {}),
    (distance.cdist, [(N, M, 3), (K, 3)], {}),
    (distance.cdist, [(N, M, 3), (N, K, 3)], {"compute_mode": 1}),
    (dropout.dropout, [(N, M, K)], {"p": 0.5, "train": True}),
    (dropout.feature_dropout, [(N, M, K)], {"p": 0.5, "train": True}),
    (dropout.native_dropout, [(N, M)], {"p": 0.5, "train": True}),
    (randomness.rand, [(N, M)], {"size": (M, 3, 2 * N)}),
    (randomness.randint, [(N, M)], {"low": -2, "high": N, "size": (M,)}),
    (randomness.randperm, [(N, M)], {"n": N * M}),
]


def build_graph(op, operands, attrs, low=0):
    """Return a graph of one call; each symbol is at least ``low``, and read from the first dim that equals it."""
    graph = Graph(op.name)
    values = []
    for operand in operands:
        if operand is None:
            values.append(None)
            continue
        kind = operand if isinstance(operand, TensorType) else TensorType(torch.float32, operand)
        values.append(graph.add_input(kind, f"x{len(values)}"))
        for dim, side in enumerate(kind.shape):
            if side in (N, M, K):
                graph.symbols.setdefault(side.name, Symbol(side.name, low, None, SymbolSource(values[-1].name, dim)))
    call = op.call(*(values if op.operands else ()), **attrs)
    for value in graph.insert(Node(op, call.operands, call.attrs), infer_types(op, call.operands, call.attrs)).outputs:
        graph.add_output(value)
    return graph


def make_tensor(kind, sizes):
    shape = resolve(kind.shape, sizes)
    return torch.rand(shape) if kind.dtype.is_floating_point else torch.randint(0, 2, shape)


@pytest.mark.parametrize(("op", "operands", "attrs"), CASES, ids=lambda v: getattr(v, "name", None))
def test_norms_and_losses_one_artifact_serves_all_sizes(op, operands, attrs):
    """One artifact computes eager's results at all sizes."""
    graph = build_graph(op, operands, attrs)
    for sizes in SIZES:
        inputs = [make_tensor(value.type, sizes) for value in graph.inputs]
        expected, _ = interpret(graph, inputs)
        found = run_onnx(graph, inputs)
        shapes = [(resolve(value.type.shape, sizes), value.type.dtype) for value in graph.outputs]
        assert [(tuple(t.shape), t.dtype) for t in expected] == shapes
        assert [(tuple(t.shape), t.dtype) for t in found] == shapes
        if not op.random:  # the tolerances of assert_close for float32: rounding is judged where shapes are fixed
            torch.testing.assert_close(found, expected, equal_nan=True)


def test_group_norm_empty_batch_runs():
    """group_norm accepts an empty batch."""
    graph = build_graph(norms.group_norm, [(N, 4, M, K), (4,), (4,)], {"num_groups": 2})
    inputs = [make_tensor(value.type, {"n": 0, "m": 2, "k": 3}) for value in graph.inputs]
    assert run_onnx(graph, inputs)[0].shape == (0, 4, 2, 3)


@pytest.mark.parametrize(
    ("op", "operands", "attrs"),
    [
        (loss.mse_loss, [(N, M), (N, M)], {}),
        (layers.layer_norm, [(N, M, K), None, None], {"normalized_shape": (M, K)}),
        (layers.native_layer_norm, [(N, M), None, None], {"normalized_shape": (M,), "eps": 1e-5}),
        (distance.cosine_similarity, [(N, M), (N, M)], {"dim": -1}),
        (distance.pairwise_distance, [(N, M), (N, M)], {"p": 1.0}),
        (distance.pairwise_distance, [(N, M), (N, M)], {"p": 2.0, "keepdim": True}),
        (distance.cdist, [(N, M), (K, M)], {"p": math.inf}),
        (distance.cdist, [(N, M), (K, M)], {"compute_mode": 1}),
        (attention.scaled_dot_product_attention, [(2, N, 3), (2, M, 3), (2, M, K), (N, M)], {}),
        (attention.scaled_dot_product_attention, [(2, K, M), (2, N, M), (2, N, 3), (2, K, N)], {"scale": 0.3}),
        (reduction.mean, [(M, N, K)], {"dim": (-2, 0), "keepdim": True}),
        (reduction.mean, [(M, K)], {"dtype": torch.float64}),
        (variance.var_mean, [(M, K)], {"dim": (0,), "correction": 0}),
        (variance.std, [(N, M)], {"correction": 0, "keepdim": True}),
        (norms.running_mean_update, [(N, 4, M), (4,)], STEP),
        (norms.running_mean_update, [(N, 4, M), (4,)], {**STEP, "per_instance": True}),
        (norms.running_var_update, [(N, 4, M), (4,)], {**STEP, "per_instance": True}),
        (sorting.flat_median, [(N, M)], {}),
        (sorting.flat_median, [TensorType(torch.int64, (N, M))], {}),
        (sorting.argmax, [(M, 3)], {"dim": -1}),
        (sorting.min_, [(M, 3)], {"dim": -1}),
        (cumulative.diff, [(M, K), (M, K)], {"n": 2, "dim": 0}),
        (adaptive_pooling.adaptive_max_pool1d, [(M, 2, K)], {"output_size": (1,)}),
        (adaptive_pooling.adaptive_max_pool2d, [(M, 2, 5, K)], {"output_size": (3, 2)}),
        (scattering.index_put, [(M, 4, 2), (), None, PLACE, PLACES], {"accumulate": True}),
        (scattering.index_put, [(4, M, 2), (K, M), PLACES, None, PLACE], {}),
    ],
    ids=lambda v: getattr(v, "name", None),
)
@pytest.mark.parametrize("sizes", [{"n": 2, "m": 0, "k": 3}, {"n": 0, "m": 2, "k": 3}])
@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")
def test_norms_and_losses_one_artifact_serves_empty_dims(op, operands, attrs, sizes):
    """One artifact computes eager's results where dynamic dims are 0."""
    graph = build_graph(op, operands, attrs)
    inputs = [make_tensor(value.type, sizes) for value in graph.inputs]
    expected, _ = interpret(graph, inputs)
    torch.testing.assert_close(run_onnx(graph, inputs), expected, equal_nan=True)  # as above, where there are elements


def test_cdist_uses_matmul_only_for_nonempty_vectors():
    """cdist uses MatMul only if its vectors cannot be empty."""
    operands, attrs = [(N, M), (K, M)], {"compute_mode": 1}
    possible, impossible = (emit(build_graph(distance.cdist, operands, attrs, low)).graph for low in (0, 1))
    assert "MatMul" in {node.op_type for node in impossible}
    assert "MatMul" not in {node.op_type for node in possible}


def test_mean_nonempty_dim_lowers_to_single_reduce_mean():
    """A mean over a dim that cannot be empty is a single ReduceMean."""
    possible, impossible = (emit(build_graph(reduction.mean, [(N, M)], {"dim": (1,)}, low)).graph for low in (0, 1))
    assert [node.op_type for node in impossible] == ["ReduceMean"]
    assert [node.op_type for node in possible][-1] == "Div"
