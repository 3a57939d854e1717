"""The options that switch algorithms: accepted values, omitted steps, and steps omitted by a time budget."""

import pytest
import torch
from torch import nn

from clika_ref import (
    ClikaCompileOptions,
    DeploymentSettings_ONNXRuntime_ONNX,
    ModelError,
    QuantizationSettings,
    clika_compile,
)
from clika_ref.quantization import pipeline
from clika_ref.quantization.algorithms.gptq import RoundedWeight
from clika_ref.quantization.qdq import planning


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"smoothing": "yes"}, "option 'smoothing' is 'yes'. Choose one of 'auto', 'on', 'off'"),
        ({"bias_correction": True}, "option 'bias_correction' is True. Choose one of 'auto', 'on', 'off'"),
        ({"bias_correction": "On"}, "option 'bias_correction' is 'On'. Choose one of 'auto', 'on', 'off'"),
        ({"algorithm_seconds": -1.0}, "option 'algorithm_seconds' is -1.0. Give a number of seconds"),
    ],
)
def test_clika_compile_options_invalid_switch_or_time_raises(options, message):
    """An algorithm option takes 'auto', 'on' or 'off'; a time is not negative."""
    with pytest.raises(ModelError, match=message):
        ClikaCompileOptions(**options)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"algorithm_seconds": "3"}, "str. Give a float"),
        ({"algorithm_seconds": True}, "bool. Give a float"),
        ({"check_passes": 1}, "int. Give a bool"),
        ({"ranges_file": 1}, "int. Give a str"),
    ],
)
def test_clika_compile_options_wrong_type_names_expected(options, kind):
    """An option of a wrong type raises an error with the expected type."""
    with pytest.raises(ModelError, match=kind):
        ClikaCompileOptions(**options)


def quantize(**options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 8)).eval()
    spread = torch.Generator().manual_seed(2)
    return clika_compile(
        net,
        calibration_inputs=[torch.randn(16, 8, 8, 8, generator=spread) for _ in range(3)],
        quantization_settings=QuantizationSettings(weights_utilize_full_int_range=True),  # on any processor
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
        clika_compile_options=ClikaCompileOptions(**options),
    ).clika_state.quantized.plan


def test_clika_compile_unknown_observer_raises():
    """An unknown observer raises an error."""
    with pytest.raises(
        ModelError, match=r"option 'observer' is 'median'. Choose one of 'auto', 'every', 'min-max', 'mean"
    ):
        quantize(observer="median")


def test_clika_compile_options_off_and_on_control_algorithms():
    """Algorithms that are off are not used, and those that are on are used."""
    every = ("weight_rounding", "bias_correction")
    off, on = (quantize(**dict.fromkeys(every, switch)) for switch in ("off", "on"))
    assert not off.offsets
    assert not off.corrections
    assert on.offsets.keys() == on.corrections.keys() == on.weights.keys()
    wide = quantize(observer="min-max", weight_rounding="off")
    assert wide.activations["input"].scale > quantize(observer="percentile-99.99").activations["input"].scale


def test_weight_clipping_off_covers_whole_weight(monkeypatch):
    """Without clipping, scales cover the whole weight."""
    monkeypatch.setattr(planning, "find_clipped_scales", lambda weight, *_: torch.ones(len(weight)))
    whole, clipped = (quantize(weight_clipping=switch, weight_rounding="off") for switch in ("off", "auto"))
    assert all((scales < 1).all() for scales in whole.weights.values())
    assert all((scales == 1).all() for scales in clipped.weights.values())


def test_gptq_auto_kept_only_if_error_falls(monkeypatch):
    """An algorithm on 'auto' is kept only if it reduces the error."""
    found = quantize().offsets
    assert found
    worse = {name: RoundedWeight(torch.full_like(moved, 9), 1.0) for name, moved in found.items()}
    monkeypatch.setattr(pipeline, "round_weights", lambda *_, **__: worse)
    assert not quantize().offsets
    assert quantize(weight_rounding="on").offsets


def test_algorithm_seconds_expired_skips_auto():
    """Algorithms on 'auto' are skipped after the time limit; those that are on are used."""
    late = quantize(algorithm_seconds=1e-9)
    assert not late.offsets
    assert not late.corrections
    assert late.weights
    assert quantize(algorithm_seconds=1e-9, bias_correction="on").corrections
