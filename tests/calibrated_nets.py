"""Shared by tests of calibration: a model, its batches, and modules compiled from both."""

import torch
from torch import nn

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile
from clika_ref.quantization.decision import ratio_in_decibels

HERE = DeploymentSettings_ONNXRuntime_ONNX()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)
        self.register_buffer("unused", torch.full((3,), torch.nan))

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def make_batches(count=4, seed=0, factor=1.0):
    """Return batches with two columns that are larger than the others by a factor."""
    spread, factors = torch.Generator().manual_seed(seed), torch.ones(32)
    factors[3] = factors[9] = factor
    return [torch.randn(4 + i, 32, generator=spread) * factors for i in range(count)]


def trace_net(**arguments):
    return clika_compile(Net().eval(), tracing_inputs=make_batches(2), **arguments)


def compile_net(**options):
    settings = {"quantization_settings": QuantizationSettings(), "deployment_settings": HERE}
    return clika_compile(Net().eval(), **{"calibration_inputs": make_batches(), **settings, **options})


def sqnr_in_decibels(expected, found):
    """Return the SQNR of a tensor with respect to another one, in dB."""
    expected, found = expected.detach(), found.detach()
    return ratio_in_decibels(float(expected.square().sum()), float((expected - found).square().sum()))
