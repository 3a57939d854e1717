"""Settings of quantization are checked on each assignment."""

import copy
import pickle

import pytest
import torch
from torch import nn

from clika_ref import (
    DeploymentSettings_ONNXRuntime_ONNX,
    LayerQuantizationSettings,
    ModelError,
    QuantizationSettings,
    clika_compile,
)

NUMBER = "a number of bits from 2 to 16"


def test_quantization_settings_names_and_defaults():
    """The names and defaults are the published ones."""
    assert vars(QuantizationSettings()) == {
        "weights_num_bits": 8,
        "activations_num_bits": 8,
        "quantization_sensitivity_threshold": 0.005,
        "prefer_weights_only_quantization": None,
        "weights_only_quantization_block_size": [0, 32, 64, 128, 256],
        "weights_utilize_full_int_range": None,
        "automatic_skip_quantization": True,
        "skip_tail_quantization": None,
        "dynamic_activations": False,
    }
    assert vars(LayerQuantizationSettings()) == {
        "skip_quantization": False,
        "skip_quantization_until": [],
        "skip_quantization_downstream": False,
        "weights_num_bits": None,
        "activations_num_bits": None,
    }


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("weights_num_bits", 1, NUMBER),
        ("weights_num_bits", 8.0, NUMBER),
        ("weights_num_bits", True, NUMBER),
        ("weights_num_bits", [], "or a list to choose from for each layer"),
        ("weights_num_bits", [8, 8], "or a list to choose from"),
        ("weights_num_bits", [8, 99], "or a list to choose from"),
        ("activations_num_bits", [8], NUMBER),
        ("activations_num_bits", None, NUMBER),
        ("quantization_sensitivity_threshold", -0.1, "a number from 0"),
        ("quantization_sensitivity_threshold", float("nan"), "a number from 0"),
        ("quantization_sensitivity_threshold", float("inf"), "a number from 0"),
        ("quantization_sensitivity_threshold", "low", "a number from 0"),
        ("prefer_weights_only_quantization", "no", "True, False, or None"),
        ("weights_only_quantization_block_size", 33, "0 for one scale per channel, or a power of two from 16"),
        ("weights_only_quantization_block_size", [0, 8], "a power of two from 16"),
        ("weights_utilize_full_int_range", 1, "True, False, or None"),
        ("automatic_skip_quantization", None, "True or False"),
        ("skip_tail_quantization", "auto", "True, False, or None"),
    ],
)
def test_quantization_settings_invalid_value_names_expected(name, value, expected):
    """An invalid value raises an error with the expected one."""
    with pytest.raises(ModelError) as caught:
        QuantizationSettings(**{name: value})
    assert f"QuantizationSettings.{name} is {value!r}. Give " in str(caught.value)
    assert expected in str(caught.value)


def test_quantization_settings_rejected_assignment_keeps_value():
    """An assignment is checked, and a rejected one changes no field."""
    settings = QuantizationSettings(weights_num_bits=[8, 4], weights_only_quantization_block_size=(0, 32))
    settings.quantization_sensitivity_threshold = 0.35
    with pytest.raises(ModelError, match="Give a number from 0"):
        settings.quantization_sensitivity_threshold = -1
    with pytest.raises(
        ModelError,
        match=r"QuantizationSettings has no 'weight_bits'. Did you mean 'weights_num_bits'\? Its fields are weights",
    ):
        settings.weight_bits = 4
    assert settings.quantization_sensitivity_threshold == 0.35
    assert not hasattr(settings, "weight_bits")


def test_quantization_settings_contradiction_raises():
    """Contradicting settings raise an error when the second one is set."""
    with pytest.raises(ModelError, match=r"automatic_skip_quantization=False keeps none. Choose one"):
        QuantizationSettings(quantization_sensitivity_threshold=0, automatic_skip_quantization=False)
    settings = QuantizationSettings(quantization_sensitivity_threshold=0)
    with pytest.raises(ModelError, match="Choose one"):
        settings.automatic_skip_quantization = False
    assert settings.automatic_skip_quantization is True


def test_weight_only_settings_reject_activation_bits():
    """Weight-only quantization rejects a number of bits for activations."""
    settings = QuantizationSettings(prefer_weights_only_quantization=True, activations_num_bits=8)
    with pytest.raises(ModelError, match="keeps activations in float, but activations_num_bits=4 quantizes"):
        settings.activations_num_bits = 4


def test_clika_compile_checks_mutated_lists_before_data():
    """A list that was changed in place is checked before data is read."""
    widths = [8, 4]
    settings = QuantizationSettings(weights_num_bits=widths)
    layers = {"0": LayerQuantizationSettings(weights_num_bits=[8])}
    widths.append(99)

    def compile_layer(settings):
        clika_compile(
            nn.Sequential(nn.Linear(4, 4)),
            tracing_inputs=[torch.zeros(1, 4)],
            calibration_inputs=iter([]),
            deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
            quantization_settings=settings,
            layer_quantization_settings=layers,
        )

    with pytest.raises(ModelError, match=r"QuantizationSettings.weights_num_bits is \[8, 4, 99\]. Give"):
        compile_layer(settings)
    layers["0"].weights_num_bits.append(0)
    with pytest.raises(ModelError, match=r"LayerQuantizationSettings.weights_num_bits is \[8, 0\]. Give"):
        compile_layer(QuantizationSettings())


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"skip_quantization": True, "weights_num_bits": 4}, "a layer in float has no number of bits"),
        ({"skip_quantization_until": ["head"], "activations_num_bits": 8}, "has no number of bits"),
        (
            {"skip_quantization_downstream": True, "skip_quantization_until": ["head"]},
            "skips all nodes after the layer",
        ),
        ({"skip_quantization_until": "head"}, "Give a list of layer names"),
        ({"weights_num_bits": 0}, "Give a number of bits from 2 to 16, or a list to choose from for each layer"),
        ({"weights_num_bits": 0}, "or None for the setting of the model"),
    ],
)
def test_layer_quantization_settings_invalid_raise(fields, what):
    """Invalid and contradicting settings of a layer raise an error."""
    with pytest.raises(ModelError, match=what):
        LayerQuantizationSettings(**fields)


def test_quantization_settings_copied_and_pickled():
    """Copies and pickles are equal and checked."""
    settings = QuantizationSettings(weights_num_bits=[8, 4])
    for other in (copy.deepcopy(settings), pickle.loads(pickle.dumps(settings))):  # noqa: S301 - our own
        assert other == settings
        with pytest.raises(ModelError):
            other.weights_num_bits = 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"quantization_settings": {"weights_num_bits": 8}}, "a QuantizationSettings, or None for a float model"),
        ({"layer_quantization_settings": ["conv"]}, "a dict from the names of layers to LayerQuantizationSettings"),
        ({"layer_quantization_settings": {"conv": True}}, "a dict from names of layers to LayerQuantizationSettings"),
    ],
)
def test_clika_compile_wrong_settings_type_raises(arguments, expected):
    """Settings of a wrong type raise an error with the expected one."""
    with pytest.raises(ModelError, match=expected):
        clika_compile(lambda x: x, tracing_inputs=[1], **arguments)
