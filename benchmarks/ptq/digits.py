"""Two small networks, and their training on the digits of scikit-learn."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

EPOCHS, BATCH, LEARNING_RATE = 30, 64, 3e-3


def load_data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return training images ``float32[n, 1, 8, 8]`` and labels, then test images and labels."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=540, random_state=0, stratify=labels)
    x, x_test, y, y_test = (torch.tensor(part) for part in parts)
    return _normalize(x), y.long(), _normalize(x_test), y_test.long()


def _normalize(x: torch.Tensor) -> torch.Tensor:
    return (x.float() / 16 - 0.5).view(-1, 1, 8, 8)


def build_convolutional_network() -> nn.Module:
    """Return a convolutional network with batch norm."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )


def build_depthwise_network() -> nn.Module:
    """Return a network of depthwise-separable convolutions with ReLU6, which is hard to quantize."""

    def build_block(channels: int, outputs: int, stride: int = 1) -> list[nn.Module]:
        depthwise = nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False)
        pointwise = nn.Conv2d(channels, outputs, 1, bias=False)
        return [
            *(depthwise, nn.BatchNorm2d(channels), nn.ReLU6()),
            *(pointwise, nn.BatchNorm2d(outputs), nn.ReLU6()),
        ]

    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU6()),
        *(*build_block(32, 64), *build_block(64, 64, 2), *build_block(64, 96), *build_block(96, 96)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10)),
    )


def train_network(model: nn.Module, seed: int) -> nn.Module:
    """Train a network on the digits, and return it in eval mode."""
    images, labels, *_ = load_data()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    steps = EPOCHS * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    model.train()
    for _ in range(EPOCHS):
        order = torch.randperm(len(images), generator=generator)
        for part in order[: len(images) // BATCH * BATCH].split(BATCH):
            loss = nn.functional.cross_entropy(model(images[part]), labels[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()
