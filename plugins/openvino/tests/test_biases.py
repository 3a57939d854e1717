"""INT8 files keep the biases of convolutions in networks that compute with sizes."""

import pytest
import torch
import torch.nn.functional as F
from clika_ref_openvino.biases import separate_biases
from torch import nn

from clika_ref import DeploymentSettings_OpenVINO_ONNX, QuantizationSettings, clika_compile
from clika_ref.core.registry import load_registry
from clika_ref.onnx_export.artifact import emit


class Network(nn.Module):
    """Convolutions, a function of sizes, and a convolution."""

    def __init__(self, function, activation=F.relu):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.last, self.function, self.activation = nn.LazyConv2d(4, 3, padding=1), function, activation

    def forward(self, x):
        y = self.activation(self.first(x))
        z = self.activation(self.second(y))
        return self.last(self.function(z, y))


def shuffle_channels(z, _):
    batch, channels, height, width = z.shape
    return z.reshape(batch, 4, channels // 4, height, width).transpose(1, 2).reshape(batch, channels, height, width)


def attend(z, _):
    batch, channels, height, width = z.shape
    tokens = z.flatten(2).transpose(1, 2)
    found = F.scaled_dot_product_attention(tokens, tokens, tokens)
    return found.transpose(1, 2).reshape(batch, channels, height, width)


FUNCTIONS = {
    "bilinear": lambda z, _: F.interpolate(z, scale_factor=2.0, mode="bilinear"),
    "top-down sum": lambda z, y: F.interpolate(F.max_pool2d(z, 2), size=y.shape[-2:], mode="bilinear") + y,
    "skip": lambda z, y: torch.cat([F.interpolate(F.max_pool2d(z, 2), size=y.shape[-2:]), y], 1),
    "channel shuffle": shuffle_channels,
    "attention": attend,
}


@pytest.mark.parametrize("activation", [F.relu, F.relu6, lambda x: x], ids=["relu", "relu6", "none"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("is_dynamic", [False, True], ids=["batch", "batch and size"])
def test_biases_kept_next_to_functions_of_sizes(name, activation, is_dynamic, tmp_path):
    """The file has the SQNR of the simulation: the comparison after export raises no error."""
    torch.manual_seed(0)
    model = Network(FUNCTIONS[name], activation)
    model(torch.randn(2, 3, 16, 16))
    data = [torch.randn(8, 3, 16, 16) for _ in range(3)]
    module = clika_compile(
        model.eval(),
        tracing_inputs=[data[0][:1], torch.randn(2, 3, 24, 20) if is_dynamic else data[0][:2]],
        calibration_inputs=data,
        quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
        deployment_settings=DeploymentSettings_OpenVINO_ONNX(),
    )
    x = torch.randn(3, 3, 16, 16)
    expected = module(x)
    artifact = module.clika_export(tmp_path / "model.onnx")
    (found,) = load_registry().targets["openvino"].load(artifact)([x])
    assert 10 * torch.log10(expected.square().sum() / (found - expected).square().sum()) > 30


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(3, 4, 3), (2, 3, 8)),
        (nn.ConvTranspose2d(3, 4, 3), (2, 3, 8, 8)),
        (nn.Conv3d(3, 4, 3), (2, 3, 8, 8, 8)),
    ],
    ids=["conv1d", "conv_transpose2d", "conv3d"],
)
def test_separate_biases_only_in_int8_models(layer, shape):
    """A float model keeps its biases in the convolutions."""
    model = emit(clika_compile(layer.eval(), tracing_inputs=[torch.randn(shape)]).graph)
    separate_biases(model)
    assert "Add" not in {node.op_type for node in model.graph}
