"""Recurrent networks with a dynamic batch and a dynamic length stay single nodes."""

import pytest
import torch
from onnx_sessions import open_session
from torch import nn

from clika_ref import clika_compile

NETWORKS = {
    "LSTM": lambda: nn.LSTM(4, 6, num_layers=2, bidirectional=True),
    "LSTM, projected": lambda: nn.LSTM(4, 6, batch_first=True, proj_size=3, bias=False),
    "GRU": lambda: nn.GRU(4, 6, batch_first=True, bidirectional=True),
    "RNN": lambda: nn.RNN(4, 6, batch_first=True),
    "RNN, relu": lambda: nn.RNN(4, 6, num_layers=2, nonlinearity="relu"),
}


class Tagger(nn.Module):
    """A typical recurrent model: it classifies each token."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.network = nn.LSTM(4, 6, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 3)

    def forward(self, tokens):
        states, _ = self.network(self.embedding(tokens))
        return self.head(states), states[:, -1]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", NETWORKS)
def test_recurrent_network_serves_batch_and_length(name):
    """A recurrent network serves every batch and length."""
    model = NETWORKS[name]().eval()
    module = clika_compile(model, tracing_inputs=[torch.randn(3, 5, 4), torch.randn(2, 7, 4)])
    for shape in [(5, 11), (1, 1), (4, 1), (1, 9)]:
        x = torch.randn(*shape, 4)
        for actual, expected in zip(module(x)[0], model(x)[0], strict=True):
            torch.testing.assert_close(actual, expected)


def test_recurrent_network_with_states_serves_length():
    """A recurrent network with given states serves every length."""
    model = nn.GRU(4, 6).eval()
    module = clika_compile(model, tracing_inputs=[(torch.randn(n, 2, 4), torch.randn(1, 2, 6)) for n in (5, 7)])
    x, h = torch.randn(9, 2, 4), torch.randn(1, 2, 6)
    for actual, expected in zip(module(x, h), model(x, h), strict=True):
        torch.testing.assert_close(actual, expected)


def test_recurrent_network_artifact_serves_length(tmp_path):
    """The artifact of a recurrent network serves every length."""
    module = clika_compile(Tagger(), tracing_inputs=[torch.randint(10, (2, 5)), torch.randint(10, (3, 8))])
    # The export compares the artifact with the module on this input.
    module.clika_export(tmp_path / "tagger.onnx", example_inputs=torch.randint(10, (4, 13)))


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False, "batch_first": True, "bidirectional": True}],
    ids=["plain", "two layers, two directions", "batch first, no bias"],
)
def test_projected_lstm_artifact_serves_length(options, tmp_path):
    """The artifact of an LSTM with projections equals eager at other batches and lengths: outputs and states."""
    torch.manual_seed(0)
    model = nn.LSTM(4, 6, proj_size=3, **options).eval()
    inputs = [torch.randn(5, 2, 4), torch.randn(7, 3, 4)]
    module = clika_compile(model, tracing_inputs=inputs, discard_input_model=False)
    module.clika_export(tmp_path / "lstm.onnx")
    session = open_session(tmp_path / "lstm.onnx")
    for shape in ((1, 1, 4), (9, 5, 4)):
        x = torch.randn(shape)
        output, states = model(x)
        found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        for actual, expected in zip(found, (output, *states), strict=True):
            torch.testing.assert_close(torch.from_numpy(actual), expected, rtol=0, atol=1e-6)
