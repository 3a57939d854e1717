"""Networks that the tests of TensorRT compile."""

import torch
from torch import nn
from torch.nn import functional as F

from clika_ref import (
    DeploymentSettings_TensorRT_ONNX,
    QuantizationSettings,
    clika_compile,
)


class Net(nn.Module):
    """A network with the layers of the rules: residuals, concatenations, a transposed convolution, a linear layer."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.one, self.two, self.side = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.joined, self.up, self.head = nn.Conv2d(16, 8, 1), nn.ConvTranspose2d(8, 4, 2, 2), nn.Linear(4, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 2)
        y = F.relu(self.one(x) + x)
        y = F.relu(self.two(y) + self.side(x))
        y = F.relu(self.joined(torch.cat([x, y], 1)))
        return self.head(self.up(y).mean((2, 3)))


def make_images(*counts):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(count, 3, 16, 16, generator=generator) for count in counts]


def compile_net(**settings):
    torch.manual_seed(0)
    return clika_compile(
        Net().eval(),
        tracing_inputs=make_images(1, 6),
        calibration_inputs=make_images(2, 4, 4, 4),
        quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
        deployment_settings=DeploymentSettings_TensorRT_ONNX(**settings),
    ).eval()
