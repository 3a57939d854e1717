"""The original model is run without a trace left on it."""

import pytest
import torch
from torch import nn

from clika_ref import ModelError, clika_compile


class Expanded(nn.Module):
    """Its buffer holds three numbers, one of them NaN, as if they were six."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.tensor([1.0, float("nan"), 2.0]).expand(2, 3))

    def forward(self, x):
        return x + self.rows


def test_an_expanded_buffer_with_nan_is_served():
    """What holds NaN equals nothing, so it was restored, which an expanded tensor refuses."""
    x = torch.ones(2, 3)
    module = clika_compile(Expanded(), tracing_inputs=[x])
    torch.testing.assert_close(module(x), Expanded()(x), equal_nan=True)


def test_what_eager_writes_to_an_expanded_buffer_is_undone():
    class Writes(Expanded):
        def forward(self, x):
            self.rows[0].add_(1)
            return x + self.rows

    module = Writes()
    with pytest.raises(ModelError, match="the traced graph disagrees with eager on input 1"):
        clika_compile(module, tracing_inputs=[torch.ones(2, 3)])
    torch.testing.assert_close(module.rows, Expanded().rows, equal_nan=True)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x, padding):
        return self.encoder(x, src_key_padding_mask=padding)


def test_an_encoder_whose_padding_stands_at_the_end_is_served():
    """Without gradients eager takes a fast path there, which zeroes padded positions; with them it computes them."""
    model = Encoder().eval()
    inputs = [(torch.randn(b, n, 8), torch.arange(n).expand(b, n) >= n - 1) for b, n in ((2, 4), (3, 5))]
    module = clika_compile(model, tracing_inputs=inputs, discard_input_model=False)
    assert torch.backends.mha.get_fastpath_enabled()
    x, padding = torch.randn(4, 7, 8), torch.arange(7).expand(4, 7) >= torch.tensor([[7], [3], [5], [1]])
    torch.testing.assert_close(module(x, padding), model(x, padding))
