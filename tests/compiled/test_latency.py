"""Layers that are slower in INT8 stay float if latency is requested; the tests use fixed times."""

import functools
from dataclasses import dataclass, field

import pytest
import torch
from clika_ref_onnxruntime.target import OnnxRuntime
from seeded_tensors import randn
from torch import nn

from clika_ref import (
    ClikaCompileOptions,
    DeploymentSettings_ONNXRuntime_ONNX,
    ModelError,
    QuantizationSettings,
    TargetError,
    clika_compile,
)
from clika_ref.compiled import latency as timing
from clika_ref.compiled.latency import LayerTimer, measure_ratio_to_float
from clika_ref.core.artifacts import Artifact
from clika_ref.core.registry import load_registry
from clika_ref.core.targets import Target
from clika_ref.quantization.qdq.insertion import Plan

REGISTRY = load_registry()
SCHEME = OnnxRuntime().scheme


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = torch.relu(self.three(torch.relu(self.two(torch.relu(self.one(x))))))
        return self.head(x.mean((2, 3)))


DATA = [randn(2, 3, 12, 12, seed=i) for i in range(3)]


def is_quantized_layer(layer):
    return any(getattr(v.producer, "op_type", "") == "dequantize" for v in layer.inputs[:2])


@dataclass(frozen=True)
class Slow(Target):
    """Runs nothing, and returns a fixed time for each graph, by the op types of its quantized layers."""

    costs: dict[str, float]
    name: str = "onnxruntime"
    seen: list[str] = field(default_factory=list)
    kinds: list[list[str]] = field(default_factory=list)
    scheme = SCHEME

    def unsupported_reason(self, node):
        return None

    def compile(self, graph, path, **_):
        OnnxRuntime().compile(graph.clone(), path)  # what is timed must be a file that the runtime takes
        OnnxRuntime().load(Artifact(path, "", (), ()))
        self.kinds.append([n.op_type for n in graph.nodes if n.op_type not in ("quantize", "dequantize")])
        layers = [n.op_type for n in graph.nodes if n.op.trait.weight is not None and is_quantized_layer(n)]
        self.seen.extend(layers)
        return Artifact(path, self.name, (), (), {"seconds": 1.0 + sum(self.costs[kind] for kind in layers)})

    def load(self, artifact):
        return functools.partial(lambda seconds, inputs: seconds, artifact.facts["seconds"])


@pytest.fixture(autouse=True)
def _replace_timer(monkeypatch):
    monkeypatch.setattr(timing, "_time_calls", lambda runner, given, calls: runner(given))


def trace_graph():
    return clika_compile(Net().eval(), tracing_inputs=DATA[:1]).graph.clone()


def test_find_slow_layers_equal_layers_timed_once():
    """A layer that is slower in INT8 is named, and equal layers are timed once."""
    target = Slow({"conv2d": -0.5, "linear": 0.5})
    found = LayerTimer(target, SCHEME, REGISTRY.operators).find_slow_layers(trace_graph(), DATA[:1])
    assert {node.origin.scope: reason for node, reason in found.items()} == {
        "head": "onnxruntime runs it in 1.50x the time of float when quantized"
    }
    assert sorted(target.seen) == ["conv2d"] * 3 + ["linear"], "of the convolutions, no two read as large an input"


def test_find_slow_layers_timed_with_fused_nodes():
    """A layer is timed with the nodes that the runtime fuses into it."""
    target = Slow({"conv2d": 0.0, "linear": 0.0})
    LayerTimer(target, SCHEME, REGISTRY.operators).find_slow_layers(trace_graph(), DATA[:1])
    assert sorted(target.kinds) == [["conv2d", "relu"]] * 6 + [["linear"]] * 2, "each in float and in INT8"


@pytest.mark.parametrize(("min_val", "is_along"), [(0.0, True), (-1.0, False)])
def test_find_slow_layers_hardtanh_timed_only_if_fused(min_val, is_along):
    """A layer is timed with a hardtanh only if the runtime fuses it."""
    target, model = Slow({"conv2d": 0.0}), nn.Sequential(nn.Conv2d(3, 8, 3), nn.Hardtanh(min_val, 6.0)).eval()
    bounded = clika_compile(model, tracing_inputs=DATA[:1]).graph.clone()
    LayerTimer(target, SCHEME, REGISTRY.operators).find_slow_layers(bounded, DATA[:1])
    assert target.kinds == [["conv2d", "hardtanh"] if is_along else ["conv2d"]] * 2


def test_find_slow_layers_small_slowdown_ignored():
    """A small slowdown does not keep a layer in float."""
    assert not LayerTimer(Slow({"conv2d": 0.04, "linear": 0.04}), SCHEME, REGISTRY.operators).find_slow_layers(
        trace_graph(), DATA[:1]
    )


def compile_with_costs(monkeypatch, costs, *, only_weights=False, **options):
    target = Slow(costs)
    for module in ("graph_quantization", "latency_choice"):
        monkeypatch.setattr(f"clika_ref.compress.{module}.LayerTimer", lambda _, *rest: LayerTimer(target, *rest))
    monkeypatch.setattr(
        "clika_ref.compress.latency_choice.measure_ratio_to_float",
        lambda g, p, _, *rest: measure_ratio_to_float(g, p, target, *rest),
    )
    module = clika_compile(
        Net().eval(),
        calibration_inputs=DATA,
        quantization_settings=QuantizationSettings(
            automatic_skip_quantization=False, prefer_weights_only_quantization=only_weights
        ),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
        clika_compile_options=ClikaCompileOptions(**options),
    )
    plan = module.clika_state.quantized.plan if module.clika_state.quantized else Plan(SCHEME)
    return sorted([*plan.weights, *plan.packed_weights]), plan.floats


def test_optimize_for_latency_keeps_slow_layer_float(monkeypatch):
    """A slower layer stays float only with `optimize_for="latency"`."""
    costs = {"conv2d": -0.2, "linear": 0.5}
    assert len(compile_with_costs(monkeypatch, costs)[0]) == 4
    weights, floats = compile_with_costs(monkeypatch, costs, optimize_for="latency")
    assert len(weights) == 3
    assert floats == {"linear": "onnxruntime runs it in 1.50x the time of float when quantized"}


@pytest.mark.parametrize(("cost", "is_slow"), [(0.5, True), (-0.2, False)])
def test_optimize_for_latency_slow_weight_only_layer_float(monkeypatch, cost, is_slow):
    """A weight-only layer stays float if it is slower."""
    weights, floats = compile_with_costs(monkeypatch, {"matmul": cost}, only_weights=True, optimize_for="latency")
    assert weights == ([] if is_slow else ["linear"])
    said = "onnxruntime runs it in 1.50x the time of float when with 8-bit weights"
    assert floats.get("linear", "") == (said if is_slow else "")


def test_optimize_for_latency_slow_model_stays_float(monkeypatch):
    """A model that is slower as a whole stays float."""
    weights, floats = compile_with_costs(monkeypatch, {"conv2d": 0.03, "linear": 0.03}, optimize_for="latency")
    assert not weights
    assert set(floats.values()) == {"the quantized model takes 1.12x the time of the float model"}
    assert len(floats) == 4


def test_optimize_for_latency_unsupported_node_raises_early():
    """Nodes that the target cannot run raise an error before data is read."""

    def yield_recorded():
        read.append(1)
        yield DATA[0]

    read = []
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU()).to(torch.bfloat16).eval()
    module = clika_compile(net, tracing_inputs=[torch.randn(4, 64, dtype=torch.bfloat16)], optimize_for="latency")
    few = QuantizationSettings(prefer_weights_only_quantization=True)
    with pytest.raises(
        TargetError, match=r"cannot run 2 nodes .*\n  linear in 0 .* does not support on CPUs. Compile the model in"
    ):
        module.clika_initialize_algorithms(
            few, calibration_inputs=yield_recorded(), deployment_settings=DeploymentSettings_ONNXRuntime_ONNX()
        )
    assert not read


def test_optimize_for_invalid_value_rejected():
    """An invalid `optimize_for` raises an error with the accepted values."""
    with pytest.raises(ModelError, match=r"option 'optimize_for' is 'speed'. Choose one of 'size', 'latency'"):
        ClikaCompileOptions(optimize_for="speed")
