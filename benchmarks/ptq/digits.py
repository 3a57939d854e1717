"""Two small networks that are really trained, on the digits that come with scikit-learn."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

EPOCHS, BATCH, RATE = 30, 64, 3e-3


def load_data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return images and labels to train on, and images and labels to test on: ``float32[n, 1, 8, 8]``."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=540, random_state=0, stratify=labels)
    x, x_test, y, y_test = (torch.tensor(part) for part in parts)
    return _images(x), y.long(), _images(x_test), y_test.long()


def _images(x: torch.Tensor) -> torch.Tensor:
    return (x.float() / 16 - 0.5).view(-1, 1, 8, 8)


def make_convolutional() -> nn.Module:
    """Return a plain convolutional network with batch norms."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )


def make_depthwise() -> nn.Module:
    """Return a network of depthwise separable convolutions with ReLU6, which are hard to quantize."""

    def block(given: int, made: int, stride: int = 1) -> list[nn.Module]:
        return [
            *(nn.Conv2d(given, given, 3, stride, 1, groups=given, bias=False), nn.BatchNorm2d(given), nn.ReLU6()),
            *(nn.Conv2d(given, made, 1, bias=False), nn.BatchNorm2d(made), nn.ReLU6()),
        ]

    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU6()),
        *(*block(32, 64), *block(64, 64, 2), *block(64, 96), *block(96, 96)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10)),
    )


def train_network(model: nn.Module, seed: int) -> nn.Module:
    """Train a network on the digits."""
    images, labels, *_ = load_data()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    steps = EPOCHS * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
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
