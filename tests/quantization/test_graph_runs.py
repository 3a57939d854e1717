"""Runs on data keep images in the memory format that is fastest for convolutions, with equal results up to rounding."""

import pytest
import torch
from torch import nn

from clika_ref import clika_compile
from clika_ref.core.execution import interpret
from clika_ref.quantization.algorithms.macs import MacCounter
from clika_ref.quantization.graph_runs import run_graph


def trace_graph(net, *inputs):
    return clika_compile(net.eval(), tracing_inputs=[inputs]).graph


@torch.no_grad()
def test_run_graph_convolutions_keep_channels_last():
    """Convolutions return channels_last tensors with the same values."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    graph = trace_graph(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten()), x)
    seen = []
    (found,) = run_graph(graph, [x], lambda _, results: seen.append(results[0]))
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in seen[:3])
    assert x.is_contiguous()
    torch.testing.assert_close(found, interpret(graph, [x])[0][0])


@torch.no_grad()
def test_run_graph_volumes_channels_last_others_unchanged():
    """Volumes are channels_last_3d; integer tensors keep their layout."""
    volume = torch.randn(1, 2, 4, 4, 4)
    seen = []
    run_graph(trace_graph(nn.ReLU(), volume), [volume], lambda _, results: seen.append(results[0]))
    assert seen[0].is_contiguous(memory_format=torch.channels_last_3d)
    numbers = torch.ones(1, 2, 4, 4, dtype=torch.int64)

    class Doubled(nn.Module):
        def forward(self, x):
            return x * 2

    seen.clear()
    run_graph(trace_graph(Doubled(), numbers), [numbers], lambda _, results: seen.append(results[0]))
    assert seen[0].is_contiguous()


@torch.no_grad()
def test_mac_counter_uses_input_sizes():
    """MACs are counted with the sizes of the inputs."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.linear = nn.Conv2d(4, 8, 3, groups=2), nn.Linear(8, 5)

        def forward(self, x):
            x = self.conv(x).flatten(2).transpose(1, 2)
            return self.linear(x @ x.transpose(1, 2) @ x)

    x = torch.randn(2, 4, 6, 6)
    graph = trace_graph(Net(), x)
    counter = MacCounter(graph, [x])
    run_graph(graph, [x], counter)
    found = {node.op_type: [n for m, n in counter.of.items() if m.op_type == node.op_type] for node in counter.of}
    assert found["conv2d"] == [2 * 8 * 16 * 2 * 9]
    assert found["linear"] == [2 * 16 * 5 * 8]
    assert found["matmul"] == [2 * 16 * 16 * 8, 2 * 16 * 8 * 16]


@torch.no_grad()
def test_mac_counter_transposed_convolution():
    """A transposed convolution multiplies each input element by all weights of its channel."""
    x = torch.randn(2, 4, 6, 6)
    graph = trace_graph(nn.ConvTranspose2d(4, 8, 3, stride=2, groups=2), x)
    counter = MacCounter(graph, [x])
    run_graph(graph, [x], counter)
    assert list(counter.of.values()) == [2 * 4 * 6 * 6 * 4 * 9]


class Named(nn.Module):
    """Multiplies by an einsum."""

    def __init__(self, equation, *shape):
        super().__init__()
        self.equation, self.weight = equation, nn.Parameter(torch.randn(*shape))

    def forward(self, x):
        return torch.einsum(self.equation, x, self.weight)


@pytest.mark.parametrize(
    ("layer", "shapes", "macs"),
    [
        (nn.LSTM(3, 5, num_layers=2, bidirectional=True), [(7, 2, 3)], 7 * 2 * 2 * 4 * 5 * (3 + 5 + 10 + 5)),
        (nn.GRU(3, 5), [(7, 2, 3)], 7 * 2 * 3 * 5 * (3 + 5)),
        (nn.RNNCell(3, 5), [(2, 3)], 2 * 5 * (3 + 5)),
        (nn.Bilinear(3, 4, 5), [(2, 3), (2, 4)], 2 * 5 * 3 * 4),
        (Named("bhd,hde->bhe", 3, 4, 5), [(2, 3, 4)], 2 * 3 * 4 * 5),
        (Named("...d, de", 4, 5), [(2, 3, 4)], 2 * 3 * 4 * 5),
    ],
)
@torch.no_grad()
def test_mac_counter_layers_without_int8_counted(layer, shapes, macs):
    """The MACs of layers that stay in float on every target are counted."""
    inputs = tuple(torch.randn(shape) for shape in shapes)
    graph = trace_graph(layer, *inputs)
    counter = MacCounter(graph, inputs)
    run_graph(graph, inputs, counter)
    assert [n for n in counter.of.values() if n] == [macs]
