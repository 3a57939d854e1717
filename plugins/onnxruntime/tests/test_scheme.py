"""The scheme of ONNX Runtime: each layer planned in INT8 runs in INT8, and computes the result of the graph."""

from collections import Counter

import onnx
import onnxruntime as ort
import pytest
import torch
from clika_ref_onnxruntime.scheme import ARM, X86, X86_WITHOUT_VNNI, scheme_of
from layer_chains import Chain
from seeded_tensors import randn
from torch import nn
from torch.nn import functional as F

from clika_ref import clika_compile
from clika_ref.compiled.lowering import lower
from clika_ref.core.execution import interpret
from clika_ref.core.registry import load_registry
from clika_ref.quantization.calibration.calibrator import Calibration
from clika_ref.quantization.qdq.insertion import quantize_graph
from clika_ref.quantization.qdq.placement import choose_placement
from clika_ref.quantization.qdq.planning import Planner

REGISTRY = load_registry()
TARGET = REGISTRY.targets["onnxruntime"]


def quantize_and_run(module, x, folder, scheme=TARGET.scheme):
    """Return the quantized graph, its placement, the runtime's graph of the file, and its result on ``x``."""
    graph = clika_compile(module.eval(), tracing_inputs=[x]).graph.clone()
    lower(graph, REGISTRY, TARGET)
    calibration = Calibration(graph)
    calibration.add([x])
    values = calibration.table.values
    placement = choose_placement(graph, scheme, lambda v: v.name in values and not values[v.name].is_unbounded, {})
    plan = Planner(calibration.table, scheme).plan(placement, "min-max")
    quantize_graph(graph, plan, REGISTRY.operators)
    graph.drop_unused_constants()
    artifact = TARGET.compile(graph, folder / "model.onnx")
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.log_severity_level = 3
    session = ort.InferenceSession(str(artifact.path), options, providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    nodes = onnx.load(folder / "optimized.onnx").graph.node
    return graph, placement, Counter(node.op_type for node in nodes), torch.from_numpy(result)


def make_image(*shape):
    return randn(*(shape or (2, 8, 6, 6)))


@pytest.fixture(autouse=True)
def _set_seed():
    torch.manual_seed(0)


TWICE = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))

LAST = nn.Conv2d(8, 8, 1)

TABLE, STACK = make_image(8, 4), make_image(2, 8, 4)

CASES = {
    "conv1d": (Chain(nn.Conv1d(8, 8, 3)), make_image(2, 8, 6), {"QLinearConv": 1}),
    "conv2d": (Chain(nn.Conv2d(8, 8, 3, groups=8)), make_image(), {"QLinearConv": 1}),
    "conv3d": (Chain(nn.Conv3d(4, 4, 2)), make_image(1, 4, 3, 4, 4), {"QLinearConv": 1}),
    "relu": (Chain(nn.Conv2d(8, 8, 3), lambda y, _: F.relu(y)), make_image(), {"QLinearConv": 1}),
    "relu6": (Chain(nn.Conv2d(8, 8, 3), lambda y, _: F.relu6(y * 1.0)), make_image(), {"QLinearConv": 1}),
    "hardtanh": (Chain(nn.Conv2d(8, 8, 3), lambda y, _: F.hardtanh(y, 0, 6)), make_image(), {"QLinearConv": 1}),
    "hardtanh-signed": (Chain(nn.Conv2d(8, 8, 3), lambda y, _: F.hardtanh(y)), make_image(), {"QLinearConv": 1}),
    "linear": (Chain(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))), make_image(3, 8), {"QGemm": 2}),
    "linear-3d": (Chain(nn.Linear(8, 8)), make_image(2, 3, 8), {"QGemm": 1}),
    "linear-no-bias": (Chain(nn.Linear(8, 8, bias=False)), make_image(2, 3, 8), {"MatMulIntegerToFloat": 1}),
    "matmul": (Chain(nn.Linear(8, 8), lambda y, _: y @ TABLE), make_image(2, 3, 8), {"MatMulIntegerToFloat": 1}),
    "stack": (Chain(nn.Linear(8, 8), lambda y, _: y @ STACK), make_image(2, 3, 8), {"MatMulIntegerToFloat": 1}),
    "stack-of-one": (
        Chain(nn.Linear(8, 8), lambda y, _: y @ STACK[:1]),
        make_image(2, 3, 8),
        {"MatMulIntegerToFloat": 1},
    ),
    "add": (Chain(TWICE, lambda y, x: F.relu(y + F.relu(x) - x)), make_image(), {"QLinearConv": 2}),
    "residual": (
        Chain(nn.Conv2d(8, 8, 1), lambda y, _: LAST(F.relu(TWICE(y) + y))),
        make_image(),
        {"QLinearConv": 4, "QLinearAdd": 1},
    ),
    "gate": (
        Chain(nn.Conv2d(8, 8, 1), lambda y, _: TWICE(y * torch.sigmoid(LAST(y)))),
        make_image(),
        {"QLinearConv": 4, "QLinearSigmoid": 1, "QLinearMul": 1},
    ),
    "leaky": (Chain(nn.Conv2d(8, 8, 1), lambda y, _: TWICE(F.leaky_relu(y))), make_image(), {"QLinearLeakyRelu": 1}),
    "join": (
        Chain(nn.Conv2d(8, 4, 1), lambda y, x: TWICE(torch.cat([y, F.relu(y)], 1))),
        make_image(),
        {"QLinearConv": 3},
    ),
    "pools": (
        Chain(TWICE, lambda y, _: LAST(F.adaptive_avg_pool2d(F.max_pool2d(y, 2), 1))),
        make_image(),
        {"QLinearGlobalAveragePool": 1, "NhwcMaxPool": 1},
    ),
    "moved": (
        Chain(TWICE, lambda y, _: F.linear(y.flatten(2).permute(0, 2, 1)[:, 1:], torch.ones(3, 8), torch.ones(3))),
        make_image(),
        {"QLinearConv": 2},
    ),
}

FLOAT = {"Conv", "FusedConv", "Gemm", "FusedGemm", "MatMul", "FusedMatMul"}


@pytest.mark.parametrize("name", CASES)
def test_scheme_planned_int8_layers_run_in_int8(name, tmp_path):
    """Layers planned in INT8 run in INT8 and compute the quantized graph."""
    module, x, expected = CASES[name]
    graph, _, kinds, result = quantize_and_run(module, x, tmp_path)
    assert {kind: kinds[kind] for kind in expected} == expected
    assert not FLOAT & kinds.keys()
    (simulated,), _ = interpret(graph, [x])
    with torch.no_grad():
        float_result = module(x)
    step = float((simulated - result).abs().max()) / float(float_result.abs().max())
    assert step < 0.02
    assert float((result - float_result).square().sum() / float_result.square().sum()) < 1e-2


def test_scheme_without_vnni_uses_7_bit_weights(tmp_path):
    """Weights have 7 bits where pairs of MACs would overflow."""
    graph, _, _, _ = quantize_and_run(Chain(nn.Conv2d(8, 8, 3)), make_image(), tmp_path, X86_WITHOUT_VNNI)
    (weight,) = [v.data for name, v in graph.constants.items() if name == "layer.weight_integers"]
    assert int(weight.abs().max()) == 63


def test_scheme_of_cpu_flags_selects_scheme():
    """The processor determines the scheme."""
    assert scheme_of(frozenset({"avx2", "avx512_vnni"}), is_arm=False) is X86
    assert scheme_of(frozenset({"avx2", "avx512f"}), is_arm=False) is X86_WITHOUT_VNNI
    assert scheme_of(frozenset(), is_arm=True) is ARM
