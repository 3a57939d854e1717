"""A layer with a function after it, for tests of the schemes of targets."""

from torch import nn


class Chain(nn.Module):
    """A layer, followed by a function of the layer's result and the input."""

    def __init__(self, layer, function=lambda y, x: y):
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x):
        return self.function(self.layer(x), x)
