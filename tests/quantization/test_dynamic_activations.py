"""Layers whose inputs are rounded at run time: no calibration data, equal to the file, chosen by sensitivity."""

import onnx
import pytest
import torch
from torch import nn

from clika_ref import (
    DeploymentSettings_ONNXRuntime_ONNX,
    DeploymentSettings_TensorRT_LLM_ONNX,
    DeploymentSettings_TensorRT_ONNX,
    LayerQuantizationSettings,
    QuantizationSettings,
    clika_compile,
)
from clika_ref.compiled import latency
from clika_ref.core.errors import ModelError, TargetError

DYNAMIC = QuantizationSettings(dynamic_activations=True)


class Scorer(nn.Module):
    """A table, a convolution, and linear layers with and without a bias."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(600, 32)
        self.convolution = nn.Conv1d(32, 48, 3, padding=1)
        self.hidden = nn.Linear(48, 600)
        self.head = nn.Linear(600, 5, bias=False)

    def forward(self, ids):
        x = self.convolution(self.table(ids).transpose(1, 2)).relu().transpose(1, 2)
        return self.head(self.hidden(x).relu())


def draw_ids(*shape):
    """Return ids of tokens."""
    return torch.randint(600, shape, generator=torch.Generator().manual_seed(len(shape)))


def compile_scorer(model, settings=DYNAMIC, deployment=None, **options):
    """Return the quantized module of a scorer, by its tracing inputs alone."""
    return clika_compile(
        model,
        tracing_inputs=[draw_ids(2, 7), draw_ids(3, 9)],
        quantization_settings=settings,
        deployment_settings=deployment or DeploymentSettings_ONNXRuntime_ONNX(),
        discard_input_model=False,
        **options,
    )


@pytest.fixture
def scorer():
    """Return a scorer; all its tests have the same weights."""
    torch.manual_seed(0)
    return Scorer().eval()


def test_dynamic_activations_need_no_data_and_equal_file(scorer, tmp_path):
    """The tracing inputs choose the layers; module and file agree at other sizes."""
    module = compile_scorer(scorer)
    bits = {layer.scope: layer.bits for layer in module.clika_summary().layers}
    assert bits == {"table": (8, 32), "convolution": (32, 32), "hidden": (8, 8), "head": (8, 8)}
    artifact = module.clika_export(tmp_path / "scorer.onnx")
    operators = [node.op_type for node in onnx.load(artifact.path).graph.node]
    assert operators.count("DynamicQuantizeLinear") == operators.count("MatMulInteger") == 2
    run = module.clika_state.registry.targets["onnxruntime"].load(artifact)
    for shape in ((1, 4), (5, 20)):
        ids = draw_ids(*shape)
        (found,) = run([ids])
        expected = scorer(ids)
        torch.testing.assert_close(found, module(ids), atol=1e-5, rtol=0)  # the convolution is float
        assert (found - expected).square().sum() < 1e-3 * expected.square().sum()
    stored = sum(p.numel() for p in scorer.parameters()) * 4
    assert artifact.path.stat().st_size < 0.5 * stored


def test_dynamic_linear_rounds_as_the_runtime(tmp_path):
    """Long rows, whose sums float32 does not represent, and inputs that are all zero, are equal in every bit."""
    torch.manual_seed(0)
    model = nn.Linear(900, 7)
    module = clika_compile(
        model,
        tracing_inputs=[torch.randn(2, 900), torch.randn(3, 900)],
        quantization_settings=DYNAMIC,
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )
    run = module.clika_state.registry.targets["onnxruntime"].load(module.clika_export(tmp_path / "linear.onnx"))
    for x in (100 * torch.randn(4, 900), torch.zeros(2, 900), torch.rand(3, 900) + 5):
        assert torch.equal(run([x])[0], module(x))


def test_dynamic_activations_sensitive_layer_stays_in_float(scorer):
    """The error of rounding inputs counts: a single threshold below it keeps the layer in float."""
    rows = {layer.scope: layer for layer in compile_scorer(scorer).clika_summary().layers}
    weight_only = QuantizationSettings(prefer_weights_only_quantization=True)
    alone = compile_scorer(scorer, weight_only, calibration_inputs=[draw_ids(2, 7), draw_ids(3, 9)])
    of_weights = {layer.scope: layer.sensitivity for layer in alone.clika_summary().layers}
    assert rows["hidden"].sensitivity > of_weights["hidden"]
    strict = QuantizationSettings(
        dynamic_activations=True, quantization_sensitivity_threshold=rows["hidden"].sensitivity / 2
    )
    (kept,) = [layer for layer in compile_scorer(scorer, strict).clika_summary().layers if layer.scope == "hidden"]
    assert kept.reason.startswith("too sensitive")


def test_dynamic_activations_follow_settings_of_layers(scorer):
    """Single layers can be kept in float."""
    module = compile_scorer(
        scorer, layer_quantization_settings={"head": LayerQuantizationSettings(skip_quantization=True)}
    )
    (row,) = [layer for layer in module.clika_summary().layers if layer.scope == "head"]
    assert row.bits == (32, 32)


def test_dynamic_activations_timed_for_latency(scorer, monkeypatch):
    """Layers that are slower with rounded inputs stay in float if latency is asked for; each form is timed."""
    timed = []

    def is_single_layer(operators):
        return operators[0] == "dynamic_linear"

    def measure(target, small, given, plain, given_plain):
        timed.append([node.op_type for node in small.nodes])
        return 1.3 if is_single_layer(timed[-1]) else 0.9

    monkeypatch.setattr(latency, "_measure_ratio_of_graphs", measure)
    module = compile_scorer(scorer, optimize_for="latency")
    assert sum(map(is_single_layer, timed)) == 2
    reasons = [layer.reason for layer in module.clika_summary().layers if layer.operator == "linear"]
    assert all("1.30x the time of float" in reason for reason in reasons)


def test_dynamic_activations_explained(scorer):
    """The report plans both linear layers in INT8, finds them so, and counts their MACs."""
    rows = [fact for fact in compile_scorer(scorer).clika_explain().nodes if fact.operator == "dynamic_linear"]
    assert [(row.planned, row.runs) for row in rows] == [("int8", "int8")] * 2
    assert all(row.macs for row in rows)


def test_dynamic_activations_of_half_floats_stay_in_float():
    """ONNX Runtime rounds float32 inputs only: other layers stay in float, and the file is written."""
    inputs = [torch.randn(n, 64).half() for n in (2, 3)]
    module = clika_compile(
        nn.Linear(64, 8).half(),
        tracing_inputs=iter(inputs),
        quantization_settings=DYNAMIC,
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )
    (row,) = module.clika_summary().layers
    assert row.reason == "its weight is torch.float16"


def test_dynamic_module_saved_and_trained(scorer, tmp_path):
    """A saved module computes the same, and training lowers the loss; the file follows."""
    module = compile_scorer(scorer)
    ids = draw_ids(4, 6)
    module.clika_save(tmp_path / "scorer.clika")
    assert torch.equal(type(module).clika_load(tmp_path / "scorer.clika")(ids), module(ids))
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = module(ids).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < losses[0]
    module.eval()
    run = module.clika_state.registry.targets["onnxruntime"].load(module.clika_export(tmp_path / "scorer.onnx"))
    torch.testing.assert_close(run([ids])[0], module(ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("deployment", [DeploymentSettings_TensorRT_ONNX, DeploymentSettings_TensorRT_LLM_ONNX])
def test_dynamic_activations_rejected_for_other_targets(scorer, deployment):
    """Targets without such layers are named, with the reason and what to use."""
    message = (
        f"cannot quantize for the target {deployment.target} with dynamic_activations=True: it does not round the "
        "inputs of INT8 layers at run time. Use static ranges"
    )
    with pytest.raises(TargetError, match=message):
        compile_scorer(scorer, deployment=deployment())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefer_weights_only_quantization": False}, "in fixed ranges. Choose one"),
        ({"weights_num_bits": 4}, "needs weights_num_bits=8, but it is 4"),
        ({"activations_num_bits": 16}, "needs activations_num_bits=8, but it is 16"),
    ],
)
def test_dynamic_activations_contradictions_rejected(options, message):
    """Settings that exclude rounding at run time are rejected together with it."""
    with pytest.raises(ModelError, match=message):
        QuantizationSettings(dynamic_activations=True, **options)
