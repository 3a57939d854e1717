"""Fourier transforms as products with matrices of cosines and sines, and transforms of frames as convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Parts = tuple[Tensor, Tensor]
"""The real and the imaginary part of a complex tensor."""


def _make_waves(frequencies: Any, length: Any, like: Tensor, *, positions: Any = None) -> Parts:
    """Return ``cos(2 pi k n / length)`` and ``sin(...)``, each ``[frequencies, positions]``, computed in float64."""
    k = torch.arange(frequencies, device=like.device)
    n = torch.arange(length if positions is None else positions, device=like.device)
    steps = k[:, None] * n[None] % length
    turns = steps.double() / torch.scalar_tensor(length, dtype=torch.float64, device=like.device)
    angles = turns * (2 * math.pi)
    sines = angles.sin().masked_fill(2 * steps == length, 0)  # exact at half turns, so that real results are exact
    return angles.cos().to(like.dtype), sines.to(like.dtype)


def _scale(sizes: Sequence[Any], normalization: int, like: Tensor) -> Tensor | None:
    """Return the factor of ATen's ``normalization``: 0 none, 1 by the root of the number of elements, 2 by it."""
    if not normalization:
        return None
    count = torch.scalar_tensor(math.prod(sizes), dtype=torch.float64, device=like.device)
    return (count.rsqrt() if normalization == 1 else count.reciprocal()).to(like.dtype)


def _apply(x: Tensor, matrix: Tensor, dim: int) -> Tensor:
    """Return ``result[..., k, ...] = sum_n matrix[k, n] x[..., n, ...]``."""
    return (x.movedim(dim, -1) @ matrix.t()).movedim(-1, dim)


def _multiply(parts: Parts, scale: Tensor | None) -> Parts:
    return parts if scale is None else (parts[0] * scale, parts[1] * scale)


def transform(real: Tensor, imag: Tensor, dims: Sequence[int], normalization: int, *, is_forward: bool) -> Parts:
    """Return the complex transform along dims: ``X[k] = sum_n x[n] exp(-+ 2 pi i k n / N)``."""
    scale = _scale([real.shape[d] for d in dims], normalization, real)
    for dim in dims:
        cosines, sines = _make_waves(real.shape[dim], real.shape[dim], real)
        sines = sines if is_forward else -sines
        real, imag = (
            _apply(real, cosines, dim) + _apply(imag, sines, dim),
            _apply(imag, cosines, dim) - _apply(real, sines, dim),
        )
    return _multiply((real, imag), scale)


def transform_real(x: Tensor, dims: Sequence[int], normalization: int, *, is_half: bool) -> Parts:
    """Return the transform of real elements; with ``is_half``, of the last of ``dims`` only frequencies up to N / 2."""
    scale = _scale([x.shape[d] for d in dims], normalization, x)
    *others, last = dims
    length = x.shape[last]
    cosines, sines = _make_waves(length // 2 + 1 if is_half else length, length, x)
    real, imag = _apply(x, cosines, last), 0 - _apply(x, sines, last)  # 0 - 0 is +0, whose angle is that of eager
    return _multiply(transform(real, imag, others, 0, is_forward=True), scale)


def invert_to_real(real: Tensor, imag: Tensor, dims: Sequence[int], normalization: int, length: Any) -> Tensor:
    """Return the ``length`` real elements with this transform; the last of ``dims`` has frequencies up to N / 2."""
    *others, last = dims
    scale = _scale([*(real.shape[d] for d in others), length], normalization, real)
    real, imag = transform(real, imag, others, 0, is_forward=False)
    cosines, sines = _make_half_waves(length, real)
    result = _apply(real, cosines.t(), last) - _apply(imag, sines.t(), last)
    return result if scale is None else result * scale


def _make_half_waves(length: Any, like: Tensor) -> Parts:
    """Return the waves ``[length / 2 + 1, length]``, doubled where they stand for two frequencies."""
    frequencies = length // 2 + 1
    cosines, sines = _make_waves(frequencies, length, like)
    k = torch.arange(frequencies, device=like.device)
    is_single = (k == 0) | (2 * k == length)
    weights = torch.where(is_single, 1, 2).to(like.dtype)[:, None]
    return cosines * weights, sines * weights


def _pad_window(window: Tensor | None, length: int, n_fft: int, like: Tensor) -> Tensor:
    """Return a window of ``length`` elements in the middle of ``n_fft`` elements."""
    own = torch.ones(length, dtype=like.dtype, device=like.device) if window is None else window
    left = (n_fft - length) // 2
    return F.pad(own, (left, n_fft - length - left)) if length < n_fft else own


def stft(  # noqa: PLR0917 - ATen's
    x: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    normalized: bool = False,  # noqa: FBT001, FBT002
    onesided: bool | None = None,  # noqa: FBT001
    return_complex: bool | None = None,  # noqa: FBT001
    align_to_window: bool | None = None,  # noqa: FBT001
) -> Tensor:
    """Transform frames of a waveform ``x[batch, time]``: a convolution with the windowed waves."""
    if align_to_window or x.is_complex():
        raise NotImplementedError("stft of complex waveforms, or with align_to_window")
    waveform = x if x.dim() == 2 else x[None]
    is_half = onesided is None or onesided
    own = _pad_window(window, n_fft if win_length is None else win_length, n_fft, x)
    waves = torch.cat(_make_waves(n_fft // 2 + 1 if is_half else n_fft, n_fft, x)) * own
    found = F.conv1d(waveform[:, None], waves[:, None], stride=hop_length or n_fft // 4)
    real, negative = (found * n_fft**-0.5 if normalized else found).chunk(2, 1)
    real, imag = (part if x.dim() == 2 else part[0] for part in (real, -negative))
    parts = torch.stack([real, imag], -1)
    return torch.view_as_complex(parts) if return_complex else parts


def istft(  # noqa: PLR0917 - ATen's
    spectrum: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,  # noqa: FBT001, FBT002
    normalized: bool = False,  # noqa: FBT001, FBT002
    onesided: bool | None = None,  # noqa: FBT001
    length: Any = None,
    return_complex: bool = False,  # noqa: FBT001, FBT002
) -> Tensor:
    """Add the inverse transforms of overlapping frames, divided by the sum of the squared windows."""
    if return_complex or onesided is False:
        raise NotImplementedError("istft to complex waveforms, or from all frequencies")
    frames = spectrum if spectrum.dim() == 3 else spectrum[None]
    real, imag = frames.real, frames.imag
    own = _pad_window(window, n_fft if win_length is None else win_length, n_fft, real)
    cosines, sines = _make_half_waves(n_fft, real)
    waves = torch.cat([cosines, -sines]) * own * (n_fft**-0.5 if normalized else 1 / n_fft)
    hop = hop_length or n_fft // 4
    total = F.conv_transpose1d(torch.cat([real, imag], 1), waves[:, None], stride=hop)[:, 0]
    counts = torch.ones_like(real[:1, :1])
    envelope = F.conv_transpose1d(counts, (own * own)[None, None], stride=hop)[0, 0]
    start = n_fft // 2 if center else 0
    size = n_fft + hop * (real.shape[2] - 1)
    end = size - start if length is None else torch.sym_min(start + length, size)
    result = total[:, start:end] / envelope[start:end]
    if length is not None:
        result = F.pad(result, (0, start + length - end))
    return result if spectrum.dim() == 3 else result[0]
