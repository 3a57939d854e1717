"""Forms of an export: FP16, BF16, INT4, and selected outputs."""

import re

import onnx
import pytest
import torch
from onnx import TensorProto
from seeded_tensors import randn
from torch import nn
from torch.nn import functional as F

import clika_ref
from clika_ref import (
    ClikaCompileOptions,
    DeploymentSettings_ONNXRuntime_ONNX,
    DeploymentSettings_OpenVINO_ONNX,
    DeploymentSettings_TensorRT_LLM_ONNX,
    DeploymentSettings_TensorRT_ONNX,
    QuantizationSettings,
    clika_compile,
    export_configuration,
)
from clika_ref.core.errors import ModelError, TargetError
from clika_ref.targets import cpu

IMAGES = [randn(n, 3, 16, 16, seed=n) for n in (2, 4, 5, 6)]
WHOLE = QuantizationSettings(automatic_skip_quantization=False)
FEW = QuantizationSettings(
    automatic_skip_quantization=False, prefer_weights_only_quantization=True, weights_num_bits=4,
    weights_only_quantization_block_size=64,
)  # fmt: skip


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.linear = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Linear(16, 64)
        self.head, self.scale = nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x):
        pooled = F.relu(self.norm(self.conv(x))).mean((2, 3))
        wide = F.gelu(self.linear(pooled))
        return self.scale(self.head(wide)), wide, pooled


class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


def compile_net(deployment=None, settings=None):
    torch.manual_seed(0)
    return clika_compile(
        Net().eval(),
        tracing_inputs=IMAGES[:2],
        calibration_inputs=IMAGES if settings else None,
        quantization_settings=settings,
        deployment_settings=deployment,
    ).eval()


def read_dtypes(path):
    """The element types of weights and inputs of operators, by the operators that read them."""
    model = onnx.shape_inference.infer_shapes(onnx.load(path))
    values = (*model.graph.input, *model.graph.value_info, *model.graph.output)
    types = {v.name: v.type.tensor_type.elem_type for v in values}
    types |= {t.name: t.data_type for t in model.graph.initializer}
    return {node.op_type: types[node.input[0]] for node in model.graph.node if node.input}, model


@pytest.mark.parametrize("indices", [[0], [2, 0], [-1]])
def test_keep_outputs_at_idx_selects_outputs_in_order(indices, tmp_path):
    """`keep_outputs_at_idx` selects outputs in order and removes the nodes of others."""
    module = compile_net()
    with export_configuration(keep_outputs_at_idx=indices):
        artifact = module.clika_export(tmp_path / "net.onnx")  # which compares it with the module
    assert list(artifact.output_names) == [f"output_{index % 3}" for index in indices]
    kinds = [node.op_type for node in onnx.load(artifact.path).graph.node]
    assert ("LayerNormalization" in kinds) == (0 in indices), "what only other outputs need is left out"


def test_keep_outputs_at_idx_names_selected_outputs(tmp_path):
    """`output_names` name the selected outputs."""
    with export_configuration(keep_outputs_at_idx=[1, 0]):
        artifact = compile_net().clika_export(tmp_path / "net.onnx", output_names=["wide", "scaled"])
    assert artifact.output_names == ("wide", "scaled")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"keep_outputs_at_idx": [3]}, r"keep_outputs_at_idx contains 3, but the module returns 3 tensors"),
        ({"keep_outputs_at_idx": []}, r"keep_outputs_at_idx is \[\]. Give distinct indices"),
        ({"keep_outputs_at_idx": [0, 0]}, r"keep_outputs_at_idx is \[0, 0\]. Give distinct indices"),
        ({"keep_outputs_at_idx": ["x"]}, r"keep_outputs_at_idx is \['x'\]. Give distinct indices"),
        ({"keep_outputs_at_idx": [0, -3]}, r"keep_outputs_at_idx=\[0, -3\] selects an output twice: .* 3 tensors"),
        ({"export_fp16": "no"}, r"export_fp16 is 'no', a str. Give True or False"),
        ({"export_bf16": 1}, r"export_bf16 is 1, a int. Give True or False"),
        ({"export_fp16": None}, r"export_fp16 is None, a NoneType. Give True or False"),
        ({"export_int4": "yes"}, r"export_int4 is 'yes', a str. Give True or False"),
        ({"export_fp16": True, "export_bf16": True}, r"export_fp16 and export_bf16 are both True. Choose one"),
        ({"export_int4": True}, r"export_int4=True, but no layer has INT4 weights"),
    ],
)
def test_export_configuration_invalid_rejected(given, message, tmp_path):
    """An invalid configuration raises an error, and no file is written."""
    module = compile_net()
    with pytest.raises(ModelError, match=message), export_configuration(**given):
        module.clika_export(tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())


def test_export_fp16_twice_same_bytes(tmp_path):
    """Two FP16 exports have the same bytes."""
    module = compile_net(DeploymentSettings_TensorRT_ONNX(), WHOLE)
    with export_configuration(export_fp16=True):
        files = [module.clika_export(tmp_path / f"{name}.onnx").path.read_bytes() for name in "ab"]
    assert files[0] == files[1]


def test_export_fp16_keeps_interface_and_halves_weights(tmp_path):
    """An FP16 file keeps float32 inputs and outputs and halves the weights."""
    module = compile_net()
    whole = module.clika_export(tmp_path / "whole.onnx")
    with export_configuration(export_fp16=True):
        artifact = module.clika_export(tmp_path / "half.onnx")
    read, model = read_dtypes(artifact.path)
    assert {read[kind] for kind in ("Conv", "Gemm", "LayerNormalization")} == {TensorProto.FLOAT16}
    assert {v.type.tensor_type.elem_type for v in (*model.graph.input, *model.graph.output)} == {TensorProto.FLOAT}
    assert artifact.facts["bytes"] < 0.6 * whole.facts["bytes"]


@pytest.mark.parametrize("form", ["export_fp16", "export_bf16"])
@pytest.mark.parametrize("deployment", [DeploymentSettings_TensorRT_ONNX(), DeploymentSettings_OpenVINO_ONNX()])
def test_export_fp16_bf16_quantized_scales_without_casts(form, deployment, tmp_path):
    """Quantized FP16 and BF16 files have scales of that dtype and no extra casts."""
    module = compile_net(deployment, WHOLE)
    if deployment.is_OpenVINO_ONNX() and form == "export_bf16" and "avx512_bf16" in cpu.cpu_flags():
        # OpenVINO 2026.4 computes something else at each run there; the comparison rejects such a file.
        with export_configuration(export_bf16=True), pytest.raises(TargetError, match="cannot verify the artifact"):
            module.clika_export(tmp_path / "half.onnx")
        module.clika_state.configure(deployment, ClikaCompileOptions(compare_after_export=False))
    with export_configuration(**{form: True}):
        artifact = module.clika_export(tmp_path / "half.onnx")
    read, model = read_dtypes(artifact.path)
    onnx.checker.check_model(model, full_check=True)
    half = TensorProto.FLOAT16 if form == "export_fp16" else TensorProto.BFLOAT16
    assert read["QuantizeLinear"] == read["Conv"] == read["Gemm"] == half
    assert sum(node.op_type == "Cast" for node in model.graph.node) == 4, "one for the input and each output"
    if deployment.is_TensorRT_ONNX():
        from clika_ref_tensorrt.rules import find_violations  # noqa: PLC0415 - of one of the two

        assert find_violations(model) == []


def test_export_fp16_positions_stay_float32(tmp_path):
    """Positions and angles stay float32 until they are combined with activations."""

    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("frequencies", 1 / 10 ** torch.linspace(0, 3, 8))
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            angles = torch.arange(x.shape[1], device=x.device)[:, None].float() * self.frequencies
            return self.linear(x) * angles.cos()

    torch.manual_seed(0)
    module = clika_compile(Rotary().eval(), tracing_inputs=[torch.randn(1, n, 8) for n in (3000, 40)])
    with export_configuration(export_fp16=True):
        artifact = module.clika_export(tmp_path / "half.onnx")
    read, _ = read_dtypes(artifact.path)
    assert (read["Cos"], read["Gemm" if "Gemm" in read else "MatMul"]) == (TensorProto.FLOAT, TensorProto.FLOAT16)


def test_export_fp16_overflow_names_node(tmp_path):
    """An FP16 overflow raises an error that names the first node and suggests BF16."""

    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return (self.linear(x) * 3000.0 * 400.0).relu() * 1e-5

    module = clika_compile(Large().eval(), tracing_inputs=[torch.ones(2, 4)])
    message = r"finite in float32, but mul \(mul.*returns inf or NaN.*export_bf16=True"
    with pytest.raises(TargetError, match=message), export_configuration(export_fp16=True):
        module.clika_export(tmp_path / "half.onnx")
    assert not list(tmp_path.iterdir())


def test_export_fp16_inf_mask_not_named_as_overflow(tmp_path):
    """A mask of infinities is not reported as the overflowing node."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, keep):
            scores = self.linear(x).masked_fill(~keep, float("-inf")).softmax(-1)
            return (scores.exp() * 3000.0 * 400.0).relu() * 1e-5

    inputs = torch.ones(2, 4), torch.tensor([True, False, True, True])
    module = clika_compile(Masked().eval(), tracing_inputs=[inputs])
    message = r"finite in float32, but mul \(mul"
    with pytest.raises(TargetError, match=message), export_configuration(export_fp16=True):
        module.clika_export(tmp_path / "half.onnx")


def test_export_fp16_unsupported_quantizers_rejected_once(tmp_path):
    """Unsupported FP16 quantizers are reported once, with the remedy."""
    module = compile_net(DeploymentSettings_ONNXRuntime_ONNX(), WHOLE)
    with pytest.raises(TargetError) as error, export_configuration(export_fp16=True):
        module.clika_export(tmp_path / "half.onnx")
    told = str(error.value).splitlines()
    assert len(told) == len({*told}) == 2
    assert re.search(
        r"  quantize in <root>, \d nodes: it computes QuantizeLinear in float16.*\. Export without export_fp16, or "
        r"export a "
        r"float module; if the model itself quantizes, convert",
        told[1],
    )
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("factor", [1e5, 100_000])
def test_export_fp16_large_constant_multiplied_in_float32(factor, tmp_path):
    """A constant beyond the FP16 range is multiplied in float32."""
    module = clika_compile(nn.Sequential(nn.Linear(4, 4), Scaled(factor)).eval(), tracing_inputs=[torch.ones(2, 4)])
    with export_configuration(export_fp16=True):
        artifact = module.clika_export(tmp_path / "half.onnx")
    read, _ = read_dtypes(artifact.path)
    assert (read["Gemm"], read["Mul"]) == (TensorProto.FLOAT16, TensorProto.FLOAT)


def test_export_fp16_mask_of_float32_min_stays_finite(tmp_path):
    """A mask of the float32 minimum stays finite in FP16."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, keep):
            scores = self.linear(x).masked_fill(~keep, torch.finfo(torch.float32).min)
            return scores.softmax(-1)

    module = clika_compile(Masked().eval(), tracing_inputs=[(torch.ones(2, 4), torch.zeros(2, 4, dtype=torch.bool))])
    with export_configuration(export_fp16=True):
        module.clika_export(tmp_path / "half.onnx")  # NaN where the mask became infinite
    assert (tmp_path / "half.onnx").exists()


@pytest.mark.parametrize(
    ("wish", "kind"), [(None, TensorProto.INT4), (True, TensorProto.INT4), (False, TensorProto.INT8)]
)
def test_export_int4_none_true_false_selects_dtype(wish, kind, tmp_path):
    """`export_int4` selects INT4 or INT8 storage; the default is INT4."""
    module = compile_net(DeploymentSettings_OpenVINO_ONNX(), FEW)
    with export_configuration(export_int4=wish):
        artifact = module.clika_export(tmp_path / "few.onnx")
    integers = [t.data_type for t in onnx.load(artifact.path).graph.initializer if t.dims == [64, 64]]
    assert integers == [kind]


def test_export_int4_false_unsupported_by_target_rejected(tmp_path):
    """`export_int4=False` raises an error for a target without INT8 weights."""
    module = compile_net(DeploymentSettings_TensorRT_ONNX(), FEW)
    message = (
        "export_int4=False stores INT4 weights as INT8, but tensorrt does not support INT8 weight-only layers. "
        "Export without it."
    )
    for call in (lambda: module.clika_export(tmp_path / "few.onnx"), module.clika_explain):
        with pytest.raises(TargetError, match=message), export_configuration(export_int4=False):
            call()
    assert not [*tmp_path.iterdir()]


def test_clika_explain_follows_export_configuration():
    """`clika_explain` uses the export configuration."""
    module = compile_net(DeploymentSettings_OpenVINO_ONNX(), FEW)
    with export_configuration(export_int4=False, keep_outputs_at_idx=[0]):
        found = module.clika_explain()
    runs = {n.scope: n.runs for n in found.nodes if n.macs and n.planned != "float"}
    assert runs == dict.fromkeys(("linear", "head"), "int8 weights")
    with export_configuration(keep_outputs_at_idx=[2]):
        assert [n.scope for n in module.clika_explain().nodes if n.macs] == ["conv"], "what lies before that output"
    with export_configuration(export_fp16=True):
        assert "to" in {n.operator for n in module.clika_explain().nodes}, "a cast of the input"
    message = "export_int4=True, but no layer has INT4 weights"
    with pytest.raises(ModelError, match=message), export_configuration(export_int4=True):
        compile_net(DeploymentSettings_OpenVINO_ONNX(), WHOLE).clika_explain()


def test_clika_compare_targets_follows_export_configuration():
    """`clika_compare_targets` uses the export configuration."""
    module = compile_net(DeploymentSettings_TensorRT_ONNX(), FEW)
    rows = [module.clika_compare_targets(DeploymentSettings_TensorRT_ONNX()).rows[0]]
    with export_configuration(export_fp16=True, export_int4=True):
        rows += module.clika_compare_targets(DeploymentSettings_TensorRT_ONNX()).rows
    assert rows[1].bytes < 0.8 * rows[0].bytes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("bits", "block"), [(8, 0), (8, 32), (4, 64)])
def test_export_fp16_model_weight_only_int8_int4(dtype, bits, block, tmp_path):
    """FP16 and BF16 models have INT8 and INT4 weights with scales of their dtype."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64)).eval().to(dtype)
    settings = QuantizationSettings(
        automatic_skip_quantization=False, prefer_weights_only_quantization=True, weights_num_bits=bits,
        weights_only_quantization_block_size=block,
    )  # fmt: skip
    x = torch.randn(20, 128, dtype=dtype)
    module = clika_compile(
        model,
        tracing_inputs=[x],
        calibration_inputs=[x, x * 2],
        quantization_settings=settings,
        deployment_settings=DeploymentSettings_TensorRT_LLM_ONNX(),
    ).eval()
    error = (module(x).float() - model(x).float()).norm() / model(x).float().norm()
    assert error < (0.02 if bits == 8 else 0.2)
    artifact = module.clika_export(tmp_path / "net.onnx")  # which compares it with the module
    read, found = read_dtypes(artifact.path)
    half = TensorProto.FLOAT16 if dtype == torch.float16 else TensorProto.BFLOAT16
    assert read["MatMul"] == half
    scales = [t for t in found.graph.initializer if t.name.endswith("_scale")]
    assert [t.data_type for t in scales] == [half] * 2


@pytest.mark.parametrize("name", ["DeploymentSettings_TFLite", "DeploymentSettings_QNN"])
def test_retired_deployment_settings_raise(name):
    """The deployment settings of retired targets raise an error with the remedy."""
    with pytest.raises(TargetError, match=r"is not implemented. .* docs/example-plugin.md"):
        getattr(clika_ref, name)()
