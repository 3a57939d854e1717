"""Decisions for the layers of a model in pieces, compared with those of the same model as one graph."""

import pytest
import torch
from torch import nn

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # of Dynamo, which hides it from users

DEPTH = 12


class Layer(nn.Module):
    """A residual layer; ``form`` reads its elements in Python, which breaks the graph."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.norm, self.linear, self.form = nn.LayerNorm(16), nn.Linear(16, 16), form

    def forward(self, x):
        y = torch.relu(self.linear(self.norm(x)))
        if self.form == "branch" and y.max() > 1e9:
            raise ValueError("overflow")
        if self.form == "numpy" and y.numpy().max() > 1e9:
            raise ValueError("overflow")
        return x + y


class Stack(nn.Module):
    """Layers, then a small head, whose error reaches the outputs as it is."""

    def __init__(self, form: str = "", depth: int = DEPTH) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer(form) for _ in range(depth)), nn.Linear(16, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def quantize(model, **arguments):
    generator = torch.Generator().manual_seed(1)
    return clika_compile(
        model.eval(),
        tracing_inputs=[torch.randn(size, 16, generator=generator) for size in (1, 3)],
        calibration_inputs=[torch.randn(8, 16, generator=generator) for _ in range(8)],
        quantization_settings=QuantizationSettings(),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
        discard_input_model=False,
        **arguments,
    )


def sqnr(expected, found):
    return float(10 * torch.log10(expected.pow(2).mean() / (expected - found).pow(2).mean()))


def list_float_layers(summary):
    return [layer.scope for layer in summary if layer.reason]


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_twelve_layers_as_accurate_as_one_graph(seed):
    """Both keep the head in float, whose share of the error at the outputs of the model is the largest."""
    torch.manual_seed(seed)
    whole, broken = Stack(), Stack("branch")
    broken.load_state_dict(whole.state_dict())
    one, pieces = quantize(whole), quantize(broken, fullgraph=False)
    assert list_float_layers(pieces.clika_summary()) == list_float_layers(one.clika_summary().layers) == ["head"]
    x = torch.randn(256, 16)
    expected = whole(x)
    assert sqnr(expected, pieces(x)) > sqnr(expected, one(x)) - 0.5  # ranges of other tensors


@pytest.mark.slow
def test_model_without_gradients_observes_each_batch_once():
    """Tensors with gradients have no NumPy form: the first batch runs again, and is not counted twice."""
    with torch.no_grad():
        pieces = quantize(Stack("numpy", depth=2), fullgraph=False)
    counts = {piece.module.clika_state.calibration.table.batches for piece in pieces.clika_pieces if piece.key.weights}
    assert counts == {8}
