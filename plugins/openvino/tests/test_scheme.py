"""The scheme of OpenVINO: layers planned in INT8 run in INT8, and compute the results of the module."""

import pytest
import torch
from clika_ref_openvino.scheme import MIXED_SCHEME, avoid_overflow
from clika_ref_openvino.target import OpenVino
from layer_chains import Chain
from seeded_tensors import randn
from torch import nn
from torch.nn import functional as F

from clika_ref import DeploymentSettings_OpenVINO_ONNX, QuantizationSettings, clika_compile
from clika_ref.core.errors import ModelError


def make_image():
    return randn(2, 8, 6, 6)


torch.manual_seed(0)
TWICE = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))


TABLE, MATRICES = randn(8, 4), randn(3, 64, 32) * 0.1

CASES = {
    "conv1d": (lambda: nn.Conv1d(8, 8, 3), None, randn(2, 8, 6), 1),
    "conv2d": (lambda: nn.Conv2d(8, 8, 3), lambda y, _: F.silu(y), make_image(), 1),
    "depthwise": (lambda: nn.Conv2d(8, 8, 3, groups=8), None, make_image(), 1),
    "conv3d": (lambda: nn.Conv3d(4, 4, 2), None, randn(1, 4, 3, 4, 4), 1),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(8, 4, 3), None, randn(2, 8, 6).abs(), 1),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(8, 4, 3, 2), None, make_image().abs(), 1),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(4, 4, 2), None, randn(1, 4, 3, 4, 4).abs(), 1),
    "linear": (lambda: nn.Sequential(nn.Linear(8, 600), nn.GELU(), nn.Linear(600, 4)), None, randn(3, 8), 2),
    "linear of rank 3": (lambda: nn.Linear(8, 8, bias=False), None, randn(2, 3, 8), 1),
    "matmul": (lambda: nn.Linear(8, 8), lambda y, _: y @ TABLE, randn(2, 3, 8), 2),
    "residual": (lambda: nn.Conv2d(8, 8, 1), lambda y, _: F.relu(TWICE(y) + y), make_image(), 3),
    "join": (lambda: nn.Conv2d(8, 4, 1), lambda y, _: TWICE(torch.cat([y, F.relu(y)], 1)), make_image(), 3),
    "pool": (lambda: nn.Conv2d(8, 8, 1), lambda y, _: TWICE(F.max_pool2d(F.relu(y), 2)), make_image(), 4),
    "moved": (
        lambda: nn.Conv2d(8, 8, 1),
        lambda y, _: F.linear(y.flatten(2).permute(0, 2, 1), torch.ones(3, 8), torch.ones(3)),
        make_image(),
        4,
    ),
}


def compile_chain(layer, after, x, smooth_quant="auto", **settings):
    torch.manual_seed(0)
    module = Chain(layer(), after) if after is not None else Chain(layer())
    return clika_compile(
        module.eval(),
        tracing_inputs=[x],
        calibration_inputs=[x],
        quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
        deployment_settings=DeploymentSettings_OpenVINO_ONNX(**settings),
        smooth_quant=smooth_quant,
    ).eval()


@pytest.mark.parametrize("name", CASES)
def test_scheme_planned_int8_layers_run_in_int8(name, tmp_path):
    """Layers planned in INT8 run in INT8 and compute the same as the module."""
    layer, after, x, count = CASES[name]
    module = compile_chain(layer, after, x, smooth_quant="off" if name == "moved" else "auto")  # a quotient is no move
    found = module.clika_explain()
    assert sum(node.planned == "int8" for node in found.nodes) == count
    assert not found.not_quantized, str(found)
    assert found.share() == 1.0
    artifact = module.clika_export(tmp_path / "model.onnx")  # which is compared with the module
    assert artifact.target == "openvino"


def test_explain_residual_add_fused_into_convolution():
    """A residual is added by the convolution before it."""
    layer, after, x, _ = CASES["residual"]
    runs = {node.operator: node.runs for node in compile_chain(layer, after, x).clika_explain().nodes}
    assert runs["add"] == "fused"


def test_explain_renamed_output_layer_runs_in_int8(tmp_path):
    """The runtime renames a dequantized output layer; its precision is still INT8."""
    module = compile_chain(nn.Identity, lambda y, _: torch.bmm(y, MATRICES), randn(3, 8, 64))
    (layer,) = module.clika_explain().nodes
    assert (layer.planned, layer.runs, layer.reason) == ("int8", "int8", "")
    artifact = module.clika_export(tmp_path / "model.onnx")
    assert OpenVino().profile(artifact, [randn(3, 8, 64)]).keys() >= {*artifact.output_names}


class Attention(nn.Module):
    """Attention with one head, with a given mask, or with a causal mask by default."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x, padding=None):
        y = self.layer(x)[:, None]
        if padding is None:
            return F.scaled_dot_product_attention(y, y, y, is_causal=True)
        return F.scaled_dot_product_attention(y, y, y, attn_mask=~padding[:, None, None, :])


@pytest.mark.parametrize("is_masked", [True, False])
@pytest.mark.parametrize("settings", [None, QuantizationSettings(automatic_skip_quantization=False)])
def test_explain_byte_masks_do_not_quantize_attention(is_masked, settings):
    """Masks that the runtime stores in bytes do not make attention INT8."""
    x, padding = randn(2, 6, 16), torch.arange(6).expand(2, 6) > 3
    calls = [(x, padding) if is_masked else x, (x[:, :5], padding[:, :5]) if is_masked else x[:, :5]]
    module = clika_compile(
        Attention().eval(),
        tracing_inputs=calls,
        **({} if settings is None else {"calibration_inputs": calls, "quantization_settings": settings}),
        deployment_settings=DeploymentSettings_OpenVINO_ONNX(),
    ).eval()
    runs = {node.operator: (node.runs, node.reason) for node in module.clika_explain().nodes}
    assert runs.pop("linear")[0] == ("float" if settings is None else "int8")
    assert "int8" not in {said for said, _ in runs.values()}, runs
    assert " in f32" in runs["scaled_dot_product_attention"][1]


def test_explain_conv_transpose_float_with_reason():
    """A transposed convolution of signed inputs or groups stays float, with a reason."""
    for groups, x, why in (
        (1, make_image(), "only if its inputs are not negative"),
        (2, make_image().abs(), "with groups in float"),
    ):
        found = compile_chain(lambda groups=groups: nn.ConvTranspose2d(8, 4, 3, groups=groups), None, x).clika_explain()
        (layer,) = [node for node in found.nodes if node.macs]
        assert (layer.planned, layer.runs) == ("float", "float")
        assert why in layer.reason


def test_avoid_overflow_cpu_flags_set_weight_bits():
    """The processor determines the bits of weights."""
    flags = frozenset({"avx2", "avx512f"})
    assert avoid_overflow(MIXED_SCHEME, flags | {"avx_vnni"}, is_arm=False).weights.bits == 8
    assert avoid_overflow(MIXED_SCHEME, flags, is_arm=False).weights.bits == 7
    assert avoid_overflow(MIXED_SCHEME, frozenset(), is_arm=True).weights.bits == 8


def test_preset_performance_uses_middle_zero_point():
    """Preset performance has the middle as zero point and runs in INT8 too."""
    layer, after, x, count = CASES["conv2d"]
    module = compile_chain(layer, after, x, preset="performance")
    (scale,) = module.clika_state.quantized.plan.activations.values()
    assert scale.zero_point == 128
    (mixed,) = compile_chain(layer, after, x).clika_state.quantized.plan.activations.values()
    assert mixed.zero_point != 128
    found = module.clika_explain()
    assert sum(node.planned == "int8" for node in found.nodes) == count
    assert not found.not_quantized


def test_preset_unknown_raises():
    """An unknown preset raises."""
    with pytest.raises(ModelError, match=r"preset is 'fast'. Choose one of 'mixed', 'performance'"):
        DeploymentSettings_OpenVINO_ONNX(preset="fast")
