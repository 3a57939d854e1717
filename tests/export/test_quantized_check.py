"""The loss allowed between a quantized artifact and its graph, derived from the compared samples."""

import itertools
from functools import partial

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
from clika_ref.quantization.graph_runs import compute_outputs

X = randn(16, 8)
REGISTRY = load_registry()


class Replaced:
    """ONNX Runtime, but a function computes the results."""

    def __init__(self, run):
        self.runtime, self.run = REGISTRY.targets["onnxruntime"], run

    def __getattr__(self, name):
        return getattr(self.runtime, name)

    def load(self, artifact):
        return self.run


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
    """Compare a runtime whose error is a given multiple of each sample's quantization error."""
    graph, expected = compiled
    result = expected + (interpret(graph, [X])[0][0] - expected) * torch.tensor(shares).sqrt().unsqueeze(1)
    return compare_quantized(None, Replaced(lambda _: [result]), graph, [[X]], lambda _: [expected])


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


class Selection(nn.Module):
    """The rows of a linear layer with a positive first element."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        rows = self.layer(x)
        return rows[rows[:, 0] > 0]


@pytest.mark.parametrize("wrong", [1, 6])
def test_compare_quantized_lost_selections_rejected_beyond_chance(wrong):
    """Rows that are missing in one of six examples may be near the threshold; in each example they are an error."""
    torch.manual_seed(0)
    target = REGISTRY.targets["onnxruntime"]
    module = clika_compile(
        Selection().eval(),
        calibration_inputs=[randn(64, 8, seed=seed) for seed in range(8)],
        quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )
    graph = quantize_for_target(module.graph, module.clika_state.quantized.plan, target, REGISTRY)
    examples = [[randn(64, 8, seed=100 + seed)] for seed in range(6)]
    calls = itertools.count()

    def run(inputs):
        (rows,) = compute_outputs(graph, inputs)
        return [rows[: len(rows) // 2] if next(calls) < wrong else rows]

    compared = (None, Replaced(run), graph, examples, partial(compute_outputs, module.graph))
    if wrong == 1:
        assert " dB over 6 samples" in compare_quantized(*compared)
    else:
        with pytest.raises(TargetError, match=r"reaches [\d.]+ dB, but its simulation"):
            compare_quantized(*compared)
