"""Shared by tests of quantized modules: a convolutional network, its batches, and modules compiled from it."""

import torch
from seeded_tensors import draw_batches
from torch import nn

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile

HERE = DeploymentSettings_ONNXRuntime_ONNX()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Conv2d(8, 8, 3, stride=2)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(torch.relu(self.body(self.stem(x))).mean((2, 3)))


def make_batches(count=4, size=4, seed=0):
    return draw_batches(count, size, 3, 10, 10, seed=seed)


def build_net():
    model = Net().train()
    with torch.no_grad():
        for x in make_batches(3, 16, seed=9):
            model(x)
    return model.eval()


def compile_net(settings=None, data=None, **options):
    options = {"deployment_settings": HERE, "calibration_inputs": data or make_batches(), **options}
    return clika_compile(build_net(), quantization_settings=settings or QuantizationSettings(), **options)
