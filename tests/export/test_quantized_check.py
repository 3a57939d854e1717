"""The loss allowed between a quantized artifact and its graph, derived from the compared samples."""

import pytest
import torch
from seeded_tensors import randn
from torch import nn

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile
from clika_ref.compiled.lowering import quantize_for_target
from clika_ref.core.errors import TargetError
from clika_ref.core.execution import interpret
from clika_ref.core.registry import load_registry
from clika_ref.export import quantized_check
from clika_ref.export.quantized_check import compare_quantized

X = randn(16, 8)
REGISTRY = load_registry()


class Noisy:
    """ONNX Runtime, with an error that is a given multiple of each sample's quantization error."""

    def __init__(self, shares, expected, found):
        self.runtime = REGISTRY.targets["onnxruntime"]
        self.result = expected + (found - expected) * torch.tensor(shares).sqrt().unsqueeze(1)

    def __getattr__(self, name):
        return getattr(self.runtime, name)

    def load(self, artifact):
        return lambda inputs: [self.result]


@pytest.fixture(scope="module")
def quantized_graph():
    torch.manual_seed(0)
    module = clika_compile(
        nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32)).eval(),
        calibration_inputs=[X],
        quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )
    graph = quantize_for_target(
        module.graph, module.clika_state.quantized.plan, REGISTRY.targets["onnxruntime"], REGISTRY
    )
    return graph, interpret(module.graph, [X])[0][0]


def compare_noisy_target(compiled, shares):
    graph, expected = compiled
    target = Noisy(shares, expected, interpret(graph, [X])[0][0])
    return compare_quantized(None, target, graph, [[X]], lambda _: [expected])


def test_compare_quantized_sampling_noise_accepted(quantized_graph):
    """Additional error within sampling noise is accepted."""
    said = compare_noisy_target(quantized_graph, [2.4, 0.3] * 8)
    assert "dB over 16 samples in onnxruntime, simulated" in said


def test_compare_quantized_error_on_each_sample_rejected(quantized_graph):
    """The same additional error on each sample raises an error."""
    with pytest.raises(TargetError, match=r"reaches [\d.]+ dB, but its simulation [\d.]+ dB, over 16"):
        compare_noisy_target(quantized_graph, [1.35] * 16)


def test_compare_quantized_single_outlier_rejected(quantized_graph):
    """One sample with a large error raises an error."""
    with pytest.raises(TargetError, match=r"cannot verify the artifact"):
        compare_noisy_target(quantized_graph, [1.0] * 15 + [40.0])


class Read(nn.Module):
    """Returns a linear layer on the output of an LSTM, and the last hidden state."""

    def __init__(self):
        super().__init__()
        self.read, self.head = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 4)

    def forward(self, x):
        read, (last, _) = self.read(x)
        return self.head(read), last


def test_compare_quantized_float_output_within_rounding(tmp_path):
    """A float output of a quantized model may differ by roundings."""
    torch.manual_seed(0)
    module = clika_compile(
        Read().eval(),
        calibration_inputs=[torch.randn(2, 5, 16) for _ in range(2)],
        quantization_settings=QuantizationSettings(quantization_sensitivity_threshold=1e9),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )
    assert module.clika_state.quantized.plan.weights.keys() == {"linear"}
    module.clika_export(tmp_path / "read.onnx")
    assert (tmp_path / "read.onnx").exists()


def test_compare_quantized_weights_quantized_once(quantized_graph, monkeypatch):
    """The weights are quantized before the first run: no constant of the graph that runs is computed on reads."""
    assert any(value.deferred_data for value in quantized_graph[0].constants.values())
    graphs = []

    def run_graph(graph, inputs):
        graphs.append(graph)
        return interpret(graph, inputs)[0]

    monkeypatch.setattr(quantized_check, "run_graph", run_graph)
    compare_noisy_target(quantized_graph, [1.0] * 16)
    assert graphs
    assert not any(value.deferred_data for graph in graphs for value in graph.constants.values())


class Head(nn.Module):
    """Boxes in pixels and scores from 0 to 1, concatenated."""

    def __init__(self):
        super().__init__()
        self.boxes, self.scores = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        return torch.cat([self.boxes(x) * 640, self.scores(x).sigmoid()], 1)


def test_compare_quantized_collapsed_branch_rejected(tmp_path, monkeypatch):
    """A file whose scores are all 0 is rejected, though they are below a millionth of the output's squared norm."""
    torch.manual_seed(0)
    target = REGISTRY.targets["onnxruntime"]
    module = clika_compile(
        Head().eval(),
        calibration_inputs=[X],
        quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )
    module.clika_export(tmp_path / "head.onnx")
    load = type(target).load

    def load_without_scores(self, artifact):
        run, factors = load(self, artifact), torch.tensor([1.0] * 4 + [0.0] * 4)
        return lambda inputs: [x * factors if x.shape[1:] == factors.shape else x for x in run(inputs)]

    monkeypatch.setattr(type(target), "load", load_without_scores)
    with pytest.raises(TargetError, match=r"0\.0 dB, but its simulation .* for output '0, \w+ \[4:8 of dim 1\]'"):
        module.clika_export(tmp_path / "head.onnx")
