"""A small network of convolution, batch norm and head, for tests of modules and of training."""

import torch
from torch import nn


class ConvNormHead(nn.Module):
    """A convolution with batch norm, and a linear head."""

    def __init__(self, classes, *, bias=True):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, bias=bias), nn.BatchNorm2d(8), nn.Linear(8, classes)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))
