"""One calibration for all targets: a module quantized for one target is exported for another without data."""

import copy

import pytest
import torch
from torch import nn

from clika_ref import (
    ClikaModule,
    DeploymentSettings_ONNXRuntime_ONNX,
    DeploymentSettings_OpenVINO_ONNX,
    QuantizationSettings,
    clika_compile,
)
from clika_ref.core.errors import ModelError

ORT, OPENVINO = DeploymentSettings_ONNXRuntime_ONNX(), DeploymentSettings_OpenVINO_ONNX()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = torch.relu(self.norm(self.one(x)))
        return self.head(torch.relu(self.two(x) + x).mean((2, 3)))


@pytest.fixture
def compiled_module():
    torch.manual_seed(0)
    batches = [torch.randn(4, 3, 12, 12) for _ in range(3)]
    return clika_compile(
        Net().eval(),
        tracing_inputs=[batches[0]],
        calibration_inputs=(batch for batch in batches),  # read once
        quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
        deployment_settings=ORT,
    ).eval()


def test_clika_export_other_target_leaves_module_unchanged(compiled_module, tmp_path):
    """An export for another target follows its scheme and leaves the module unchanged."""
    before = compiled_module.clika_state.quantized
    x = torch.randn(4, 3, 12, 12)
    expected = compiled_module(x)
    own = compiled_module.clika_export(tmp_path / "own.onnx")
    other = compiled_module.clika_export(tmp_path / "other.onnx", deployment_settings=OPENVINO)
    assert (own.target, other.target) == ("onnxruntime", "openvino")
    assert own.facts["nodes"] != other.facts["nodes"]
    assert compiled_module.clika_state.quantized is before
    assert torch.equal(compiled_module(x), expected)
    found = compiled_module.clika_explain(OPENVINO)
    assert found.target == "openvino"
    assert found.share() == found.share(planned=True) == 1.0


def test_clika_compare_targets_returns_row_per_target(compiled_module):
    """Each target has a row with its figures."""
    found = compiled_module.clika_compare_targets(ORT, OPENVINO)
    assert [row.target for row in found.rows] == ["onnxruntime", "openvino"]
    for row in found.rows:
        assert (row.layers, row.total_layers, row.share) == (3, 3, 1.0)
        assert row.seconds > 0
        assert row.ratio > 0
        assert row.bytes > 1000
        assert row.sqnr > 10
    lines = str(found).splitlines()
    assert "predicted SQNR" in lines[0]
    assert "3 of 3" in lines[-1]


def test_clika_export_other_preset_needs_observed_min_max(compiled_module, tmp_path):
    """Another preset is quantized from the observed min/max, and raises without them."""
    compiled_module.clika_initialize_algorithms(deployment_settings=OPENVINO)
    fast = DeploymentSettings_OpenVINO_ONNX(preset="performance")
    loaded = ClikaModule()
    loaded.load_state_dict(compiled_module.state_dict())
    for module, name in ((compiled_module, "own"), (loaded, "loaded")):
        module.clika_export(tmp_path / f"{name}.onnx", deployment_settings=OPENVINO)
    compiled_module.clika_export(tmp_path / "fast.onnx", deployment_settings=fast)
    own, fast_file = ((tmp_path / f"{name}.onnx").read_bytes() for name in ("own", "fast"))
    assert own == (tmp_path / "loaded.onnx").read_bytes()
    assert own != fast_file
    for module in (loaded, copy.deepcopy(compiled_module)):
        with pytest.raises(ModelError, match="cannot quantize for openvino: the module holds no calibration ranges"):
            module.clika_export(tmp_path / "other.onnx", deployment_settings=fast)


@pytest.mark.parametrize("given", [(), (None,), (ORT, None)])
def test_clika_compare_targets_without_settings_raises(compiled_module, given):
    """A comparison needs deployment settings for each target."""
    with pytest.raises(ModelError, match=r"no deployment settings are given. Pass one for each"):
        compiled_module.clika_compare_targets(*given)


def test_deployment_settings_name_raises(compiled_module, tmp_path):
    """A name in place of deployment settings raises."""
    calls = (
        compiled_module.clika_compare_targets,
        compiled_module.clika_explain,
        lambda name: compiled_module.clika_export(tmp_path / "model.onnx", deployment_settings=name),
    )
    for call in calls:
        with pytest.raises(ModelError, match=r"deployment_settings is 'openvino', a str. Give deployment settings"):
            call("openvino")


def test_clika_export_copy_for_other_target_raises(compiled_module, tmp_path):
    """A copy has no observed min/max, and the error states how to proceed."""
    twin = copy.deepcopy(compiled_module)
    twin.clika_export(tmp_path / "own.onnx")
    with pytest.raises(
        ModelError, match=r"cannot quantize for openvino: the module holds no calibration ranges.*calibration_inputs"
    ):
        twin.clika_export(tmp_path / "other.onnx", deployment_settings=OPENVINO)
    assert not (tmp_path / "other.onnx").exists()
