"""Comparison of targets: one that cannot run the module has its reason in its row, and the others have results."""

import pytest
import torch
from calibrated_nets import HERE, compile_net
from torch import nn

from clika_ref import (
    DeploymentSettings_OpenVINO_ONNX,
    DeploymentSettings_TensorRT_ONNX,
    ModelError,
    QuantizationSettings,
    TargetError,
    clika_compile,
    export_configuration,
)
from clika_ref.settings.compile_options import deployment_settings_named

TENSORRT, OPENVINO = DeploymentSettings_TensorRT_ONNX(), DeploymentSettings_OpenVINO_ONNX()


def compile_weight_only(bits, blocks=0):
    """Return a module with low-bit weights."""
    settings = QuantizationSettings(
        prefer_weights_only_quantization=True,
        weights_num_bits=bits,
        weights_only_quantization_block_size=blocks,
        automatic_skip_quantization=False,
    )
    return compile_net(quantization_settings=settings)


@pytest.mark.parametrize(
    ("bits", "blocks", "text"),
    [
        (
            8,
            0,
            (
                r"weights_num_bits: 8 bits are requested for .* in first.*, but the target supports 4. Add one of "
                r"these to weights_num_bits"
            ),
        ),
        (
            4,
            32,
            (
                r"weights_only_quantization_block_size: 4-bit weights in blocks of 32 are .*, but the target supports "
                r"blocks of 64 or 128 .* Add one of these to weights_"
            ),
        ),
    ],
)
def test_compare_targets_missing_width_or_block_in_row(bits, blocks, text):
    """A target without the width or block size reports it in its row; other rows stay."""
    found = compile_weight_only(bits, blocks).clika_compare_targets(HERE, TENSORRT, OPENVINO)
    here, tensorrt, openvino = found.rows
    assert (here.layers, here.unsupported_reason, openvino.layers, openvino.unsupported_reason) == (2, "", 2, "")
    assert (tensorrt.target, tensorrt.layers) == ("tensorrt, emulated by ONNX Runtime", 0)
    with pytest.raises(ModelError, match=f"for tensorrt, {text}"):
        raise ModelError(tensorrt.unsupported_reason)
    table = str(found).splitlines()
    assert [line.split("  ")[0] for line in table[1:4]] == [row.target for row in found.rows]
    assert "unsupported: see below" in table[2]
    assert table[4] == f"{tensorrt.target}: {tensorrt.unsupported_reason}"


def test_compare_targets_weight_only_or_int8_unsupported():
    """Targets without weight-only or INT8 support report the setting to change."""
    rows = (
        compile_weight_only(8)
        .clika_compare_targets(*map(deployment_settings_named, ("onnx-reference", "interpreter")))
        .rows
    )
    message = "the target onnx-reference does not support weight-only quantization. Quantize activations as well: "
    assert [row.unsupported_reason for row in rows] == [
        f"{message}prefer_weights_only_quantization=False.",
        (
            "cannot quantize for the target interpreter: it computes in float and declares no scheme. Compile "
            "without quantization_settings."
        ),
    ]


def test_compare_targets_unsupported_node_in_row():
    """A target that cannot run a node reports the node in its row."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.RReLU(0.1, 0.9)).train()
    module = clika_compile(
        model,
        calibration_inputs=[torch.randn(4, 8)],
        quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
        deployment_settings=HERE,
        skip_eval_set_mode=True,
    )
    here, other = module.clika_compare_targets(HERE, deployment_settings_named("onnx-reference")).rows
    assert not here.unsupported_reason
    assert "onnx-reference cannot run 1 node of Sequential:" in other.unsupported_reason
    assert "draws random numbers" in other.unsupported_reason


def test_compare_targets_error_of_all_targets_raises():
    """An error of the request itself or an unknown target raises."""
    module = compile_weight_only(8)
    with (
        pytest.raises(ModelError, match="keep_outputs_at_idx contains 3, but the module returns 1 tensor"),
        export_configuration(keep_outputs_at_idx=[3]),
    ):
        module.clika_compare_targets(HERE, TENSORRT)
    with pytest.raises(TargetError, match="cannot use the target 'toaster': no installed plugin provides it"):
        module.clika_compare_targets(HERE, deployment_settings_named("toaster"))


def test_clika_export_unsupported_width_reports_width(tmp_path):
    """Export to a target without the width raises an error that names the supported width."""
    with pytest.raises(
        ModelError,
        match=r"for tensorrt, weights_num_bits: 8 bits .* the target supports 4. Add one of these to weights_num",
    ):
        compile_weight_only(8).clika_export(tmp_path / "net.onnx", deployment_settings=TENSORRT)
