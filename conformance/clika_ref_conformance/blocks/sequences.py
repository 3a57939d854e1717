"""Blocks of language and sequence models."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clika_ref_conformance.blocks.block import BlockSpec, make_normal_inputs


class CachedAttention(nn.Module):
    """Grouped-query attention with rotary positions that appends to a key-value cache (Llama, one step)."""

    def __init__(self, width: int = 16, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width, bias=False)
        self.frequencies: Tensor
        self.register_buffer("frequencies", 1.0 / 10_000.0 ** (torch.arange(0, self.size, 2) / self.size))

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None].to(x.dtype) * self.frequencies
        cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map ``x[b, t, 16]`` and a cache to the result and the extended cache."""
        batch, length, width = x.shape
        past = keys.shape[2]
        positions = torch.arange(past, past + length)
        q = self.q(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.k(x).view(batch, length, self.groups, self.size).transpose(1, 2)
        v = self.v(x).view(batch, length, self.groups, self.size).transpose(1, 2)
        keys = torch.cat([keys, self._rotate(k, positions)], 2)
        values = torch.cat([values, v], 2)
        mask = positions[:, None] >= torch.arange(past + length)
        repeats = self.heads // self.groups
        y = F.scaled_dot_product_attention(
            self._rotate(q, positions),
            keys.repeat_interleave(repeats, 1),
            values.repeat_interleave(repeats, 1),
            attn_mask=mask,
        )
        return self.out(y.transpose(1, 2).reshape(batch, length, width)), keys, values


def _make_cached_inputs(batch: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    return tuple(torch.randn(batch, *s, generator=generator) for s in ((3, 16), (2, 5, 4), (2, 5, 4)))


class GatedLayer(nn.Module):
    """RMSNorm, written out, followed by a SiLU-gated MLP (Llama)."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(width))
        self.gate, self.up = nn.Linear(width, 24, bias=False), nn.Linear(width, 24, bias=False)
        self.down = nn.Linear(24, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x[b, t, 12]`` to the same shape."""
        y = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class ExpertGate(nn.Module):
    """Mixture of the two best experts, with weights that sum to one."""

    def __init__(self, width: int = 8, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.Parameter(torch.randn(experts, width, width) / width**0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map ``x[b, t, 8]`` to the scores of the experts and their mixture."""
        scores = self.gate(x)
        weights, chosen = scores.softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        shares = torch.zeros_like(scores).scatter(-1, chosen, weights)
        every = torch.einsum("bti,eij->btej", x, self.experts)
        return scores, (F.gelu(every, approximate="tanh") * shares[..., None]).sum(2)


class RecurrentCell(nn.Module):
    """LSTM or GRU cell, unrolled over three steps."""

    def __init__(self, cell: type[nn.LSTMCell | nn.GRUCell]) -> None:
        super().__init__()
        self.cell = cell(6, 8)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """Map ``x[b, 3, 6]`` and a state ``h[b, 8]`` to the last state."""
        state: Tensor | tuple[Tensor, Tensor] = (h, torch.tanh(h)) if isinstance(self.cell, nn.LSTMCell) else h
        for step in range(3):
            state = self.cell(x[:, step], state)
        return state[0] if isinstance(state, tuple) else state


class TextClassifier(nn.Module):
    """Word and position embeddings, averaged over the tokens that are not padding, and classified."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, 12, padding_idx=0), nn.Embedding(9, 12)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ``tokens[b, t]`` to scores ``[b, 6]``."""
        x = self.norm(self.words(tokens) + self.places(torch.arange(tokens.shape[1])))
        mask = (tokens != 0).unsqueeze(-1)
        mean = x.masked_fill(~mask, 0.0).sum(1) / mask.sum(1).clamp(min=1)
        return self.head(torch.tanh(mean))


class WindowWrite(nn.Module):
    """Write a row to the slice ``[-2:3]``, as ring buffers of caches do."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x[b, 4]`` to the same shape."""
        written = x.clone()
        written[-2:3] = self.row
        return written


def _make_steps(batch: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    return torch.randn(batch, 3, 6, generator=generator), torch.randn(batch, 8, generator=generator)


def _make_tokens(batch: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randint(0, 20, (batch, 7), generator=generator),)


SEQUENCE_BLOCKS = (
    BlockSpec("gqa-rotary-cache", CachedAttention, _make_cached_inputs),
    BlockSpec("llama-mlp", GatedLayer, make_normal_inputs(5, 12)),
    BlockSpec("expert-gate", ExpertGate, make_normal_inputs(6, 8), chooses=True),
    BlockSpec("lstm-cell", lambda: RecurrentCell(nn.LSTMCell), _make_steps),
    BlockSpec("gru-cell", lambda: RecurrentCell(nn.GRUCell), _make_steps),
    BlockSpec("window-write", WindowWrite, make_normal_inputs(4)),
    BlockSpec("text-classifier", TextClassifier, _make_tokens, chooses=True),
)
