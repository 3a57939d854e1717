"""Networks of images, volumes and signals."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv_block(inputs: int, outputs: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Return a 3x3 convolution, a batch norm and a ReLU."""
    conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


class ConvBatchNorm(nn.Module):
    """Two convolutions with batch norm, a pool and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = conv_block(3, 16), conv_block(16, 16)
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(16 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, 10]``."""
        x = F.max_pool2d(self.second(self.first(x)), 2)
        return self.head(self.dropout(x.flatten(1)))


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut, which is a convolution where sizes change."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = conv_block(inputs, outputs, stride)
        self.second = nn.Sequential(nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs))
        is_same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if is_same else nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, outputs, h/stride, w/stride]``."""
        return torch.relu(self.second(self.first(x)) + self.shortcut(x))


class Residual(nn.Module):
    """A small ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_block(3, 16)
        self.blocks = nn.Sequential(ResidualBlock(16, 16, 1), ResidualBlock(16, 32, 2))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, 10]``."""
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Depthwise(nn.Module):
    """Depthwise-separable convolutions with squeeze-and-excitation, as in MobileNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.Hardswish())
        self.depthwise = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16), nn.ReLU6())
        self.squeeze, self.excite = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 16, 1)
        self.pointwise = nn.Sequential(nn.Conv2d(16, 24, 1), nn.BatchNorm2d(24))
        self.head = nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, 8]``."""
        x = self.depthwise(self.stem(x))
        weight = F.hardsigmoid(self.excite(torch.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))
        return self.head(F.adaptive_avg_pool2d(self.pointwise(x * weight), 1).flatten(1))


class Grouped(nn.Module):
    """Grouped convolutions with a channel shuffle between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = conv_block(4, 16, groups=2), conv_block(16, 16, groups=4)
        self.shuffle, self.last = nn.ChannelShuffle(4), nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, 8]``."""
        return self.last(self.second(self.shuffle(self.first(x)))).amax((2, 3))


class Transposed(nn.Module):
    """An autoencoder with strided and transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.BatchNorm2d(16), nn.LeakyReLU(0.1))
        self.decoder = nn.Sequential(nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.last = nn.ConvTranspose2d(8, 3, 3, padding=1, groups=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, 3, h, w]``."""
        return torch.sigmoid(self.last(self.decoder(self.encoder(x))))


class Pooling(nn.Module):
    """Average, maximum and adaptive pools of the same values."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.last = conv_block(3, 16), nn.Conv2d(32, 8, 1)
        self.average, self.largest = nn.AvgPool2d(3, 2, 1), nn.MaxPool2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, 8 * 9]``."""
        x = self.stem(x)
        x = torch.cat((self.average(x), self.largest(x)), 1)
        return F.adaptive_avg_pool2d(self.last(x), 3).flatten(1)


class SplitConcat(nn.Module):
    """Parallel branches over parts of the channels, joined again, as in Inception."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_block(4, 24)
        self.branches = nn.ModuleList(
            [nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 5, padding=2)]
        )
        self.last = nn.Conv2d(24, 8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return two halves of ``[n, 8, h, w]``."""
        parts = self.stem(x).split(8, 1)
        joined = torch.cat([branch(part) for branch, part in zip(self.branches, parts, strict=True)], 1)
        first, second = self.last(F.silu(joined)).chunk(2, 1)
        return first, second


class Dense(nn.Module):
    """Each layer reads all values before it, normalized before the convolution, as in DenseNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(16), nn.BatchNorm2d(24)])
        self.layers = nn.ModuleList([nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(24, 8, 3, padding=1)])
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, 10]``."""
        x = self.stem(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = torch.cat((x, layer(torch.relu(norm(x)))), 1)
        return self.head(x.mean((2, 3)))


class UNet(nn.Module):
    """One step down, one step up by interpolation, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = conv_block(3, 16), conv_block(16, 16, 2)
        self.up, self.last = conv_block(32, 16), nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, 2, h, w]``."""
        down = self.down(x)
        up = F.interpolate(self.middle(down), scale_factor=2.0, mode="bilinear", align_corners=False)
        return self.last(self.up(torch.cat((down, up), 1)))


class GroupNormed(nn.Module):
    """Group norm, instance norm and activations with continuous gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.group_norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.second, self.instance_norm = nn.Conv2d(16, 16, 3, padding=1), nn.InstanceNorm2d(16, affine=True)
        self.last = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, 4, h, w]``."""
        x = F.silu(self.group_norm(self.first(x)))
        return torch.tanh(self.last(F.mish(self.instance_norm(self.second(x)))))


class ConvNext(nn.Module):
    """A block with a depthwise convolution, channels-last layer norm, and a scale of the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, 16, 2, 2), nn.Conv2d(16, 16, 7, padding=3, groups=16)
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.scale, self.head = nn.Parameter(torch.full((16,), 0.5)), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, 8]``."""
        x = self.stem(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return self.head((x + y.permute(0, 3, 1, 2)).mean((2, 3)))


class PixelShuffled(nn.Module):
    """Super-resolution of images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.activation = nn.Conv2d(3, 16, 3, padding=1), nn.PReLU(16)
        self.second, self.shuffle = nn.Conv2d(16, 12, 3, padding=1), nn.PixelShuffle(2)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, 3, 2*h, 2*w]``."""
        return self.shuffle(self.second(self.activation(self.first(x)))).clamp(0, 1)


class Temporal(nn.Module):
    """Causal dilated convolutions over a signal of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(4, 16, 3), nn.Conv1d(16, 16, 3, dilation=2)
        self.norm, self.last = nn.BatchNorm1d(16), nn.Conv1d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, 4, m]``."""
        x = torch.relu(self.norm(self.first(F.pad(x, (2, 0)))))
        return self.last(F.elu(self.second(F.pad(x, (4, 0)))) + x)


class Volumetric(nn.Module):
    """Three-dimensional convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv3d(2, 8, 3, padding=1), nn.BatchNorm3d(8)
        self.pool, self.second, self.head = nn.MaxPool3d(2), nn.Conv3d(8, 16, 1), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, 4]``."""
        x = self.pool(torch.relu(self.norm(self.first(x))))
        return self.head(F.softplus(self.second(x)).mean((2, 3, 4)))


class VisionTransformer(nn.Module):
    """Patches, a class token, positions, and one encoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.randn(1, 1, 16))
        self.positions = nn.Parameter(torch.randn(1, 5, 16) / 4)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, 10]``."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1) + self.positions
        return self.head(self.norm(self.layer(x))[:, 0])


class DictOutputs(nn.Module):
    """One backbone with two heads; returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.classes, self.boxes = conv_block(3, 16, 2), nn.Linear(16, 5), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return ``classes[n, 5]`` and ``boxes[n, 4, h/2, w/2]``."""
        x = self.backbone(x)
        return {"classes": self.classes(x.mean((2, 3))).log_softmax(1), "boxes": self.boxes(x).exp()}
