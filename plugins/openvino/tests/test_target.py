"""The target ``openvino``: both file formats, files that it rejects, and its messages."""

import subprocess
import sys

import pytest
import torch
from clika_ref_openvino import target as module_of_target
from clika_ref_openvino.target import OpenVino
from torch import nn

from clika_ref import DeploymentSettings_OpenVINO_ONNX, QuantizationSettings, clika_compile
from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import TargetError

X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).eval()


@pytest.mark.parametrize("suffix", ["onnx", "xml"])
@pytest.mark.parametrize("settings", [None, QuantizationSettings(automatic_skip_quantization=False)])
def test_load_onnx_or_xml_equals_module(suffix, settings, tmp_path):
    """A file of either format computes the same as the module."""
    calibration = {} if settings is None else {"calibration_inputs": [X], "quantization_settings": settings}
    compiled = clika_compile(
        make_net(), tracing_inputs=[X, X[:1]], deployment_settings=DeploymentSettings_OpenVINO_ONNX(), **calibration
    ).eval()
    artifact = compiled.clika_export(tmp_path / f"model.{suffix}")
    assert sorted(p.suffix for p in tmp_path.iterdir()) == ([".bin", ".xml"] if suffix == "xml" else [".onnx"])
    runner = OpenVino().load(artifact)
    for x in (X, X[:1]):
        (found,) = runner([x])
        torch.testing.assert_close(found, compiled(x).detach(), rtol=1e-4, atol=1e-5)


SIGNALLED = """
import signal, sys, torch
from clika_ref import DeploymentSettings_OpenVINO_ONNX, clika_compile
from clika_ref_openvino.target import OpenVino

module = clika_compile(torch.nn.Linear(8, 4).eval(), tracing_inputs=[torch.ones(2, 8)])
artifact = module.clika_export(sys.argv[1], deployment_settings=DeploymentSettings_OpenVINO_ONNX())
runners = [OpenVino().load(artifact) for _ in range(3)]
while runners:
    del runners[0]
signal.signal(signal.SIGTERM, lambda *_: print("heard"))
signal.raise_signal(signal.SIGTERM)
"""


@pytest.mark.slow
def test_unloaded_models_keep_signal_handling(tmp_path):
    """A process that has loaded and unloaded models receives signals."""
    command = [sys.executable, "-c", SIGNALLED, str(tmp_path / "model.onnx")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.splitlines()[-1:]) == (0, ["heard"]), run.stderr


@pytest.mark.parametrize(("bits", "block"), [(8, 0), (4, 32)])
def test_explain_weight_only_runs_in_low_bits(bits, block, tmp_path):
    """Weight-only layers keep their weights in INT8 or INT4."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    settings = QuantizationSettings(
        prefer_weights_only_quantization=True,
        weights_num_bits=bits,
        weights_only_quantization_block_size=block,
        automatic_skip_quantization=False,
    )
    compiled = clika_compile(
        module,
        tracing_inputs=[x],
        calibration_inputs=[x],
        quantization_settings=settings,
        deployment_settings=DeploymentSettings_OpenVINO_ONNX(),
    ).eval()
    compiled.clika_export(tmp_path / "model.onnx")
    runs = [node.runs for node in compiled.clika_explain().nodes if node.macs]
    assert runs == [f"int{bits} weights"] * 2


def test_clika_export_bfloat16_model_equals_module(tmp_path):
    """A BF16 model runs and computes the same as the module."""
    module = clika_compile(
        nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 3, 2), nn.Hardswish()).bfloat16().eval(),
        tracing_inputs=[X.bfloat16()],
        deployment_settings=DeploymentSettings_OpenVINO_ONNX(),
    )
    artifact = module.clika_export(tmp_path / "model.onnx")  # which compares it with the module
    (found,) = OpenVino().load(artifact)([X.bfloat16()])
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, module(X.bfloat16()).detach())


def test_clika_export_uppercase_xml_raises(tmp_path):
    """A file with the suffix .XML raises."""
    module = clika_compile(make_net(), tracing_inputs=[X], deployment_settings=DeploymentSettings_OpenVINO_ONNX())
    with pytest.raises(TargetError, match=r"own files end in '.xml', not '.XML'. Use lower case."):
        module.clika_export(tmp_path / "model.XML")
    assert not [*tmp_path.iterdir()]


def test_load_missing_runtime_raises(monkeypatch, tmp_path):
    """Without the runtime, the error names the command to install it."""
    monkeypatch.setattr(module_of_target, "find_spec", lambda _: None)
    assert OpenVino().unavailable_reason() == "openvino is not installed; pip install openvino"
    with pytest.raises(TargetError, match="pip install openvino"):
        OpenVino().load(Artifact(tmp_path / "model.onnx", "openvino", (), ()))


def test_clika_export_missing_runtime_writes_onnx(monkeypatch, tmp_path):
    """Without the runtime, ONNX files are written, and tables name the command to install it."""
    settings = QuantizationSettings(automatic_skip_quantization=False)
    module = clika_compile(
        make_net(),
        calibration_inputs=[X],
        quantization_settings=settings,
        deployment_settings=DeploymentSettings_OpenVINO_ONNX(),
        logs_dir=tmp_path / "logs",
    ).eval()
    monkeypatch.setattr(module_of_target, "find_spec", lambda _: None)
    module.clika_export(tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").exists()
    message = "openvino is not installed; pip install openvino"
    assert f"not compared: {message}" in "".join(log.read_text() for log in (tmp_path / "logs").glob("*.log"))
    (row,) = module.clika_compare_targets(DeploymentSettings_OpenVINO_ONNX()).rows
    assert (row.unavailable_reason, row.share, row.seconds, row.unsupported_reason) == (message, None, None, "")
    assert row.layers == row.total_layers > 0
    for call in (lambda: module.clika_export(tmp_path / "model.xml"), module.clika_explain):
        with pytest.raises(TargetError, match=message):
            call()
    assert not (tmp_path / "model.xml").exists()


def test_load_invalid_file_raises(tmp_path):
    """A file that OpenVINO cannot read is named."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"no model")
    with pytest.raises(TargetError, match=r"OpenVINO .* cannot load .*model\.onnx"):
        OpenVino().load(Artifact(path, "openvino", ("x",), ("y",)))


def test_profile_each_layer_has_time(tmp_path):
    """Each layer has the time that the runtime measures."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)).eval()
    x = torch.randn(2, 8, 12, 12, generator=torch.Generator().manual_seed(0))
    settings = QuantizationSettings(automatic_skip_quantization=False)
    where = DeploymentSettings_OpenVINO_ONNX()
    module = clika_compile(layers, calibration_inputs=[x], quantization_settings=settings, deployment_settings=where)
    artifact = module.clika_export(tmp_path / "model.onnx")
    found = OpenVino().profile(artifact, [x])
    computing = {name for name, told in OpenVino().explain(artifact).items() if told != "fused"}
    assert len(computing) >= 2
    assert computing <= set(found)
    assert all(seconds >= 0 for seconds in found.values())
    assert sum(found.values()) > 0


def multiply_singular_vectors(x):
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    return (u * s[..., None, :]) @ vh, s, torch.linalg.matrix_exp(x @ x.mT)


@pytest.mark.parametrize("columns", [3, 4])
def test_loops_of_singular_values_run_all_steps(columns, tmp_path):
    """The loop of rotations makes all its steps, and its parts can be sorted."""
    x = torch.randn(2, 5, columns, generator=torch.Generator().manual_seed(0))
    compiled = clika_compile(
        multiply_singular_vectors, tracing_inputs=[x], deployment_settings=DeploymentSettings_OpenVINO_ONNX()
    )
    compiled.clika_export(tmp_path / "model.xml")  # compares the file with the module
