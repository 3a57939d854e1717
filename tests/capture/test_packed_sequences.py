"""Packed sequences around recurrent networks: graphs serve every batch, length, and lengths of the sequences."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

from clika_ref import clika_compile

LENGTHS = {
    "traced": ([5, 2], [7, 3, 1]),
    "unseen": ([1], [4, 9, 9, 2], [3, 3, 8], [2, 1]),
}


class Packed(nn.Module):
    """A recurrent network on packed sequences; it returns padded results and the final states."""

    def __init__(self, network, *, total_length=False, enforce_sorted=False, padding=0.0):
        super().__init__()
        self.network = network
        self.total_length = total_length
        self.options = {"batch_first": network.batch_first}
        self.enforce_sorted = enforce_sorted
        self.padding = padding

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, enforce_sorted=self.enforce_sorted, **self.options)
        states, last = self.network(packed)
        total = x.size(1 if self.network.batch_first else 0) if self.total_length else None
        return (*pad_packed_sequence(states, padding_value=self.padding, total_length=total, **self.options), last)


def make_call(lengths, *, batch_first=True, padding=0):
    """Return a padded batch of sequences of these lengths, longer by ``padding`` positions, and the lengths."""
    shape = (len(lengths), max(lengths) + padding)
    return torch.randn(*(shape if batch_first else shape[::-1]), 4), torch.tensor(lengths)


def assert_agrees(module, model, call):
    """Check every result of a call."""
    for actual, expected in zip(*(torch.utils._pytree.tree_leaves(m(*call)) for m in (module, model)), strict=True):
        torch.testing.assert_close(actual, expected)


NETWORKS = {
    "LSTM": lambda: nn.LSTM(4, 5, batch_first=True),
    "LSTM, two layers, both directions": lambda: nn.LSTM(4, 5, num_layers=2, bidirectional=True),
    "LSTM without biases": lambda: nn.LSTM(4, 5, bias=False, batch_first=True),
    "GRU, both directions": lambda: nn.GRU(4, 5, bidirectional=True, batch_first=True),
    "GRU, two layers": lambda: nn.GRU(4, 5, num_layers=2),
    "RNN": lambda: nn.RNN(4, 5, batch_first=True, bidirectional=True),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_packed_network_serves_batch_and_lengths(name):
    """Results and final states agree with eager for every batch, with padding after the longest sequence too."""
    model = Packed(NETWORKS[name](), padding=-1.0).eval()
    first = model.network.batch_first
    module = clika_compile(
        model, tracing_inputs=[make_call(n, batch_first=first) for n in LENGTHS["traced"]], discard_input_model=False
    )
    for lengths in LENGTHS["unseen"]:
        assert_agrees(module, model, make_call(lengths, batch_first=first))
    assert_agrees(module, model, make_call([4, 2, 6], batch_first=first, padding=3))


def test_packed_network_artifact_serves_lengths(tmp_path):
    """The artifact serves lengths that were never traced, with padded results of the input's length."""
    model = Packed(nn.LSTM(4, 5, batch_first=True, bidirectional=True), total_length=True).eval()
    module = clika_compile(model, tracing_inputs=[make_call(n) for n in LENGTHS["traced"]], discard_input_model=False)
    # The export compares the artifact with the module on this input.
    module.clika_export(tmp_path / "packed.onnx", example_inputs=make_call([3, 8, 6], padding=2))
    assert_agrees(module, model, make_call([3, 8, 6], padding=2))


def test_packed_sequence_sorted_lengths():
    """Sequences that are sorted need no order of their own."""
    model = Packed(nn.GRU(4, 5, batch_first=True), enforce_sorted=True).eval()
    module = clika_compile(model, tracing_inputs=[make_call(n) for n in LENGTHS["traced"]], discard_input_model=False)
    assert_agrees(module, model, make_call([8, 8, 3, 1]))


def test_packed_sequence_of_tensors_and_changed_data():
    """A list of sequences can be packed, and a layer can change the data of a packed sequence."""

    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.network, self.head = nn.RNN(4, 5), nn.Linear(5, 2)

        def forward(self, long, short):
            states, _ = self.network(pack_sequence([long, short]))
            scores = PackedSequence(self.head(states.data), states.batch_sizes)
            return pad_packed_sequence(scores, batch_first=True)

    model = Scores().eval()
    traced = [(torch.randn(5, 4), torch.randn(3, 4)), (torch.randn(7, 4), torch.randn(2, 4))]
    module = clika_compile(model, tracing_inputs=traced, discard_input_model=False)
    assert_agrees(module, model, (torch.randn(6, 4), torch.randn(4, 4)))


def test_packed_network_trains_like_eager():
    """Gradients of weights and inputs agree with eager."""
    torch.manual_seed(0)
    model = Packed(nn.LSTM(4, 5, batch_first=True, bidirectional=True)).eval()
    module = clika_compile(model, tracing_inputs=[make_call(n) for n in LENGTHS["traced"]], discard_input_model=False)
    x, lengths = make_call([2, 6, 3])
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for network, given in zip((module, model), inputs, strict=True):
        states, _, last = network(given, lengths)
        (states.square().sum() + sum(s.sum() for s in last)).backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    expected = dict(model.named_parameters())
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad)
