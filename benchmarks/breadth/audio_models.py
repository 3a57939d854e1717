"""Audio front ends, and networks on waveforms."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from benchmarks.breadth.architecture import Architecture

WAVES = ((1, 1600), (2, 2400)), (3, 2000)
WINDOW, HOP, MELS = 400, 160, 16


class LogMel(nn.Module):
    """The logarithm of a mel spectrogram."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(WINDOW))
        self.register_buffer("filters", torch.rand(MELS, WINDOW // 2 + 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the energies of each frame."""
        found = torch.stft(x, WINDOW, HOP, window=self.window, return_complex=True)
        return (self.filters @ found.abs().square()).clamp(min=1e-10).log10()


class Mfcc(LogMel):
    """Cepstral coefficients: a cosine transform of the logarithm of a mel spectrogram."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(8.0), torch.arange(MELS) + 0.5) * torch.pi / MELS
        self.register_buffer("cosines", angles.cos())

    def forward(self, x: Tensor) -> Tensor:
        """Return the coefficients of each frame."""
        return self.cosines @ super().forward(x)


class MelClassifier(nn.Module):
    """A front end and convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.mel = LogMel()
        self.layers = nn.Sequential(
            *(nn.Conv1d(MELS, 16, 3), nn.ReLU(), nn.Conv1d(16, 16, 3, 2), nn.ReLU()),
            *(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 5)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        return self.layers(self.mel(x))


class SpectralMask(nn.Module):
    """A mask on a spectrogram, transformed back to a waveform, as in speech enhancement."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(WINDOW))
        self.mask = nn.Sequential(nn.Conv1d(WINDOW // 2 + 1, 16, 1), nn.ReLU(), nn.Conv1d(16, WINDOW // 2 + 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return a waveform."""
        found = torch.stft(x, WINDOW, HOP, window=self.window, return_complex=True)
        return torch.istft(found * self.mask(found.abs()).sigmoid(), WINDOW, HOP, window=self.window, length=x.shape[1])


class WaveformNet(nn.Module):
    """Dilated convolutions with gates, as in WaveNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 8, 1)
        self.gates = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**n, padding=2**n) for n in range(3))
        self.last = nn.Conv1d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of each sample."""
        hidden = self.first(x[:, None])
        for gate in self.gates:
            value, strength = gate(hidden)[..., : x.shape[1]].chunk(2, 1)
            hidden = hidden + value.tanh() * strength.sigmoid()
        return self.last(hidden)


class RecurrentDenoiser(nn.Module):
    """Frames, a recurrent network, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(HOP, 16, batch_first=True, bidirectional=True), nn.Linear(32, HOP)

    def forward(self, x: Tensor) -> Tensor:
        """Return a waveform."""
        frames = x.unflatten(1, (-1, HOP))
        return self.head(self.rnn(frames)[0]).flatten(1)


def _make_waves(batch: int, length: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, length)}


def list_architectures() -> Mapping[str, Architecture]:
    """Return the entries, by name."""
    classes = (LogMel, Mfcc, MelClassifier, SpectralMask, WaveformNet)
    frames = ((1, 5 * HOP), (2, 8 * HOP)), (3, 7 * HOP)
    return {
        **{each.__name__: Architecture(each, _make_waves, WAVES, "batch, length") for each in classes},
        "RecurrentDenoiser": Architecture(RecurrentDenoiser, _make_waves, frames, "batch, frames"),
    }
