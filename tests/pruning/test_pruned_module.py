"""Channels are removed from a module that trains, saves, exports and quantizes as before; orders that make no sense."""

import pytest
import torch

from clika_ref import (
    ClikaModule,
    DeploymentSettings_ONNXRuntime_ONNX,
    LayerPruningSettings,
    ModelError,
    PruningSettings,
    QuantizationSettings,
)

HALF = PruningSettings("structured", None, 0.5)


def test_half_of_the_channels_go_and_the_rest_trains_saves_exports_and_quantizes(made, tmp_path):
    module, inputs = made("Residual")
    before = module.clika_export(tmp_path / "before.onnx").facts["bytes"]
    found = module.clika_prune(HALF, calibration_inputs=inputs)
    assert module.inner.weight.shape == (6, 4, 3, 3)
    assert found.macs_after < 0.3 * found.macs_before
    assert "4 of 8 channels removed" in str(found)
    assert "the model returns" in str(found)
    optimizer = torch.optim.Adam(module.parameters(), 1e-2)
    module.train()
    module(inputs[0]).square().sum().backward()
    optimizer.step()
    again = ClikaModule()
    again.load_state_dict(module.state_dict())
    torch.testing.assert_close(again.eval()(inputs[1]), module.eval()(inputs[1]))
    assert module.clika_export(tmp_path / "after.onnx").facts["bytes"] < before
    target = DeploymentSettings_ONNXRuntime_ONNX()
    module.clika_initialize_algorithms(QuantizationSettings(), calibration_inputs=inputs, deployment_settings=target)
    module.clika_export(tmp_path / "integers.onnx")
    with pytest.raises(ModelError, match=r"the module is quantized.*prune first, and quantize then"):
        module.clika_prune(HALF, calibration_inputs=inputs)


def test_both_are_asked_for_at_once_and_data_that_is_not_given_is_missed_in_a_warning(made, tmp_path):
    torch.manual_seed(0)
    data = [torch.randn(8, 3, 8, 8)]
    module, _ = made(
        "Residual",
        calibration_inputs=data,
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
        quantization_settings=QuantizationSettings(),
        pruning_settings=HALF,
        logs_dir=tmp_path,
    )
    assert module.inner.weight.shape == (6, 4, 3, 3)
    (log,) = tmp_path.glob("*.log")
    assert "Global Pruning Settings" in log.read_text()
    other, _ = made("Residual", pruning_settings=HALF, logs_dir=tmp_path / "other")
    (log,) = (tmp_path / "other").glob("*.log")
    assert "weighed on an input that the module was traced with" in log.read_text()
    assert other.inner.weight.shape == (6, 4, 3, 3)


def test_a_threshold_lets_go_what_the_outputs_do_not_miss(made):
    module, inputs = made("Residual")
    with torch.no_grad():
        module.outer.weight[:, :5] = 0.0
    wanted = module(inputs[0])
    settings = {"inner": LayerPruningSettings(mask_type="structured", pruning_sensitivity_threshold=1e-9)}
    found = module.clika_prune(PruningSettings("1:1", 0), layer_pruning_settings=settings, calibration_inputs=inputs)
    assert module.inner.weight.shape[0] == 8  # of the 7 that count, with one more for whole lanes
    torch.testing.assert_close(module(inputs[0]), wanted)
    assert found.error < 1e-9


@pytest.mark.parametrize(
    ("key", "settings", "message"),
    [
        ("iner", LayerPruningSettings(sparsity=0.5), "'iner' is the name of no layer.*near it are 'inner'"),
        ("norm", LayerPruningSettings(sparsity=0.5), "'norm' names nothing that multiplies by weights"),
        ("head", LayerPruningSettings(sparsity=0.5), "'head': no output channel.*the model returns"),
        ("stem", LayerPruningSettings(mask_type="1:1", sparsity=0.5), None),
    ],
)
def test_a_key_that_names_nothing_to_prune_is_refused(made, key, settings, message):
    module, inputs = made("Residual")
    if message is None:
        module.clika_prune(HALF, layer_pruning_settings={key: settings}, calibration_inputs=inputs)
        assert module.stem.weight.shape[0] == 8
        assert (module.stem.weight == 0).any()
        return
    with pytest.raises(ModelError, match=message):
        module.clika_prune(HALF, layer_pruning_settings={key: settings}, calibration_inputs=inputs)


def test_a_layer_whose_partner_keeps_its_channels_is_refused_by_name(made):
    module, inputs = made("Residual")
    layers = {"outer": LayerPruningSettings(sparsity=0.5), "stem": LayerPruningSettings(skip_pruning=True)}
    with pytest.raises(ModelError, match="'outer': its output goes together with 'conv2d' in stem, which has skip_pru"):
        module.clika_prune(HALF, layer_pruning_settings=layers, calibration_inputs=inputs)
