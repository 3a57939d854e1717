"""Nodes that are written so that ONNX Runtime does not fuse them: their results and kernels."""

import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from clika_ref_onnxruntime.fusion_barriers import prevent_fusion
from torch import nn

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile


def read_optimized_op_types(path, folder, **axes):
    """Return the operators in the optimized graph of a file, with some dims fixed."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    for name, side in axes.items():
        options.add_free_dimension_override_by_name(name, side)
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(self.inner(x) + x)


class Biased(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.inner(torch.relu(x)))


@pytest.mark.parametrize("axes", [(), (2, 3)])
def test_fusion_barriers_bias_of_int8_matmul_stays_sum(tmp_path, axes):
    """A bias after an INT8 product stays a sum if dims are fixed later."""
    module = clika_compile(
        Biased().eval(),
        calibration_inputs=[torch.randn(2, 3, 8), torch.randn(5, 6, 8)],
        quantization_settings=QuantizationSettings(),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )
    path = module.clika_export(tmp_path / "biased.onnx").path
    dims = onnx.load(path).graph.input[0].type.tensor_type.shape.dim
    fixed = {dim.dim_param: side for dim, side in zip(dims, axes, strict=False)}
    kinds = read_optimized_op_types(path, tmp_path, **fixed)
    assert {"MatMulIntegerToFloat", "Sum"} <= {*kinds}
    assert "DequantizeLinear" not in kinds


def test_fusion_barriers_sum_before_layer_norm_not_fused(tmp_path):
    """A sum before a layer norm stays a sum and a norm."""
    module = clika_compile(Residual().eval(), tracing_inputs=[torch.randn(2, 3, 4), torch.randn(5, 6, 4)])
    path = module.clika_export(tmp_path / "residual.onnx").path
    assert [node.op_type for node in onnx.load(path).graph.node].count("Sum") == 1
    kinds = read_optimized_op_types(path, tmp_path)
    assert {"Sum", "LayerNormalization"} <= {*kinds}
    assert "SkipLayerNormalization" not in kinds


@pytest.mark.parametrize("cut", [nn.ReLU(), nn.ReLU6(), nn.Hardtanh(-0.5, 0.5)])
@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("batches", [(4,), (4, 2)])
def test_fusion_barriers_clip_of_int8_linear_keeps_int8(tmp_path, cut, weights_only, batches):
    """An activation after an INT8 linear layer keeps it in INT8."""
    data = [torch.randn(4, 32) for _ in range(2)]
    module = clika_compile(
        nn.Sequential(nn.Linear(32, 64), cut, nn.LayerNorm(64), nn.Linear(64, 32)).eval(),
        tracing_inputs=[data[0][:n] for n in batches],
        calibration_inputs=data,
        quantization_settings=QuantizationSettings(
            automatic_skip_quantization=False, prefer_weights_only_quantization=weights_only
        ),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )
    path = module.clika_export(tmp_path / "cut.onnx").path  # compared with the module on the way
    kinds = read_optimized_op_types(path, tmp_path)
    assert not {"DequantizeLinear", "Gemm", "FusedGemm"} & {*kinds}, kinds
    assert kinds.count("MatMulNBits" if weights_only else "QGemm") == 2
    assert module.clika_explain().share() == 1


def test_fusion_barriers_relu_between_int8_layers_stays_relu(tmp_path):
    """A relu before a quantized layer stays a Relu."""
    data = [torch.randn(4, 32) for _ in range(2)]
    module = clika_compile(
        nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).eval(),
        calibration_inputs=data,
        quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )
    path = module.clika_export(tmp_path / "cut.onnx").path
    assert "Relu" in [node.op_type for node in onnx.load(path).graph.node]
    assert read_optimized_op_types(path, tmp_path).count("QGemm") == 2


def test_prevent_fusion_visits_shared_moves_once():
    """Concatenations of a value with itself have exponentially many paths."""
    value = start = ir.val("x", ir.DataType.FLOAT, [1, 1])
    nodes: list[ir.Node] = []
    for _ in range(200):
        nodes.append(ir.node("Concat", [value, value], {"axis": 1}))
        value = nodes[-1].outputs[0]
    nodes.append(ir.node("Softmax", [value]))
    graph = ir.Graph([start], nodes[-1].outputs, nodes=nodes, opset_imports={"": 21})
    prevent_fusion(ir.Model(graph, ir_version=10))
    assert [node.op_type for node in graph][-1] == "Softmax"
