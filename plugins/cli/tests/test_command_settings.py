"""Settings of a command: a file, flags that override it, and notes for each conflict."""

import pytest
from clika_ref_cli.command_settings import (
    Flags,
    export_deployment_settings,
    float_compile_arguments,
    quantize_arguments,
    resolve_settings,
)
from clika_ref_cli.exit_status import MisuseError
from clika_ref_cli.quantizing import quantization_flags

from clika_ref import DeploymentSettings_OpenVINO_ONNX

FILE = """deployment_settings:
  target_framework: ov
  preset: performance
global_quantization_settings:
  quantization_sensitivity_threshold: 0.005
  weights_num_bits: [8, 4]
layer_settings:
  head.*:
    quantization_settings:
      weights_num_bits: 8
clika_compile_options:
  smooth_quant: on
"""


@pytest.fixture
def file(tmp_path):
    """A settings file."""
    path = tmp_path / "clika.yaml"
    path.write_text(FILE)
    return path


def quantization(threshold=None, bits=None, weights_only=None):
    return quantization_flags(threshold, bits, weights_only=weights_only)


def test_resolve_settings_no_file_no_flags_defaults():
    """Without a file and flags, the settings have their defaults."""
    found = resolve_settings(None, Flags()).settings
    assert found.deployment_settings.target == "onnxruntime"
    assert found.global_quantization_settings.quantization_sensitivity_threshold == 0.005


def test_resolve_settings_file_only_prints_no_note(file, capsys):
    """The settings of a file are used without a note."""
    found = resolve_settings(file, Flags())
    assert found.settings.deployment_settings == DeploymentSettings_OpenVINO_ONNX(preset="performance")
    assert quantize_arguments(found)["clika_compile_options"].smooth_quant == "on"
    assert capsys.readouterr().err == ""


def test_resolve_settings_flag_overrides_file_with_note(file, capsys):
    """A flag overrides the file, with a note that names the line."""
    flags = Flags("ort", ["smooth_quant=off"], quantization(0.01, [8], weights_only=True), ["head.*"])
    found = resolve_settings(file, flags).settings
    assert found.deployment_settings.target == "onnxruntime"
    assert found.clika_compile_options.smooth_quant == "off"
    settings = found.global_quantization_settings
    assert (settings.quantization_sensitivity_threshold, settings.weights_num_bits) == (0.01, 8)
    assert settings.prefer_weights_only_quantization is True
    assert found.layer_settings["head.*"].quantization_settings.skip_quantization
    assert capsys.readouterr().err.splitlines() == [
        f"note: --target ort overrides target_framework in line 2 of {file}.",
        f"note: --option smooth_quant=off overrides smooth_quant in line 12 of {file}.",
        f"note: --threshold 0.01 overrides quantization_sensitivity_threshold in line 5 of {file}.",
        f"note: --weights-bits 8 overrides weights_num_bits in line 6 of {file}.",
        f"note: --keep-float head.* overrides head.* in line 8 of {file}.",
    ]


def test_resolve_settings_equal_flag_prints_no_note(file, capsys):
    """A flag equal to the file prints no note and keeps the other settings."""
    flags = Flags("openvino", ["smooth_quant=on"], quantization(0.005, [8, 4]))
    found = resolve_settings(file, flags).settings
    assert found.deployment_settings.preset == "performance"
    assert capsys.readouterr().err == ""


def test_quantize_arguments_float_file_needs_flag(tmp_path, capsys):
    """`quantize` rejects a file that asks for float, unless a flag overrides it."""
    path = tmp_path / "float.yaml"
    path.write_text("global_quantization_settings: null\n")
    with pytest.raises(
        MisuseError, match=r"cannot quantize: .* sets global_quantization_settings to null\. Remove this"
    ):
        quantize_arguments(resolve_settings(path, Flags()))
    found = quantize_arguments(resolve_settings(path, Flags(quantization=quantization(0.02))))
    assert found["quantization_settings"].quantization_sensitivity_threshold == 0.02
    said = f"note: --threshold 0.02 overrides global_quantization_settings in line 1 of {path}.\n"
    assert capsys.readouterr().err == said


def test_float_compile_arguments_ignore_quantization(file, capsys):
    """`compile` ignores quantization settings, with a note."""
    found = float_compile_arguments(resolve_settings(file, Flags()))
    assert (found["quantization_settings"], found["layer_quantization_settings"]) == (None, None)
    assert "note: `compile` ignores global_quantization_settings of" in capsys.readouterr().err


def test_export_deployment_settings_ignore_other_settings(file, capsys):
    """`export` uses the deployment settings of a file only, with a note."""
    assert export_deployment_settings(None, None) is None
    assert export_deployment_settings(None, "trt").target == "tensorrt"
    assert export_deployment_settings(file, None) == DeploymentSettings_OpenVINO_ONNX(preset="performance")
    said = "and ignores global_quantization_settings, layer_settings, clika_compile_options."
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (Flags("toaster"), r"cannot use the target 'toaster': no installed plugin provides it"),
        (
            Flags(options=["smooth_quant"]),
            r"cannot parse --option 'smooth_quant': it has no value\. Write NAME=VALUE, such as smooth_quant=off",
        ),
        (
            Flags(options=["smooth=on"]),
            r"unknown option 'smooth' = 'on'\. Did you mean 'smooth_quant'\? The options are .*",
        ),
        (Flags(options=["sparing=off"]), r"unknown option 'sparing' = 'off'\. Did you mean 'mixed_precision'\?"),
        (Flags(options=["smooth_quant=yes"]), r"option 'smooth_quant' is 'yes'. Choose one of 'auto', 'on', 'off'"),
        (
            Flags(quantization=quantization(-1.0)),
            r"quantization_sensitivity_threshold is -1\.0. Give a number from 0",
        ),
        (
            Flags(quantization=quantization(None, [99])),
            r"weights_num_bits is 99. Give a number of bits from 2 to 16",
        ),
    ],
)
def test_resolve_settings_invalid_flag_raises(flags, message):
    """A flag with an invalid setting is a misuse error."""
    with pytest.raises(MisuseError, match=message):
        resolve_settings(None, flags)


def test_resolve_settings_unreadable_file_raises(tmp_path):
    """A missing or invalid file is a misuse error."""
    with pytest.raises(MisuseError, match="cannot read the settings in"):
        resolve_settings(tmp_path / "absent.yaml", Flags())
    (tmp_path / "odd.yaml").write_text("global_quantization_settings:\n  weights_num_bit: 8\n")
    with pytest.raises(
        MisuseError, match=r"line 2: global_quantization_settings has no 'weights_num_bit'. Did you mean"
    ):
        resolve_settings(tmp_path / "odd.yaml", Flags())
