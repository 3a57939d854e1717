"""Shared by the tests of pruning: small models, one for each kind of channel dependency."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clika_ref import clika_compile


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.inner, self.outer = nn.Conv2d(8, 12, 3, padding=1), nn.Conv2d(12, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        x = x + self.outer(F.relu6(self.inner(x)))
        return self.head(x.mean((2, 3)))


class Depthwise(nn.Module):
    """Depthwise convolution, squeeze and excitation, transposed convolution, and an activation with a slope of each."""

    def __init__(self):
        super().__init__()
        self.wide, self.deep = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.norm, self.squeeze, self.excite = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.up, self.slope, self.head = nn.ConvTranspose2d(8, 6, 2, stride=2), nn.PReLU(6), nn.Conv2d(6, 2, 1)

    def forward(self, x):
        x = F.hardswish(self.norm(self.deep(self.wide(x))))
        x = x * F.hardsigmoid(self.excite(self.squeeze(F.adaptive_avg_pool2d(x, 1)).relu()))
        return self.head(self.slope(self.up(F.max_pool2d(x, 2))))


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.grouped = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 16, 3, padding=1, groups=4)
        self.up, self.head = nn.ConvTranspose2d(16, 8, 2, groups=4), nn.Linear(8 * 5 * 5, 3)

    def forward(self, x):
        x = self.up(self.grouped(self.wide(x)).relu())
        return self.head(F.adaptive_avg_pool2d(x, 5).flatten(1))


class Dense(nn.Module):
    """Concatenations, one of them split again at other indices, and padding with channels of zeros."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(10)
        self.first, self.second = nn.Conv2d(6, 4, 3, padding=1), nn.Conv2d(10, 6, 1)
        self.gate, self.head = nn.Conv2d(16, 12, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        x = self.stem(x)
        x = torch.cat([x, self.first(x)], 1)
        x = torch.cat([x, self.second(self.norm(x).relu())], 1)
        a, b = self.gate(x).chunk(2, 1)
        return self.head(F.pad(a * b.sigmoid(), (0, 0, 0, 0, 1, 1)))


class Attention(nn.Module):
    """Grouped-query attention: four query heads share one of key and value."""

    def __init__(self, dim=16, heads=8, shared=2):
        super().__init__()
        self.heads, self.shared, self.width = heads, shared, dim // heads
        self.query, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.key, self.value = (nn.Linear(dim, shared * self.width) for _ in range(2))

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))


class RepeatedHeads(Attention):
    """The same as Hugging Face writes it, with heads that are repeated and a softmax of its own."""

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (layer(x).view(b, n, -1, self.width).transpose(1, 2) for layer in (self.query, self.key, self.value))
        k, v = (
            s[:, :, None].expand(b, self.shared, self.heads // self.shared, n, self.width).reshape(b, self.heads, n, -1)
            for s in (k, v)
        )
        weights = (q @ k.transpose(2, 3) / self.width**0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, n, -1))


class Encoder(nn.Module):
    """PyTorch's own attention, with one weight for query, key and value, and heads in the batch dim."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.norm, self.wide, self.narrow = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


class Shuffled(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.head = nn.Conv2d(3, 16, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        return self.head(F.pixel_shuffle(self.wide(x), 2).relu())


class Halved(nn.Module):
    """Two gated linear units; the second one scales the channels of a linear layer."""

    def __init__(self):
        super().__init__()
        self.wide, self.deep, self.head = nn.Conv2d(3, 12, 1), nn.Linear(6, 16), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(F.glu(self.deep(F.glu(self.wide(x), 1).mean((2, 3)))))


class Mixed(nn.Module):
    """A shuffle of the channels of one layer, and one of those of two layers, which is split in half."""

    def __init__(self):
        super().__init__()
        self.wide, self.first, self.second = nn.Conv2d(3, 12, 1), nn.Conv2d(12, 8, 1), nn.Conv2d(12, 8, 1)
        self.left, self.right = nn.Conv2d(8, 2, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        x = F.channel_shuffle(self.wide(x), 3).relu()
        left, right = F.channel_shuffle(torch.cat([self.first(x), self.second(x)], 1), 4).chunk(2, 1)
        return self.left(left) + self.right(right)


def _make_images():
    return [torch.randn(2, 3, 8, 8), torch.randn(3, 3, 8, 8)]


def _make_sequences():
    return [torch.randn(2, 5, 16), torch.randn(3, 6, 16)]


MODELS = {
    **{
        model.__name__: (model, _make_images)
        for model in (Residual, Depthwise, Grouped, Dense, Shuffled, Halved, Mixed)
    },
    **{model.__name__: (model, _make_sequences) for model in (Attention, RepeatedHeads, Encoder)},
}


@pytest.fixture
def compile_model():
    """Return a function that compiles a model by name, with trained batch norm statistics, and its inputs."""

    def make(name, **options):
        torch.manual_seed(0)
        build, draw = MODELS[name]
        model, inputs = build().eval(), draw()
        for part in model.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.running_mean.normal_()
                part.running_var.uniform_(0.5, 2)
        return clika_compile(model, tracing_inputs=inputs, **options), inputs

    return make
