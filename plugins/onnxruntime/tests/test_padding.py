"""Padding before a convolution becomes part of it in the file: no Pad runs between two INT8 layers."""

import math

import onnx
import pytest
import torch
from clika_ref_onnxruntime.target import OnnxRuntime
from torch import nn
from torch.nn import functional as F

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile


class SameConv2d(nn.Conv2d):
    """A convolution that pads by TensorFlow's "same" formula."""

    def forward(self, x):
        pads = []
        for n, k, s in zip(x.shape[:1:-1], self.kernel_size[::-1], self.stride[::-1], strict=True):
            total = max((math.ceil(n / s) - 1) * s + k - n, 0)
            pads += [total // 2, total - total // 2]
        return F.conv2d(F.pad(x, pads), self.weight, self.bias, self.stride)


def read_nodes(path):
    return onnx.load(path).graph.node


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_clika_export_padding_by_sizes_becomes_same_upper(tmp_path, stride):
    """Padding by TensorFlow's "same" formula becomes SAME_UPPER, or numbers, and is right for odd and even sizes."""
    torch.manual_seed(0)
    model = nn.Sequential(SameConv2d(3, 4, 3, stride), nn.ReLU()).eval()
    module = clika_compile(model, tracing_inputs=[torch.randn(1, 3, 12, 17), torch.randn(2, 3, 19, 14)])
    artifact = module.clika_export(tmp_path / "model.onnx")
    nodes = read_nodes(artifact.path)
    assert "Pad" not in {node.op_type for node in nodes}
    (layer,) = [node for node in nodes if node.op_type == "Conv"]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in layer.attribute}
    assert attributes.get("auto_pad", b"") == (b"SAME_UPPER" if stride > 1 else b"")
    run = OnnxRuntime().load(artifact)
    for size in (7, 8, 9, 10):
        x = torch.randn(2, 3, size, size + 1)
        (found,) = run([x])
        torch.testing.assert_close(found, model(x))


def test_clika_export_padded_int8_layers_have_no_pad(tmp_path):
    """Uneven padding between two INT8 convolutions is folded, and all layers run in INT8."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(3, 8, 3, 2), nn.ReLU6(), nn.ZeroPad2d(2), nn.Conv2d(8, 8, 5), nn.ReLU6()
    )
    data = [torch.randn(4, 3, 16, 16) for _ in range(4)]
    module = clika_compile(
        model.eval(),
        tracing_inputs=[data[0][:1], data[0]],
        calibration_inputs=data,
        quantization_settings=QuantizationSettings(),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )
    kinds = [node.op_type for node in module.graph.nodes]
    assert kinds.count("pad") == 2, "the stored graph keeps its padding"
    nodes = read_nodes(module.clika_export(tmp_path / "model.onnx").path)
    assert "Pad" not in {node.op_type for node in nodes}
    assert not module.clika_explain().not_quantized
