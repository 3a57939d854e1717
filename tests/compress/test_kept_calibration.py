"""Calibration state that a module keeps between quantizations: ranges, sizes, unread data, the user's settings."""

import copy

import pytest
import torch
from calibrated_nets import HERE, compile_net, make_batches, trace_net
from interrupted_data import interrupt_after
from log_files import read_logs
from torch import nn

from clika_ref import (
    ClikaCompileOptions,
    ClikaModule,
    DeploymentSettings_OpenVINO_ONNX,
    DeploymentSettings_TensorRT_LLM_ONNX,
    DeploymentSettings_TensorRT_ONNX,
    LayerQuantizationSettings,
    ModelError,
    QuantizationSettings,
    clika_compile,
)
from clika_ref.compiled.latency import LayerTimer
from clika_ref.compress import latency_choice
from clika_ref.quantization.calibration.calibrator import Reservoir
from clika_ref.quantization.pipeline import QuantizationPipeline


def read_planned_precisions(module, deployment):
    return {fact.planned for fact in module.clika_explain(deployment).nodes if fact.planned != "float"}


@pytest.mark.parametrize("bad", [[], [torch.full((4, 32), torch.nan)]], ids=["none", "NaN"])
def test_initialize_algorithms_unreadable_data_not_kept(bad):
    """Empty or NaN data raises, and the next call uses the tracing inputs again."""
    module = trace_net()
    with pytest.raises(ModelError, match=r"are empty|NaN"):
        module.clika_initialize_algorithms(calibration_inputs=bad)
    module.clika_initialize_algorithms()
    assert module.clika_state.calibration.table.batches == 2


def test_initialize_algorithms_interrupted_later_keeps_data(monkeypatch):
    """Data that was read completely is kept if a later step is interrupted."""
    module = trace_net(deployment_settings=HERE, clika_compile_options=ClikaCompileOptions(optimize_for="latency"))
    with monkeypatch.context() as patched:
        patched.setattr(LayerTimer, "find_slow_layers", raise_keyboard_interrupt)
        with pytest.raises(KeyboardInterrupt):
            module.clika_initialize_algorithms(calibration_inputs=iter(make_batches()))
    module.clika_initialize_algorithms()
    assert module.clika_state.calibration.table.batches == 4


def raise_keyboard_interrupt(*_, **__):
    raise KeyboardInterrupt


def export_warns_of_weights(module, folder):
    module.clika_export(folder / "model.onnx")
    return "weights have changed since their scales" in read_logs(folder)


def test_clika_export_interrupted_requantize_warns_of_weights(tmp_path, monkeypatch):
    """Export still warns of changed weights after an interrupted requantization."""
    module = compile_net(logs_dir=tmp_path)
    assert not export_warns_of_weights(module, tmp_path)
    with torch.no_grad():
        module.get_parameter("first.weight").mul_(1.5)
    with monkeypatch.context() as patched:
        patched.setattr(QuantizationPipeline, "decide", raise_keyboard_interrupt)
        with pytest.raises(KeyboardInterrupt):
            module.clika_initialize_algorithms()
    assert export_warns_of_weights(module, tmp_path)


@pytest.mark.parametrize("way", ["copied", "saved"])
def test_clika_export_copied_or_loaded_module_warns(tmp_path, way):
    """A copied or loaded module warns of changed weights at export."""
    module = compile_net()
    other = copy.deepcopy(module) if way == "copied" else ClikaModule()
    if way == "saved":
        other.load_state_dict(module.state_dict())
    other.clika_state.logs_dir = tmp_path
    assert not export_warns_of_weights(other.eval(), tmp_path)
    with torch.no_grad():
        other.get_parameter("first.weight").mul_(1.5)
    assert export_warns_of_weights(other, tmp_path)
    assert "computes new scales, given calibration_inputs" in read_logs(tmp_path)


def test_clika_compare_targets_undecided_module_raises(monkeypatch):
    """Calibrated but undecided modules raise an error that names the call to make."""
    module = trace_net()
    with monkeypatch.context() as patched:
        patched.setattr(QuantizationPipeline, "decide", raise_keyboard_interrupt)
        with pytest.raises(KeyboardInterrupt):
            module.clika_initialize_algorithms(calibration_inputs=make_batches(), deployment_settings=HERE)
    with pytest.raises(ModelError, match=r"holds calibration ranges, but was not quantized .* which reads no data"):
        module.clika_compare_targets(HERE)
    module.clika_initialize_algorithms(deployment_settings=HERE)
    assert module.clika_compare_targets(HERE).rows[0].total_layers == 2


def test_initialize_algorithms_resumes_after_requantization():
    """An interrupted pass resumes even if older activation ranges were used in between."""
    module = compile_net()
    with pytest.raises(KeyboardInterrupt):
        module.clika_initialize_algorithms(calibration_inputs=interrupt_after(make_batches(6, seed=7)))
    module.clika_initialize_algorithms(QuantizationSettings(quantization_sensitivity_threshold=0.5))
    assert module.clika_state.unfinished.table.batches == 6
    module.clika_initialize_algorithms(calibration_inputs=make_batches(7, seed=7))
    assert module.clika_state.calibration.table.batches == 7
    assert module.clika_state.unfinished is None


def test_load_state_dict_keeps_unread_calibration_data():
    """Loading weights keeps calibration data that has not been read."""
    module = trace_net(calibration_inputs=iter(make_batches()))
    module.load_state_dict(module.state_dict())
    module.clika_initialize_algorithms()
    assert module.clika_state.calibration.table.batches == 4


@pytest.mark.parametrize(("count", "traced_with"), [(6, 4), (3, 3)])
def test_load_state_dict_tracing_elements_not_calibration(tmp_path, count, traced_with):
    """After loading weights, calibration warns if it has only the tracing inputs."""
    module = compile_net(calibration_inputs=iter(make_batches(count)), logs_dir=tmp_path)
    module.load_state_dict(module.state_dict())
    module.clika_initialize_algorithms()
    assert module.clika_state.calibration.table.batches == traced_with
    warned = "Calibration uses the 4 tracing inputs" in read_logs(tmp_path)
    assert warned is (count > traced_with)


def test_load_state_dict_and_requantize_keep_sizes(monkeypatch):
    """Loading weights and requantization keep the observed sizes."""
    first_only = lambda self, inputs: self.batches or self.batches.append(inputs)  # noqa: E731
    monkeypatch.setattr(Reservoir, "offer", first_only)
    module = compile_net()
    sizes = module.clika_state.sizes
    assert {dict(one)[name] for one in sizes for name, _ in one} == {4, 5, 6, 7}
    few = QuantizationSettings(weights_num_bits=4, prefer_weights_only_quantization=True)
    module.clika_initialize_algorithms(few)
    assert module.clika_state.sizes == sizes
    module.load_state_dict(module.state_dict())
    assert module.clika_state.sizes == sizes


def test_quantization_default_mode_follows_each_target():
    """The default of each target decides between weight-only and full quantization."""
    values = compile_net(deployment_settings=DeploymentSettings_TensorRT_ONNX())
    assert read_planned_precisions(values, DeploymentSettings_TensorRT_LLM_ONNX()) == {"int8 weights"}
    weights = compile_net(deployment_settings=DeploymentSettings_TensorRT_LLM_ONNX())
    for deployment in (DeploymentSettings_TensorRT_ONNX(), HERE, DeploymentSettings_OpenVINO_ONNX()):
        assert read_planned_precisions(weights, deployment) == {"int8"}


def test_clika_compile_activation_bits_weight_only_raise():
    """Activation bits raise an error for a target that defaults to weight-only."""
    wide = {"first": LayerQuantizationSettings(activations_num_bits=8)}
    with pytest.raises(
        ModelError, match=r"target tensorrt-llm, unless prefer_weights_only_quantization is False, keeps"
    ):
        compile_net(deployment_settings=DeploymentSettings_TensorRT_LLM_ONNX(), layer_quantization_settings=wide)


def test_clika_compare_targets_emulated_target_not_timed():
    """Emulated targets are compared without latency even with `optimize_for="latency"`."""
    module = compile_net(clika_compile_options=ClikaCompileOptions(optimize_for="latency"))
    rows = module.clika_compare_targets(HERE, DeploymentSettings_TensorRT_ONNX()).rows
    assert [row.layers for row in rows] == [rows[0].layers, 2]


def test_clika_compile_unread_nan_accepted():
    """A NaN weight that no node reads does not prevent quantization."""
    assert compile_net().clika_state.quantized is not None


def test_quantize_low_bit_layer_computed_bias_not_timed(monkeypatch):
    """A low-bit layer with a computed bias is quantized without a latency measurement."""
    monkeypatch.setattr(latency_choice, "measure_ratio_to_float", lambda *_: 0.5)

    class Computed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.weight, self.bias = nn.Parameter(torch.randn(32, 32)), nn.Linear(32, 32)

        def forward(self, x):
            return nn.functional.linear(x, self.weight, self.bias(x)[0])

    few = QuantizationSettings(prefer_weights_only_quantization=True, quantization_sensitivity_threshold=1.0)
    options = {"deployment_settings": HERE, "clika_compile_options": ClikaCompileOptions(optimize_for="latency")}
    module = clika_compile(Computed().eval(), calibration_inputs=make_batches(), quantization_settings=few, **options)
    assert module.clika_state.quantized.plan.packed_weights
