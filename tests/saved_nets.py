"""Shared by tests of saving: models with folded, moved, tied and masked weights, and modules compiled from them."""

import torch
import transformers
from seeded_tensors import draw_batches
from torch import nn

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile

HERE = DeploymentSettings_ONNXRuntime_ONNX()
ALL = QuantizationSettings(quantization_sensitivity_threshold=1e9, skip_tail_quantization=False)


class Convolutions(nn.Module):
    """Batch norm after convolutions of all types, and a weight that is computed from two."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU())
        self.wide = nn.Sequential(nn.ConvTranspose2d(8, 8, 2, groups=2), nn.BatchNorm2d(8))
        self.last = nn.Conv2d(8, 8, 3)
        self.head, self.scale = nn.Linear(8, 5), nn.Parameter(torch.ones(5, 1))

    def forward(self, x):
        x = self.stem(x)
        x = x + self.wide(self.deep(x))[:, :, 1:, 1:]
        x = torch.relu(self.last(x))
        return nn.functional.linear(x.mean((2, 3)), self.head.weight * self.scale, self.head.bias)


class Tokens(nn.Module):
    """Row-wise and column-wise linear layers after a norm that SmoothQuant folds into, and a tied embedding."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(20, 32), nn.LayerNorm(32)
        self.norm.weight.data[3] = 40
        self.one, self.two = nn.Linear(32, 64), transformers.pytorch_utils.Conv1D(32, 64)
        self.one.weight.data[:, 3] /= 40
        self.last = nn.Linear(32, 20, bias=False)
        self.last.weight = self.table.weight

    def forward(self, tokens):
        x = self.table(tokens)
        return self.last(x + self.two(torch.relu(self.one(self.norm(x)))))


def make_batches(kind, count=4, size=8):
    if kind is Tokens:
        spread = torch.Generator().manual_seed(0)
        return [torch.randint(20, (size, 8), generator=spread) for _ in range(count)]
    return draw_batches(count, size, 3, 12, 12)


def build_net(kind):
    torch.manual_seed(0)
    model = kind().train()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.5, 2)
                module.bias.uniform_(-0.5, 0.5)
        for x in make_batches(kind, 20, 16):  # until statistics have settled
            model(x)
    return model.eval()


def compile_net(kind=Convolutions, settings=ALL, **options):
    data = {"calibration_inputs": [*make_batches(kind), make_batches(kind, 1, 4)[0]]}
    if settings is not None:
        data |= {"quantization_settings": settings}
    return clika_compile(build_net(kind), **{"deployment_settings": HERE, **data, **options})


def train(module, kind, steps=3):
    """Train for a few steps, so that weights, statistics and scales change."""
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    module.train()
    for x in make_batches(kind, steps):
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()
    return module.eval()
