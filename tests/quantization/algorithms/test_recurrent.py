"""Recurrent layers with 8-bit weights: which layers, in which form, and that module and file agree."""

import pickle

import onnx
import pytest
import torch
from torch import nn

from clika_ref import (
    DeploymentSettings_ONNXRuntime_ONNX,
    DeploymentSettings_OpenVINO_ONNX,
    LayerQuantizationSettings,
    QuantizationSettings,
    clika_compile,
)

WEIGHTS_ONLY = QuantizationSettings(prefer_weights_only_quantization=True)


class Tagger(nn.Module):
    """A recurrent network with a score for each step."""

    def __init__(self, kind=nn.LSTM, **options):
        super().__init__()
        self.recurrent = kind(16, batch_first=True, **options)
        states = options.get("proj_size") or options["hidden_size"]
        self.head = nn.Linear(states * (2 if options.get("bidirectional") else 1), 8)

    def forward(self, x):
        return self.head(self.recurrent(x)[0])


def compile_tagger(model, settings=None, deployment=None, **options):
    """Return the quantized module of a tagger."""
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(4, 9, 16, generator=generator) for _ in range(3)]
    return clika_compile(
        model.eval(),
        tracing_inputs=[data[0], torch.randn(2, 12, 16, generator=generator)],
        calibration_inputs=data,
        quantization_settings=settings or QuantizationSettings(),
        deployment_settings=deployment or DeploymentSettings_ONNXRuntime_ONNX(),
        discard_input_model=False,
        **options,
    )


def list_operators(path):
    """Return the operators of a file."""
    return [node.op_type for node in onnx.load(path).graph.node]


@pytest.fixture(autouse=True)
def seed():
    """Draw the same weights in each test."""
    torch.manual_seed(0)


@pytest.mark.parametrize(
    "options",
    [{"num_layers": 2}, {"bidirectional": True}, {"num_layers": 2, "bidirectional": True, "bias": False}],
    ids=["two layers", "both directions", "no biases"],
)
def test_lstm_computed_in_int8_by_onnxruntime(options, tmp_path):
    """Each layer of an LSTM is quantized; module and file agree at other sizes, and are close to float."""
    model = Tagger(hidden_size=96, **options)
    module = compile_tagger(model)
    rows = [layer for layer in module.clika_summary().layers if layer.operator == "lstm"]
    assert [row.bits for row in rows] == [(8, 8)] * options.get("num_layers", 1)
    assert sum(row.bytes_after for row in rows) < 0.3 * sum(row.bytes_before for row in rows)
    artifact = module.clika_export(tmp_path / "tagger.onnx")
    operators = list_operators(artifact.path)
    assert operators.count("DynamicQuantizeLSTM") == len(rows)
    assert "LSTM" not in operators
    x = torch.randn(3, 20, 16)
    (found,) = module.clika_state.registry.targets["onnxruntime"].load(artifact)([x])
    torch.testing.assert_close(found, module(x), atol=5e-3, rtol=0)  # a rounding of a state may differ
    expected = model(x)
    assert (module(x) - expected).square().sum() < 2e-3 * expected.square().sum()


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: Tagger(hidden_size=64), "INT8 is not faster for 64 states; the least number is 96"),
        (lambda: Tagger(hidden_size=128, proj_size=96), "the target computes projected states in float"),
        (lambda: Tagger(nn.GRU, hidden_size=128), "the target computes gru in float"),
    ],
    ids=["few states", "projections", "GRU"],
)
def test_recurrent_layer_in_float_with_reason(model, reason):
    """Layers that INT8 does not make faster stay in float, and the summary gives the reason."""
    (row,) = [layer for layer in compile_tagger(model()).clika_summary().layers if layer.scope == "recurrent"]
    assert row.reason == reason
    assert row.bits == (32, 32)


def test_lstm_too_sensitive_stays_in_float():
    """A layer above the threshold stays in float, and the table predicts at which one it would not."""
    module = compile_tagger(Tagger(hidden_size=96), QuantizationSettings(quantization_sensitivity_threshold=1e-9))
    (row,) = [layer for layer in module.clika_summary().layers if layer.operator == "lstm"]
    assert row.reason.startswith("too sensitive")
    assert row.sensitivity in [prediction.threshold for prediction in module.clika_summary().what_if]


def test_lstm_skipped_by_the_user_stays_in_float():
    """A layer that the settings skip stays in float."""
    skip = {"recurrent": LayerQuantizationSettings(skip_quantization=True)}
    module = compile_tagger(Tagger(hidden_size=96), layer_quantization_settings=skip)
    (row,) = [layer for layer in module.clika_summary().layers if layer.operator == "lstm"]
    assert "skip_quantization" in row.reason


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_weight_only_for_openvino(kind, tmp_path):
    """Weight-only quantization stores 8-bit matrices, which OpenVINO dequantizes when it loads the file."""
    model = Tagger(kind, hidden_size=64, num_layers=2)
    module = compile_tagger(model, WEIGHTS_ONLY, DeploymentSettings_OpenVINO_ONNX())
    rows = [layer for layer in module.clika_summary().layers if layer.operator != "linear"]
    assert {row.bits for row in rows} == {(8, 32)}
    artifact = module.clika_export(tmp_path / "tagger.onnx")
    stored = sum(p.numel() * p.element_size() for p in model.parameters())
    assert artifact.path.stat().st_size < 0.35 * stored + 8000
    x = torch.randn(3, 20, 16)
    (found,) = module.clika_state.registry.targets["openvino"].load(artifact)([x])
    torch.testing.assert_close(found, module(x), atol=1e-5, rtol=1e-4)
    assert (found - model(x)).square().sum() < 1e-3 * model(x).square().sum()


def test_quantized_lstm_explained():
    """A network whose only layer is an LSTM has layers to quantize, and its report plans and finds INT8."""
    model = nn.LSTM(16, 96, batch_first=True).eval()
    data = [torch.randn(4, 9, 16) for _ in range(3)]
    module = clika_compile(
        model,
        tracing_inputs=[data[0], torch.randn(2, 12, 16)],
        calibration_inputs=data,
        quantization_settings=QuantizationSettings(),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )
    (row,) = [fact for fact in module.clika_explain().nodes if fact.operator == "dynamic_lstm"]
    assert (row.planned, row.runs) == ("int8", "int8")


def test_quantized_lstm_saved_and_copied(tmp_path):
    """A saved module, and a pickled one, compute the same."""
    module = compile_tagger(Tagger(hidden_size=96, num_layers=2))
    x = torch.randn(2, 5, 16)
    module.clika_save(tmp_path / "tagger.clika")
    loaded = type(module).clika_load(tmp_path / "tagger.clika")
    for other in (loaded, pickle.loads(pickle.dumps(module))):  # noqa: S301 - our own
        assert torch.equal(other(x), module(x))


def test_quantized_lstm_trained(tmp_path):
    """Training changes the matrices of a quantized LSTM, and the file follows."""
    module = compile_tagger(Tagger(hidden_size=96))
    x, target = torch.randn(8, 6, 16), torch.randn(8, 6, 8)
    before = module(x)
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(module(x), target)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    module.eval()
    assert losses[-1] < losses[0]
    assert [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None] == []
    matrix = dict(module.named_parameters())["recurrent.weight_hh_l0"]
    assert matrix.grad.abs().sum() > 0
    artifact = module.clika_export(tmp_path / "tagger.onnx")
    (found,) = module.clika_state.registry.targets["onnxruntime"].load(artifact)([x])
    torch.testing.assert_close(found, module(x), atol=5e-3, rtol=0)
    assert not torch.allclose(found, before, atol=0.05)
