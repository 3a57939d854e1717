"""A detector like those of the YOLO family, with random weights, and the decoding of its boxes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

CLASSES = 20

SIZE = 320
"""Height and width of the images, in pixels."""

STRIDES = (8, 16, 32)
"""Pixels for each cell of the three levels of features."""

MAX_CANDIDATES, MAX_BOXES = 300, 30
"""Boxes of the highest scores in one image, before and after suppression."""

NMS_IOU = MATCH_IOU = 0.5


class ConvBlock(nn.Sequential):
    """A convolution with batch norm and SiLU."""

    def __init__(self, channels: int, out: int, kernel: int = 1, stride: int = 1) -> None:
        layer = nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=False)
        super().__init__(layer, nn.BatchNorm2d(out), nn.SiLU())


class DetectorBottleneck(nn.Module):
    """Two convolutions with an optional residual connection."""

    def __init__(self, channels: int, *, is_residual: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(ConvBlock(channels, channels, 3), ConvBlock(channels, channels, 3))
        self.is_residual = is_residual

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape."""
        return x + self.body(x) if self.is_residual else self.body(x)


class C2f(nn.Module):
    """Split channels, chain bottlenecks on one half, and join all of their results."""

    def __init__(self, channels: int, out: int, count: int = 1, *, is_residual: bool = False) -> None:
        super().__init__()
        half = out // 2
        self.enter = ConvBlock(channels, out)
        self.blocks = nn.ModuleList(DetectorBottleneck(half, is_residual=is_residual) for _ in range(count))
        self.join = ConvBlock((2 + count) * half, out)

    def forward(self, x: Tensor) -> Tensor:
        """Return features with ``out`` channels."""
        parts = list(self.enter(x).chunk(2, 1))
        for block in self.blocks:
            parts.append(block(parts[-1]))
        return self.join(torch.cat(parts, 1))


class SPPF(nn.Module):
    """Pool with three windows, one after another, and join all results."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.enter, self.join = ConvBlock(channels, channels // 2), ConvBlock(2 * channels, channels)
        self.pool = nn.MaxPool2d(5, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape."""
        parts = [self.enter(x)]
        for _ in range(3):
            parts.append(self.pool(parts[-1]))
        return self.join(torch.cat(parts, 1))


class Head(nn.Module):
    """Separate branches for the boxes and the classes of one level."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.boxes = nn.Sequential(
            ConvBlock(channels, channels, 3), ConvBlock(channels, channels, 3), nn.Conv2d(channels, 4, 1)
        )
        self.classes = nn.Sequential(
            ConvBlock(channels, channels, 3), ConvBlock(channels, channels, 3), nn.Conv2d(channels, CLASSES, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, 4 + classes, h * w]``: distances to the four borders in cells, and class probabilities."""
        return torch.cat((self.boxes(x).exp(), self.classes(x).sigmoid()), 1).flatten(2)


class Detector(nn.Module):
    """Backbone, path aggregation in both directions, and a decoupled head on three levels."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        a, b, c, d, e = (width * 2**i for i in range(5))
        self.stem = nn.Sequential(ConvBlock(3, a, 3, 2), ConvBlock(a, b, 3, 2), C2f(b, b, 1, is_residual=True))
        self.small = nn.Sequential(ConvBlock(b, c, 3, 2), C2f(c, c, 2, is_residual=True))
        self.middle = nn.Sequential(ConvBlock(c, d, 3, 2), C2f(d, d, 2, is_residual=True))
        self.large = nn.Sequential(ConvBlock(d, e, 3, 2), C2f(e, e, 1, is_residual=True), SPPF(e))
        self.up = nn.Upsample(scale_factor=2, mode="nearest")
        self.down_middle, self.down_small = C2f(d + e, d), C2f(c + d, c)
        self.shrink_small, self.up_middle = ConvBlock(c, c, 3, 2), C2f(c + d, d)
        self.shrink_middle, self.up_large = ConvBlock(d, d, 3, 2), C2f(d + e, e)
        self.heads = nn.ModuleList(Head(channels) for channels in (c, d, e))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``float32[n, 4 + classes, cells]`` for images ``x[n, 3, h, w]``, with sizes divisible by 32."""
        small = self.small(self.stem(x))
        middle = self.middle(small)
        large = self.large(middle)
        middle = self.down_middle(torch.cat((self.up(large), middle), 1))
        small = self.down_small(torch.cat((self.up(middle), small), 1))
        middle = self.up_middle(torch.cat((self.shrink_small(small), middle), 1))
        large = self.up_large(torch.cat((self.shrink_middle(middle), large), 1))
        return torch.cat([head(x) for head, x in zip(self.heads, (small, middle, large), strict=True)], 2)


def decode_boxes(outputs: Tensor, size: int = SIZE) -> list[Tensor]:
    """Return the boxes of each image after suppression, ``float32[boxes, 5]``: x0, y0, x1, y1 in pixels, and class.

    Args:
        outputs: ``[n, 4 + classes, cells]`` of a `Detector`.
        size: height and width of the images, in pixels.
    """
    centers, strides = [], []
    for stride in STRIDES:
        steps = (torch.arange(size // stride) + 0.5) * stride
        y, x = torch.meshgrid(steps, steps, indexing="ij")
        centers.append(torch.stack((x.flatten(), y.flatten()), 1))
        strides.append(torch.full((len(steps) ** 2, 1), float(stride)))
    points, scale = torch.cat(centers), torch.cat(strides)
    found: list[Tensor] = []
    for one in outputs:
        distances = one[:4].T * scale
        boxes = torch.cat((points - distances[:, :2], points + distances[:, 2:]), 1)
        scores, classes = one[4:].T.max(1)
        order = scores.argsort(descending=True, stable=True)[:MAX_CANDIDATES]
        found.append(_suppress(torch.cat((boxes[order], classes[order, None].float()), 1)))
    return found


def _suppress(boxes: Tensor) -> Tensor:
    """Return the first boxes that overlap no earlier one of their class."""
    overlaps = (compute_ious(boxes[:, :4], boxes[:, :4]) > NMS_IOU) & (boxes[:, None, 4] == boxes[None, :, 4])
    kept: list[int] = []
    for i in range(len(boxes)):
        if not overlaps[i, kept].any():
            kept.append(i)
    return boxes[kept[:MAX_BOXES]]


def compute_ious(first: Tensor, second: Tensor) -> Tensor:
    """Return the intersection over union of each pair of boxes, ``float32[first, second]``."""
    starts = torch.maximum(first[:, None, :2], second[None, :, :2])
    sizes = torch.minimum(first[:, None, 2:], second[None, :, 2:]) - starts
    shared = sizes.clamp(min=0).prod(2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (first, second)]
    return shared / (areas[0][:, None] + areas[1][None] - shared)


def count_matches(expected: Tensor, actual: Tensor) -> int:
    """Return the number of expected boxes with an actual box of their class at an overlap of at least one half."""
    if not len(expected) or not len(actual):
        return 0
    is_same = expected[:, None, 4] == actual[None, :, 4]
    return int(((compute_ious(expected[:, :4], actual[:, :4]) >= MATCH_IOU) & is_same).any(1).sum())
