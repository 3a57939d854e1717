"""A fourth target in one file of eighty lines."""

from pathlib import Path

import pytest
import torch
from clika_ref_example import reference
from torch import nn

import clika_ref
from clika_ref import QuantizationSettings
from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import TargetError
from clika_ref.settings.compile_options import deployment_settings_named

LINES = 80
"""Of the file, at most."""


def test_reference_target_at_most_80_lines():
    """The file has at most 80 lines."""
    assert len(Path(reference.__file__).read_text(encoding="utf-8").splitlines()) <= LINES


@pytest.mark.parametrize("settings", [None, QuantizationSettings(automatic_skip_quantization=False)])
def test_onnx_reference_export_equals_module(settings, tmp_path):
    """A file is written, run and compared, in float and in INT8."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()
    inputs = [torch.randn(count, 3, 8, 8) for count in (2, 3)]
    calibration = {} if settings is None else {"calibration_inputs": inputs, "quantization_settings": settings}
    module = clika_ref.clika_compile(
        model, tracing_inputs=inputs, deployment_settings=deployment_settings_named("onnx-reference"), **calibration
    ).eval()
    artifact = module.clika_export(tmp_path / "model.onnx")
    (found,) = reference.OnnxReference().load(artifact)([inputs[1]])
    torch.testing.assert_close(found, module(inputs[1]).detach(), rtol=1e-4, atol=1e-5)
    explained = module.clika_explain()
    assert {node.runs for node in explained.nodes if node.macs} == {"float"}
    assert [node.planned for node in explained.nodes if node.macs] == ["float" if settings is None else "int8"] * 2


def test_onnx_reference_load_invalid_file_raises(tmp_path):
    """A file that is not ONNX is named."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"no model")
    with pytest.raises(TargetError, match=r"onnx cannot read .*model\.onnx"):
        reference.OnnxReference().load(Artifact(path, "onnx-reference", (), ()))


@pytest.mark.parametrize("is_asked_for", [False, True])
def test_onnx_reference_bfloat16_raises(tmp_path, is_asked_for):
    """BF16 is rejected by name."""
    model, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)
    if not is_asked_for:
        model, x = model.bfloat16(), x.bfloat16()
    settings = deployment_settings_named("onnx-reference")
    module = clika_ref.clika_compile(model.eval(), tracing_inputs=[x], deployment_settings=settings)
    nodes = "3 nodes" if is_asked_for else "1 node"  # export_bf16 adds a conversion at either end
    message = rf"onnx-reference cannot run {nodes} of Conv2d:\n(.*\n)*  conv2d in .*: it computes in bfloat16, which is"
    with clika_ref.export_configuration(export_bf16=is_asked_for), pytest.raises(TargetError, match=message):
        module.clika_export(tmp_path / "model.onnx")
    assert not [*tmp_path.iterdir()]
