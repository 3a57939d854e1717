"""Shared by tests of adapters: models with all supported layers, compiled, and a few steps of training."""

import torch
from seeded_tensors import draw_batches
from torch import nn

from clika_ref import (
    ClikaCompileOptions,
    DeploymentSettings_ONNXRuntime_ONNX,
    LoraSettings,
    QuantizationSettings,
    clika_compile,
)

HERE = DeploymentSettings_ONNXRuntime_ONNX()
INT8 = QuantizationSettings(quantization_sensitivity_threshold=1e9)
INT4 = QuantizationSettings(
    weights_num_bits=4,
    weights_only_quantization_block_size=[16],
    prefer_weights_only_quantization=True,
    quantization_sensitivity_threshold=1e9,
)


class Images(nn.Module):
    """Convolutions of all types with batch norm, and a head."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.grouped, self.after = nn.Conv2d(16, 16, 3, padding=1, stride=2, groups=2), nn.BatchNorm2d(16)
        self.pointwise, self.head = nn.Conv2d(16, 24, 1), nn.Linear(24, 10)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(self.after(self.grouped(x)))
        return self.head(self.pointwise(x).relu().mean((2, 3)))


class Tokens(nn.Module):
    """Linear layers on three dims, after a norm that can absorb factors, and before layers that cannot."""

    def __init__(self):
        super().__init__()
        self.norm, self.query, self.value = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.wide, self.narrow = nn.Linear(32, 64), nn.Linear(64, 32)
        self.norm.weight.data[3] = 40  # so that SmoothQuant scales channels
        for layer in (self.query, self.value):
            layer.weight.data[:, 3] /= 40

    def forward(self, x):
        y = self.norm(x)
        x = x + torch.tanh(self.query(y)) * self.value(y)
        return x + self.narrow(nn.functional.gelu(self.wide(x)))


INPUT_SHAPES = {Images: (3, 12, 12), Tokens: (6, 32)}


def make_batches(kind, count=4, size=8, seed=0):
    return draw_batches(count, size, *INPUT_SHAPES[kind], seed=seed)


def build_net(kind):
    torch.manual_seed(0)
    model = kind().eval()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_(std=0.1)
            part.running_var.uniform_(0.5, 2)
            part.weight.data.uniform_(0.5, 2)
    return model


def compile_net(kind, settings=None, lora=None, **options):
    """Return a compiled model, quantized and adapted if settings are given."""
    data = [*make_batches(kind), make_batches(kind, 1, 4)[0]]
    if settings is None:
        options = {"tracing_inputs": data[-2:], **options}
    else:
        options = {
            "calibration_inputs": data,
            "quantization_settings": settings,
            "deployment_settings": HERE,
            **options,
        }
    return clika_compile(
        build_net(kind), clika_compile_options=ClikaCompileOptions(global_lora_settings=lora), **options
    )


def train(module, kind, steps=10, rate=1e-2):
    """Train the parameters that require gradients towards another output."""
    original = build_net(kind)
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=rate)
    module.train()
    for number in range(steps):
        x = make_batches(kind, 1, seed=number)[0]
        optimizer.zero_grad()
        (module(x) - 1.3 * original(x).detach()).square().mean().backward()
        optimizer.step()
    return module.eval()


def make_lora_settings(**fields):
    return LoraSettings(**{"rank": 2, "alpha": 4, "dropout_rate": 0.0, **fields})
