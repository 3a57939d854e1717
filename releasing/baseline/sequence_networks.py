"""Networks of vectors, sequences and tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Perceptron(nn.Module):
    """Three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, 8]``."""
        return self.third(F.gelu(self.second(torch.relu(self.first(x)))))


class Normed(nn.Module):
    """Linear layers with batch norm and layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.batch_norm = nn.Linear(32, 32), nn.BatchNorm1d(32)
        self.second, self.layer_norm, self.third = nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, 4]``."""
        x = torch.tanh(self.batch_norm(self.first(x)))
        return self.third(self.layer_norm(x + self.second(x)))


class Mixer(nn.Module):
    """Linear layers over the tokens, then over the features, of 8 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.token_norm, self.token_up, self.token_down = nn.LayerNorm(16), nn.Linear(8, 32), nn.Linear(32, 8)
        self.feature_norm, self.feature_up, self.feature_down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, 8, 16]``."""
        tokens = self.token_norm(x).transpose(1, 2)
        x = x + self.token_down(F.gelu(self.token_up(tokens))).transpose(1, 2)
        return x + self.feature_down(F.gelu(self.feature_up(self.feature_norm(x))))


class Attention(nn.Module):
    """Self-attention with four heads over a sequence of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.query, self.key, self.value = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.output = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, m, 64]``."""
        n, m, _ = x.shape
        y = self.norm(x)
        query, key, value = (f(y).view(n, m, 4, 16).transpose(1, 2) for f in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.output(attended.transpose(1, 2).reshape(n, m, 64))


class Encoder(nn.Module):
    """PyTorch's own encoder of one layer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, 4]``."""
        return self.head(self.encoder(x).mean(1))


class MaskedAttention(nn.Module):
    """PyTorch's own attention with a mask of the tokens to attend to."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.output = nn.MultiheadAttention(16, 4, batch_first=True), nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return ``[n, m, 16]``."""
        bias = torch.where(mask, 0.0, -10.0)[:, None, None].expand(-1, 4, x.shape[1], -1).flatten(0, 1)
        attended, _ = self.attention(x, x, x, attn_mask=bias, need_weights=False)
        return self.output(attended) * mask.unsqueeze(-1)


class Embedded(nn.Module):
    """A table of tokens, their mean, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.hidden, self.head = nn.Embedding(20, 64, padding_idx=0), nn.Linear(64, 64), nn.Linear(64, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``[n, 3]``."""
        kept = (tokens != 0).unsqueeze(-1).float()
        mean = (self.table(tokens) * kept).sum(1) / kept.sum(1).clamp_min(1)
        return self.head(torch.relu(self.hidden(mean))).softmax(-1)


class Tied(nn.Module):
    """A language model: the last layer shares its weight with the table of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.hidden, self.norm = nn.Embedding(24, 64), nn.Linear(64, 64), nn.LayerNorm(64)
        self.head = nn.Linear(64, 24, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``[n, m, 24]``."""
        x = self.table(tokens)
        return self.head(self.norm(x + F.gelu(self.hidden(x))))


class Lstm(nn.Module):
    """An LSTM over a sequence of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(12, 16, batch_first=True), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``[n, 8]`` and the last state."""
        values, (hidden, _) = self.lstm(x)
        return self.head(torch.relu(values[:, -1])), hidden


class Gru(nn.Module):
    """A GRU in two directions, between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.head = nn.Linear(12, 16), nn.Linear(32, 8)
        self.gru = nn.GRU(16, 16, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, m, 8]``."""
        values, _ = self.gru(torch.relu(self.before(x)))
        return self.head(values)


class TwoInputs(nn.Module):
    """An image and a vector, given by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear, self.bilinear = nn.Conv2d(3, 16, 3, 2), nn.Linear(8, 16), nn.Bilinear(16, 16, 8)
        self.head = nn.Linear(24, 4)

    def forward(self, image: Tensor, features: Tensor) -> Tensor:
        """Return ``[n, 4]``."""
        seen, given = torch.relu(self.conv(image)).mean((2, 3)), torch.relu(self.linear(features))
        return self.head(torch.cat((seen, self.bilinear(seen, given)), -1))


class Gated(nn.Module):
    """RMS norm, SwiGLU and GLU, as in recent language models."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up = nn.RMSNorm(16), nn.Linear(16, 64, bias=False), nn.Linear(16, 64, bias=False)
        self.down, self.glu = nn.Linear(64, 16, bias=False), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, m, 8]``."""
        y = self.norm(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return F.glu(self.glu(x), -1)


class SharedLayer(nn.Module):
    """A layer that is called twice, on inputs normalized by buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.linspace(-0.5, 0.5, 16))
        self.register_buffer("scale", torch.tensor(1.5), persistent=False)
        self.shared, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, 4]``."""
        x = (x - self.mean) * self.scale
        return self.head(torch.relu(self.shared(torch.relu(self.shared(x)))))


class Indexing(nn.Module):
    """Slices, gathers, a sort and conditions on values."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(16, 32), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``[n, m, 8]`` and the indices of the three largest sums ``[n, 3]``."""
        y = self.hidden(x)
        y = torch.where(y > 0, y, 0.1 * y)[..., ::2] + y[..., 1::2].roll(1, -1)
        largest = y.sum(-1).topk(3, -1).indices
        chosen = y.gather(1, largest.unsqueeze(-1).expand(-1, -1, 16))
        return self.head(torch.cat((y, chosen), 1))[:, : x.shape[1]], largest
