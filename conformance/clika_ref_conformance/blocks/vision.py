"""Blocks of image models."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clika_ref_conformance.blocks.block import BlockSpec, make_normal_inputs


def _conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions in parallel with a strided shortcut (ResNet-18)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _conv(8, 12, stride=2), _conv(12, 12)
        self.shortcut = _conv(8, 12, kernel=1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x[b, 8, h, w]`` to ``[b, 12, h/2, w/2]``."""
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1, grouped 3x3 and 1x1 convolutions in parallel with the identity (ResNeXt), with a classification head."""

    def __init__(self) -> None:
        super().__init__()
        self.reduce, self.spatial, self.expand = _conv(16, 8, 1), _conv(8, 8, groups=2), _conv(8, 16, 1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x[b, 16, h, w]`` to scores ``[b, 10]``."""
        y = F.relu(self.expand(F.relu_(self.spatial(F.relu_(self.reduce(x))))) + x)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(y, 1), 1))


class InvertedResidual(nn.Module):
    """Expansion, depthwise convolution, squeeze-and-excitation, projection (MobileNetV3)."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.depthwise, self.project = _conv(8, 24, 1), _conv(24, 24, 5, groups=24), _conv(24, 8, 1)
        self.squeeze, self.excite = nn.Conv2d(24, 8, 1), nn.Conv2d(8, 24, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x[b, 8, h, w]`` to the same shape."""
        y = F.hardswish(self.depthwise(F.hardswish(self.expand(x))))
        scale = F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        return x + self.project(y * scale)


class ConvNeXtBlock(nn.Module):
    """Depthwise 7x7, layer norm over channels, a wide GELU layer, layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(8, 8, 7, padding=3, groups=8)
        self.norm, self.wide, self.narrow = nn.LayerNorm(8, eps=1e-6), nn.Linear(8, 32), nn.Linear(32, 8)
        self.scale = nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x[b, 8, h, w]`` to the same shape."""
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.narrow(F.gelu(self.wide(y)))
        return x + y.permute(0, 3, 1, 2)


class DepthwiseSeparable(nn.Module):
    """Depthwise and pointwise convolutions, the first one strided, pooled to classes (MobileNetV1)."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise, self.pointwise = _conv(6, 6, stride=2, groups=6), _conv(6, 12, 1)
        self.pool, self.head = nn.AvgPool2d(2), nn.Conv2d(12, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x[b, 6, h, w]`` to scores ``[b, 5]``."""
        y = self.pool(F.relu6(self.pointwise(F.relu6(self.depthwise(x)))))
        return self.head(y).mean((2, 3))


class UpBlock(nn.Module):
    """Transposed convolution concatenated with a cropped skip connection, then group norm (U-Net)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.conv = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(10, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """Map ``x[b, 8, h, w]`` and ``skip[b, 6, 2h+1, 2w+1]`` to ``[b, 8, 2h, 2w]``."""
        y = self.up(x)
        y = torch.cat([y, skip[:, :, : y.shape[2], : y.shape[3]]], dim=1)
        return F.leaky_relu(self.norm(self.conv(y)), 0.1)


class DetectionHead(nn.Module):
    """Scores, and boxes decoded from distances on a grid, from features of two strides; the coarser is upsampled."""

    def __init__(self) -> None:
        super().__init__()
        self.fuse = nn.Conv2d(16, 8, 1)
        self.scores, self.boxes = nn.Conv2d(8, 3, 1), nn.Conv2d(8, 4, 1)

    def forward(self, fine: Tensor, coarse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map ``fine[b, 8, 2h, 2w]`` and ``coarse[b, 8, h, w]`` to scores, boxes and labels per grid cell."""
        enlarged = F.interpolate(coarse, scale_factor=2.0, mode="nearest")
        x = F.silu(self.fuse(torch.cat([fine, enlarged], 1)))
        height, width = x.shape[2:]
        y, z = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        centers = torch.stack([z, y], -1).reshape(1, -1, 2).to(x.dtype) + 0.5
        distances = F.softplus(self.boxes(x).flatten(2).transpose(1, 2))
        boxes = torch.cat([centers - distances[..., :2], centers + distances[..., 2:]], -1) * 8
        scores = self.scores(x).flatten(2).transpose(1, 2)
        best, labels = scores.sigmoid().max(-1)
        return scores, boxes, torch.where(best > 0.5, labels, -1)


class WindowAttention(nn.Module):
    """Attention within shifted windows of 4x4 with a relative position bias and a mask (Swin)."""

    def __init__(self, size: int = 8, window: int = 4, heads: int = 2, width: int = 8) -> None:
        super().__init__()
        self.window, self.heads = window, heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.randn(heads, window**2, window**2))
        region = torch.zeros(1, size, size, 1)
        for i, rows in enumerate((slice(0, -window), slice(-window, -window // 2), slice(-window // 2, None))):
            for j, columns in enumerate((slice(0, -window), slice(-window, -window // 2), slice(-window // 2, None))):
                region[:, rows, columns] = 3 * i + j
        parts = self._windows(region).squeeze(-1)
        self.mask: Tensor
        self.register_buffer("mask", (parts[:, None] - parts[:, :, None]).ne(0) * -100.0)

    def _windows(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        x = x.view(b, h // self.window, self.window, w // self.window, self.window, c)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.window**2, c)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x[b, h, w, 8]`` to the same shape."""
        b, h, w, c = x.shape
        half = self.window // 2
        parts = self._windows(torch.roll(x, (-half, -half), (1, 2)))
        count = (h // self.window) * (w // self.window)
        q, k, v = self.qkv(parts).view(-1, self.window**2, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * (c // self.heads) ** -0.5 + self.bias
        scores = scores.view(-1, count, self.heads, self.window**2, self.window**2) + self.mask[:, None]
        scores = scores.softmax(-1).view(-1, self.heads, self.window**2, self.window**2)
        y = self.out((scores @ v).transpose(1, 2).reshape(-1, self.window**2, c))
        y = y.view(b, h // self.window, w // self.window, self.window, self.window, c)
        return x + torch.roll(y.permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c), (half, half), (1, 2))


class SmallVisionTransformer(nn.Module):
    """Patches, a class token, positions, one pre-norm block, and a classification head (ViT)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 5, width))
        self.block = nn.TransformerEncoderLayer(
            width, 4, 32, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x[b, 3, 8, 8]`` to scores ``[b, 10]``."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.block(x))[:, 0])


def _make_feature_maps(*shapes: tuple[int, ...]):  # noqa: ANN202 - a MakeInputs, like `make_normal_inputs`
    return lambda batch, generator: tuple(torch.randn(batch, *s, generator=generator) for s in shapes)


VISION_BLOCKS = (
    BlockSpec("resnet-basic", BasicBlock, make_normal_inputs(8, 10, 10)),
    BlockSpec("resnet-bottleneck", Bottleneck, make_normal_inputs(16, 7, 7), chooses=True),
    BlockSpec("mobilenet-inverted-residual", InvertedResidual, make_normal_inputs(8, 9, 9)),
    BlockSpec("convnext", ConvNeXtBlock, make_normal_inputs(8, 8, 8)),
    BlockSpec("depthwise-separable", DepthwiseSeparable, make_normal_inputs(6, 12, 12), chooses=True),
    BlockSpec("unet-up", UpBlock, _make_feature_maps((8, 5, 5), (6, 11, 11))),
    BlockSpec("detection-head", DetectionHead, _make_feature_maps((8, 6, 6), (8, 3, 3)), chooses=True),
    BlockSpec("swin-window-attention", WindowAttention, make_normal_inputs(8, 8, 8)),
    BlockSpec("vit", SmallVisionTransformer, make_normal_inputs(3, 8, 8), chooses=True),
)
