"""A model that branches on a size, in a file of its own: the picture of its guard shows the line."""

from torch import Tensor, nn


class Pool(nn.Module):
    """A mean over positions, which samples long sequences."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, d]`` of sequences ``x[n, length, d]``."""
        return x.mean(1) if x.shape[1] <= 64 else x[:, ::2].mean(1)
