"""Whole quantizations are compared by their time: which one is used, and that noise changes nothing."""

import pytest
import torch
from torch import nn

from clika_ref import (
    ClikaCompileOptions,
    DeploymentSettings_ONNXRuntime_ONNX,
    LayerQuantizationSettings,
    QuantizationSettings,
    clika_compile,
)
from clika_ref.compiled.latency import LayerTimer
from clika_ref.compress import latency_choice

LAYERS = {"0", "2", "4"}

THRESHOLD = 1e-5
"""A threshold between the sensitivities of the layers."""


def decide(monkeypatch, ratio_of, *, slow=(), **settings):
    """Return the quantized layers of three, where ``ratio_of`` gives the time of a set of quantized layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    names = {"linear": "0", "linear_1": "2", "linear_2": "4"}
    monkeypatch.setattr(
        latency_choice,
        "measure_ratio_to_float",
        lambda graph, plan, *_: ratio_of({names[node] for node in plan.weights}),
    )
    monkeypatch.setattr(
        LayerTimer,
        "find_slow_layers",
        lambda self, graph, *_: {n: "slow" for n in graph.nodes if n.origin.scope in slow},
    )
    module = clika_compile(
        model,
        calibration_inputs=[torch.randn(16, 8) for _ in range(3)],
        quantization_settings=QuantizationSettings(weights_utilize_full_int_range=True, **settings),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
        clika_compile_options=ClikaCompileOptions(optimize_for="latency", mixed_precision="off"),
    )
    return {layer.scope for layer in module.clika_summary().layers if not layer.reason}


def test_choose_fastest_tie_keeps_default_plan(monkeypatch):
    """A candidate that is 2 % faster does not replace the default plan."""
    assert decide(monkeypatch, lambda layers: 0.5 if "2" in layers else 0.49, slow={"2"}) == LAYERS


def test_choose_fastest_plan_without_slow_layers(monkeypatch):
    """A plan without a slower layer is used if the whole is faster."""
    assert decide(monkeypatch, lambda layers: 0.5 if "2" in layers else 0.4, slow={"2"}) == {"0", "4"}


@pytest.mark.parametrize(("default", "other", "kept"), [(1.031, 1.005, {"0", "4"}), (1.05, 1.04, set())])
def test_choose_fastest_float_only_if_faster_than_all(monkeypatch, default, other, kept):
    """If the default plan is slower than float and another one is not, that one is used."""
    assert decide(monkeypatch, lambda layers: default if "2" in layers else other, slow={"2"}) == kept


@pytest.mark.parametrize(("ratio", "is_whole"), [(0.4, True), (0.6, False)])
def test_choose_fastest_all_layers_if_faster(monkeypatch, ratio, is_whole):
    """Layers that are too sensitive are quantized if the whole is faster."""
    found = decide(
        monkeypatch, lambda layers: ratio if layers == LAYERS else 0.5, quantization_sensitivity_threshold=THRESHOLD
    )
    assert (found == LAYERS) is is_whole
    assert found


def test_choose_fastest_all_layers_too_sensitive_stay_float(monkeypatch):
    """If no layer is quantized by default, none is for latency."""
    assert not decide(monkeypatch, lambda _: 0.4, quantization_sensitivity_threshold=1e-9)


def test_choose_fastest_float_if_each_candidate_is_slower(monkeypatch, capsys):
    """The model stays in float if every candidate is slower, and the log has their times."""
    assert not decide(monkeypatch, lambda layers: 1.1 if "2" in layers else 1.2, slow={"2"})
    shown = " ".join(capsys.readouterr().err.split())
    assert "the default plan 1.10x, without slower layers 1.20x. Each is slower than float" in shown


@pytest.mark.slow
def test_choose_fastest_repeated_compilations_agree():
    """Three compilations, timed in the runtime, quantize the same layers: these are much faster in INT8."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Conv2d(64, 8, 3)).eval()
    data = [torch.randn(2, 64, 32, 32) for _ in range(2)]
    found = [
        {
            layer.scope
            for layer in clika_compile(
                model,
                tracing_inputs=[data[0][:1], data[0]],
                calibration_inputs=data,
                quantization_settings=QuantizationSettings(),
                layer_quantization_settings={"4": LayerQuantizationSettings(skip_quantization=True)},
                deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
                optimize_for="latency",
            )
            .clika_summary()
            .layers
            if not layer.reason
        }
        for _ in range(3)
    ]
    assert found == [found[0]] * 3
    assert found[0] <= {"0", "2"}
