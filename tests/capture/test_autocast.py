"""Autocast regions with dynamic sides, and calls that autocast casts for within."""

import pytest
import torch
from torch import nn

from clika_ref import clika_compile
from clika_ref.core.errors import ModelError


def viewed(net, x):
    return net.layer(x).view(x.shape[0], -1)


def attended(net, x):
    q = net.layer(x).reshape(x.shape[0], x.shape[1], 2, 2).transpose(1, 2)
    ahead = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return nn.functional.scaled_dot_product_attention(q, q, q, ahead).transpose(1, 2).flatten(2)


def sized(net, x):
    y = net.layer(x) * x.shape[1] + torch.arange(x.shape[1])[:, None]
    return y[:, : x.shape[1] // 2 + 1], y[:1, :1].expand(x.shape) @ net.layer.weight


def padded(net, x):
    y = torch.cat([net.layer(x), torch.zeros(x.shape[0], 1, 4)], 1)
    return nn.functional.interpolate(y.transpose(1, 2), size=x.shape[1] * 2)


def chosen(net, x):
    return net.layer(x[x[..., 0] > 0]).sum(0), net.layer(x) * x.sum().item()


class Region(nn.Module):
    """A function of a linear layer within autocast."""

    def __init__(self, compute, layer=None):
        super().__init__()
        self.layer, self.compute = layer or nn.Linear(4, 4), compute

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.compute(self, x)


@pytest.mark.parametrize("compute", [viewed, attended, sized, padded, chosen])
def test_an_autocast_region_serves_every_size(agree, compute):
    """What autocast would do was asked with sizes that were guards of the graph from then on."""
    agree(Region(compute), [torch.randn(2, 3, 4), torch.randn(3, 5, 4)], [torch.randn(4, 7, 4), torch.randn(1, 1, 4)])


def test_a_transformer_layer_within_autocast_serves_every_size():
    original = Region(lambda net, x: net.layer(x), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)).eval()
    inputs = [torch.randn(2, 3, 4), torch.randn(3, 5, 4)]
    module = clika_compile(original, tracing_inputs=inputs, discard_input_model=False)
    for x in [*inputs, torch.randn(4, 7, 4)]:
        torch.testing.assert_close(module(x), original(x))


@pytest.mark.parametrize("shapes", [[(2, 3, 4)], [(2, 3, 4), (3, 5, 4)]], ids=["static", "dynamic"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_network_within_autocast_is_refused_with_what_to_do(kind, shapes):
    net = Region(lambda net, x: net.layer(x)[0], kind(4, 4))
    with pytest.raises(ModelError, match=r"aten\.\w+\.input in .*test_autocast.py:\d+: .*'cpu', enabled=False"):
        clika_compile(net, tracing_inputs=[torch.randn(s) for s in shapes])


def test_a_recurrent_network_left_out_of_autocast_serves_every_size(agree):
    def left_out(net, x):
        with torch.autocast("cpu", enabled=False):
            y = net.layer(x.float())[0]
        return y @ y.transpose(1, 2)

    agree(Region(left_out, nn.LSTM(4, 4)), [torch.randn(2, 3, 4), torch.randn(3, 5, 4)], [torch.randn(4, 7, 4)])
