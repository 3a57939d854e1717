"""The target ``tensorrt``: files that follow its rules, and rejected models."""

import inspect
import re
import sys
from functools import partial

import onnx
import pytest
import torch
from clika_ref_tensorrt.rules import find_node_fault, find_violations
from clika_ref_tensorrt.scheme import WEIGHT_ONLY_SCHEME
from clika_ref_tensorrt.target import TensorRt
from networks import Net, compile_net, make_images
from onnx.reference import ReferenceEvaluator
from torch import nn
from torch.nn import functional as F

from clika_ref import (
    ClikaCompileOptions,
    ClikaModule,
    DeploymentSettings_TensorRT_LLM_ONNX,
    DeploymentSettings_TensorRT_ONNX,
    QuantizationSettings,
    clika_compile,
)
from clika_ref.core.errors import ModelError, TargetError
from clika_ref.core.registry import load_registry
from clika_ref.export.target_comparison import TargetComparison
from clika_ref.quantization.request import QuantizationRequest


def test_clika_export_keeps_rules_and_writes_script(tmp_path):
    """The file keeps the rules, and the script has the observed sizes."""
    module = compile_net()
    artifact = module.clika_export(tmp_path / "net.onnx")  # which compares it with the module
    assert find_violations(onnx.load(artifact.path)) == []
    assert (tmp_path / "net.onnx.trtexec.sh").read_text() == (
        '#!/bin/sh\ncd "$(dirname "$0")" || exit\n'
        "trtexec --onnx=net.onnx --saveEngine=net.onnx.engine --stronglyTyped --minShapes=x:1x3x16x16 "
        "--optShapes=x:4x3x16x16 --maxShapes=x:6x3x16x16\n"
    )
    found = module.clika_explain()
    assert found.target == "tensorrt, emulated by ONNX Runtime"
    assert found.share() == found.share(planned=True) == 1.0


def test_onnx_evaluator_and_emulation_equal_module(tmp_path):
    """ONNX's evaluator and the emulation compute the same as the module."""
    module, (x,) = compile_net(), make_images(2)
    artifact = module.clika_export(tmp_path / "net.onnx")
    torch.manual_seed(0)
    model = onnx.version_converter.convert_version(onnx.load(artifact.path), 21)  # its evaluator knows no older pairs
    found = {
        "onnx": torch.from_numpy(ReferenceEvaluator(model).run(None, {"x": x.numpy()})[0]),
        "stand-in": TensorRt().load(artifact)([x])[0],
    }
    with torch.no_grad():
        integers, exact = module(x), Net().eval()(x)
    rounded = (integers - exact).square().sum()
    for name, result in found.items():
        assert (result - integers).square().sum() < 0.01 * rounded, name  # of which sums rounded otherwise are little


@pytest.mark.parametrize(("groups", "scales"), [(1, (8,)), (2, ()), (8, ())])
def test_conv_transpose_of_groups_has_one_scale(tmp_path, groups, scales):
    """A quantized transposed convolution with groups has one scale."""
    torch.manual_seed(0)
    data = [torch.randn(4, 8, 8, 8) for _ in range(4)]
    module = clika_compile(
        nn.Sequential(nn.ConvTranspose2d(8, 8, 4, 2, 1, groups=groups), nn.BatchNorm2d(8)).eval(),
        calibration_inputs=data,
        quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
        deployment_settings=DeploymentSettings_TensorRT_ONNX(),
    )
    artifact = module.clika_export(tmp_path / "up.onnx")  # which compares it with the module
    model = onnx.load(artifact.path)
    assert find_violations(model) == []
    (layer,) = [node for node in model.graph.node if node.op_type == "ConvTranspose"]
    (weight,) = [node for node in model.graph.node if node.output[0] == layer.input[1]]
    assert [tuple(t.dims) for t in model.graph.initializer if t.name == weight.input[1]] == [scales]
    assert [n.runs for n in module.clika_explain().nodes if n.macs] == ["int8"]


class JoinedWithConstants(nn.Module):
    """Joins values with a constant, twice, that is the weight of another layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Conv2d(8, 8, 1), nn.Conv2d(16, 4, 8)
        self.edge = nn.Parameter(3 * torch.randn(4, 4, 8, 8))

    def forward(self, x):
        return self.outer(torch.cat([self.edge, self.inner(x), self.edge], 1)) + F.conv2d(x[:, :4], self.edge)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_concat_constants_share_scale_of_quantized_operands(tmp_path, is_loaded):
    """Constants that are joined with quantized tensors have their scale."""
    data = [torch.randn(4, 8, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    module = clika_compile(
        JoinedWithConstants().eval(),
        calibration_inputs=data,
        quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
        deployment_settings=DeploymentSettings_TensorRT_ONNX(),
    ).eval()
    if is_loaded:
        loaded = ClikaModule()
        loaded.load_state_dict(module.state_dict())
        assert torch.equal(loaded.eval()(data[0]), module(data[0]))
        module = loaded
    deployment = DeploymentSettings_TensorRT_ONNX()
    artifact = module.clika_export(tmp_path / "net.onnx", data[0], deployment_settings=deployment)
    assert find_violations(onnx.load(artifact.path)) == []


class SharedByJoins(nn.Module):
    """Concatenates one value with a far larger one, and with one of its own scale."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.large, self.small, self.shared = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.one, self.other = nn.Conv2d(16, 8, 3), nn.Conv2d(16, 8, 3)

    def forward(self, x):
        large, small, shared = self.large(x) * 100, self.small(x), self.shared(x)
        return self.one(torch.cat([large, shared], 1)), self.other(torch.cat([shared, small], 1))


def test_concat_shared_scale_covers_largest_operand(tmp_path):
    """A scale that several concatenations share covers the largest operand."""
    data = [torch.randn(4, 8, 12, 12, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    module = clika_compile(
        SharedByJoins().eval(),
        calibration_inputs=data,
        quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
        deployment_settings=DeploymentSettings_TensorRT_ONNX(),
    ).eval()
    with torch.no_grad():
        found, wanted = module(data[0])[0], SharedByJoins().eval()(data[0])[0]
    assert (found - wanted).square().sum() < 0.001 * wanted.square().sum()
    assert find_violations(onnx.load(module.clika_export(tmp_path / "net.onnx").path)) == []


def test_clika_export_topk_above_3840_raises(tmp_path):
    """A larger topk than TensorRT's limit raises; other broken rules warn."""

    def export_function(function):
        module = clika_compile(function, tracing_inputs=[torch.randn(4000)], logs_dir=tmp_path / "logs")
        return module.clika_export(tmp_path / "net.onnx", deployment_settings=DeploymentSettings_TensorRT_ONNX())

    message = r"topk in .*: TopK requests 3,841 elements, but TensorRT supports at most 3,840. Request fewer."
    with pytest.raises(TargetError, match=message):
        export_function(lambda x: x.topk(3841)[0])
    export_function(lambda x: x.topk(3840)[0])
    with pytest.raises(TargetError, match=r"sort in .*: TopK requests 4,000 elements"):
        export_function(lambda x: x.sort()[0])
    export_function(lambda x: x.abs().to(torch.uint8).float())
    told = "".join(log.read_text() for log in (tmp_path / "logs").glob("*.log"))
    assert "Warning: net.onnx violates 1 rules of tensorrt:" in told
    assert told.count("rules of tensorrt:") == 1, "of two exports"
    assert "[data-type] to/Cast: Cast computes with UINT8, which is supported only for inputs and outputs" in told


def test_clika_export_unsupported_nodes_reported_together(tmp_path):
    """All unsupported calls are reported at once, with their lines."""

    class IntegerSums(nn.Module):
        def forward(self, x, image):
            bits = x.int() | 1
            brighter = image + image
            return bits, brighter, x.to(torch.int16) * 2, torch.unique(x), x[x > 0]

    inputs = torch.randn(4, 4), torch.ones(4, 4, dtype=torch.uint8)
    module = clika_compile(
        IntegerSums(), tracing_inputs=[inputs], deployment_settings=DeploymentSettings_TensorRT_ONNX()
    )
    with pytest.raises(TargetError) as error:
        module.clika_export(tmp_path / "net.onnx")
    told = str(error.value).splitlines()
    assert told[0].startswith("tensorrt cannot run 6 nodes of IntegerSums:")
    for operator, message in (
        ("bitwise_or", "BitwiseOr is not supported. Use other operators, or a plugin of TensorRT."),
        (
            "add",
            "Add computes with UINT8, which is supported only for inputs and outputs. Cast it to INT32 or to floats.",
        ),
        ("to", "Cast makes INT16, which TensorRT does not support. Use INT32 or INT64."),
        ("mul", "Mul reads INT16, which TensorRT does not support. Use INT32 or INT64."),
        ("unique2", "Unique is not supported"),
        ("index", "Compress is not supported"),
    ):
        assert any(re.search(rf"  {operator} in .*test_target.py:\d+.*: {message}", line) for line in told), operator
    assert not [*tmp_path.iterdir()]


def test_clika_export_bool_and_integer_sums_keep_rules(tmp_path):
    """Bools and integer sums are written in the supported form."""

    def model(x, image):
        mask = x > 0
        chosen = torch.where(mask, x < 1, x < 2)
        scattered = mask.index_put((torch.tensor([0]),), chosen[:1])
        counts = mask.long().sum(1), torch.cumsum(mask.long(), 1)
        return mask.any(1), mask.all(), chosen, mask.amax(1), mask.sort(1)[0], scattered, *counts, image.float()

    inputs = torch.randn(4, 4), torch.ones(4, 4, dtype=torch.uint8)
    module = clika_compile(model, tracing_inputs=[inputs], deployment_settings=DeploymentSettings_TensorRT_ONNX())
    artifact = module.clika_export(tmp_path / "net.onnx")  # which compares it with the module
    assert TensorRt().check(artifact.path) == []


def test_find_node_fault_plugin_operator_accepted():
    """Operators that a plugin may provide are accepted."""
    value = partial(onnx.helper.make_tensor_value_info, elem_type=onnx.TensorProto.FLOAT, shape=[2])
    nodes = [onnx.helper.make_node("Mine", ["x"], ["y"], domain="local")]
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("local", 1)]
    graph = onnx.helper.make_graph(nodes, "mine", [value("x")], [value("y")])
    assert inspect.unwrap(find_node_fault)(None, onnx.helper.make_model(graph, opset_imports=opsets)) is None


def test_clika_export_float64_raises(tmp_path):
    """Floats of 64 bits raise."""
    module = clika_compile(
        nn.Linear(3, 2).double(),
        tracing_inputs=[torch.ones(1, 3, dtype=torch.float64)],
        deployment_settings=DeploymentSettings_TensorRT_ONNX(),
    )
    with pytest.raises(TargetError, match=r"Gemm computes in float64, which TensorRT does not support. Export the"):
        module.clika_export(tmp_path / "net.onnx")


@pytest.mark.parametrize(
    ("deployment", "bits", "block"),
    [
        (DeploymentSettings_TensorRT_ONNX(), 4, 64),
        (DeploymentSettings_TensorRT_LLM_ONNX(), 4, 128),
        (DeploymentSettings_TensorRT_LLM_ONNX(), 8, 0),
    ],
)
def test_weight_only_layers_use_low_bit_weights(deployment, bits, block, tmp_path):
    """Weight-only layers have low-bit weights."""
    torch.manual_seed(0)
    x = torch.randn(4, 128)
    settings = QuantizationSettings(
        prefer_weights_only_quantization=True,
        weights_num_bits=bits,
        weights_only_quantization_block_size=block,
        automatic_skip_quantization=False,
    )
    module = clika_compile(
        nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64)).eval(),
        tracing_inputs=[x],
        calibration_inputs=[x],
        quantization_settings=settings,
        deployment_settings=deployment,
    ).eval()
    artifact = module.clika_export(tmp_path / "net.onnx")
    model = onnx.load(artifact.path)
    held = [node for node in model.graph.node if node.op_type == "DequantizeLinear"]
    assert len(held) == 2
    assert load_registry().targets[deployment.target].check(artifact.path) == []
    assert [n.runs for n in module.clika_explain().nodes if n.macs] == [f"int{bits} weights"] * 2
    assert [v.rule for v in find_violations(model)] == ([] if bits == 4 else ["all-inputs"] * 2)


@pytest.mark.parametrize(
    ("deployment", "wish", "planned"),
    [
        (DeploymentSettings_TensorRT_LLM_ONNX(), None, "int8 weights"),
        (DeploymentSettings_TensorRT_LLM_ONNX(), False, "int8"),
        (DeploymentSettings_TensorRT_ONNX(), None, "int8"),
    ],
)
def test_tensorrt_llm_defaults_to_weight_only(deployment, wish, planned):
    """TensorRT-LLM quantizes weights only, unless the user requests more."""
    torch.manual_seed(0)
    x = torch.randn(4, 32)
    settings = QuantizationSettings(prefer_weights_only_quantization=wish, automatic_skip_quantization=False)
    module = clika_compile(
        nn.Linear(32, 32).eval(),
        tracing_inputs=[x],
        calibration_inputs=[x],
        quantization_settings=settings,
        deployment_settings=DeploymentSettings_TensorRT_ONNX(),
    )
    assert [n.planned for n in module.clika_explain(deployment).nodes if n.macs] == [planned]


def test_quantization_request_weight_only_activation_bits_raise():
    """Bits for activations that stay float raise."""
    message = r"prefer_weights_only_quantization keeps activations in float, but activations_num_bits=4"
    with pytest.raises(ModelError, match=message):
        QuantizationRequest(TensorRt("tensorrt-llm", WEIGHT_ONLY_SCHEME), QuantizationSettings(activations_num_bits=4))


def test_find_violations_unknown_operator_in_branch_reported():
    """An unknown operator in a branch is reported, and the check continues."""
    make = onnx.helper.make_node
    value = partial(onnx.helper.make_tensor_value_info, elem_type=onnx.TensorProto.FLOAT, shape=[2])
    kinds = {"then_branch": ("Abs", ""), "else_branch": ("Odd", "com.microsoft")}
    graphs = {
        name: onnx.helper.make_graph([make(kind, ["x"], ["end"], kind, domain=domain)], name, [], [value("end")])
        for name, (kind, domain) in kinds.items()
    }
    flag = onnx.helper.make_tensor_value_info("flag", onnx.TensorProto.BOOL, [])
    graph = onnx.helper.make_graph(
        [make("If", ["flag"], ["y"], "choice", **graphs)], "if", [flag, value("x")], [value("y")]
    )
    model = onnx.helper.make_model(
        graph, opset_imports=[*map(onnx.helper.make_opsetid, ["", "com.microsoft"], [18, 1])]
    )
    assert [(v.rule, v.node) for v in find_violations(model)] == [("known-operators", "Odd")]


def test_emulated_target_not_timed():
    """An emulated target is timed neither for a table nor for a decision."""
    (row,) = compile_net().clika_compare_targets(DeploymentSettings_TensorRT_ONNX()).rows
    assert (row.seconds, row.ratio, row.share) == (None, None, 1.0)
    assert "not measured: emulated" in str(TargetComparison([row]))
    message = (
        "optimize_for='latency' measures layers, but tensorrt is emulated by ONNX Runtime here.* optimize_for='size'"
    )
    with pytest.raises(TargetError, match=message):
        QuantizationRequest(TensorRt(), QuantizationSettings(), options=ClikaCompileOptions(optimize_for="latency"))


def test_missing_emulator_still_writes_file(tmp_path, monkeypatch):
    """Without the emulator, files are written, and the checks name the command to install it."""
    module = compile_net()
    module.clika_state.logs_dir = tmp_path / "logs"
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # which Python takes for not installed
    message = "tensorrt is emulated by ONNX Runtime here, and onnxruntime is not installed; pip install onnxruntime"
    artifact = module.clika_export(tmp_path / "net.onnx")
    assert find_violations(onnx.load(artifact.path)) == []
    assert f"not compared: {message}" in "".join(log.read_text() for log in (tmp_path / "logs").glob("*.log"))
    assert module.clika_explain().share() == 1.0
    (row,) = module.clika_compare_targets(DeploymentSettings_TensorRT_ONNX()).rows
    assert (row.layers, row.share, row.unsupported_reason) == (7, 1.0, "")
    assert TensorRt().unavailable_reason() == message
    with pytest.raises(TargetError, match=message):
        TensorRt().load(artifact)
