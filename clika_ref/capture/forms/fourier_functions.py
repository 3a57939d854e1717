"""Functions of `torch.fft` as transforms of resized tensors: PyTorch's own compare sizes, and fix their order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from clika_ref.torch_internals.operators import OpOverload

aten = torch.ops.aten

NORMALIZATIONS = {"ortho": (1, 1), "backward": (0, 2), "forward": (2, 0)}
"""ATen's number for each name of a normalization, in the forward and in the inverse direction."""


def _find_normalization(name: str | None, *, is_inverse: bool) -> int:
    if (name or "backward") not in NORMALIZATIONS:
        raise ValueError(f"torch.fft: the normalization is {name!r}. Use one of {', '.join(NORMALIZATIONS)}")
    return NORMALIZATIONS[name or "backward"][is_inverse]


def _to_float(x: Tensor) -> Tensor:
    return x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())


def _resize(x: Tensor, dim: int, length: Any) -> Tensor:
    """Return ``x`` with ``length`` elements in a dim: the first ones, or all and zeros after them."""
    size = x.shape[dim]
    if length is None or statically_known_true(length == size):
        return x
    after = x.dim() - 1 - dim % x.dim()
    return aten.constant_pad_nd(x, [0, 0] * after + [0, length - size])


def _find_dims(x: Tensor, sizes: Sequence[Any] | None, dims: Sequence[int] | None) -> tuple[list[int], list[Any]]:
    """Return the dims of a transform, and their sizes; None for those that stay."""
    if dims is None:
        own = list(range(x.dim() - len(sizes), x.dim())) if sizes is not None else list(range(x.dim()))
    else:
        own = [dim % x.dim() for dim in dims]
    given = [None] * len(own) if sizes is None else [None if n is None or _is_minus_one(n) else n for n in sizes]
    return own, given


def _is_minus_one(size: Any) -> bool:
    return isinstance(size, int) and size == -1


def _resize_all(x: Tensor, dims: Sequence[int], sizes: Sequence[Any]) -> Tensor:
    for dim, size in zip(dims, sizes, strict=True):
        x = _resize(x, dim, size)
    return x


def _transform(
    x: Tensor,
    sizes: Sequence[Any] | None = None,
    dims: Sequence[int] | None = None,
    norm: str | None = None,
    *,
    is_inverse: bool,
    is_view: bool = False,
) -> Tensor:
    """``fftn`` and ``ifftn``; the inverse transform of real elements is a view that is conjugated with ``is_view``."""
    own, given = _find_dims(x, sizes, dims)
    resized = _resize_all(_to_float(x), own, given)
    mode = _find_normalization(norm, is_inverse=is_inverse)
    if resized.is_complex():
        return aten._fft_c2c(resized, own, mode, not is_inverse) if own else resized
    if not own:
        return resized.to(resized.dtype.to_complex())
    found = aten._fft_r2c(resized, own, mode, False)
    if not is_inverse:
        return found
    return found.conj() if is_view else found.conj_physical()


def _transform_real(
    x: Tensor,
    sizes: Sequence[Any] | None = None,
    dims: Sequence[int] | None = None,
    norm: str | None = None,
    *,
    is_inverse: bool,
) -> Tensor:
    """``rfftn``, and ``ihfftn``, which is its conjugate."""
    own, given = _find_dims(x, sizes, dims)
    resized = _resize_all(_to_float(x), own, given)
    found = aten._fft_r2c(resized, own, _find_normalization(norm, is_inverse=is_inverse), True)
    if not is_inverse:
        return found
    return found.conj() if len(own) == 1 else found.conj_physical()  # like eager, which shares the memory


def _invert_to_real(
    x: Tensor,
    sizes: Sequence[Any] | None = None,
    dims: Sequence[int] | None = None,
    norm: str | None = None,
    *,
    is_inverse: bool,
) -> Tensor:
    """``irfftn``, and ``hfftn``, which transforms the conjugate."""
    own, given = _find_dims(x, sizes, dims)
    length = 2 * (x.shape[own[-1]] - 1) if given[-1] is None else given[-1]
    resized = _resize_all(_to_float(x), own, [*given[:-1], length // 2 + 1])
    spectrum = resized if resized.is_complex() else resized.to(resized.dtype.to_complex())
    mode = _find_normalization(norm, is_inverse=is_inverse)
    return aten._fft_c2r(spectrum if is_inverse else spectrum.conj_physical(), own, mode, length)


def _along_one_dim(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(x: Tensor, n: Any = None, dim: int = -1, norm: str | None = None) -> Tensor:
        return function(x, None if n is None else [n], [dim], norm)

    return run


def _along_two_dims(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(x: Tensor, s: Any = None, dim: Sequence[int] = (-2, -1), norm: str | None = None) -> Tensor:
        return function(x, s, dim, norm)

    return run


def _along_dims(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(x: Tensor, s: Any = None, dim: Sequence[int] | None = None, norm: str | None = None) -> Tensor:
        return function(x, s, dim, norm)

    return run


def list_frequencies(
    n: Any, d: Any = 1.0, *, dtype: torch.dtype | None = None, device: Any = None, is_half: bool = False, **_: Any
) -> Tensor:
    """Return ``k / (n d)`` of ``k = 0, 1, ...``, then of the negative ones; with ``is_half``, of k up to n / 2.

    Args:
        n: the number of elements of the transform.
        d: the distance of two elements.
        dtype: the dtype of the result; the default dtype if None.
        device: the device of the result.
        is_half: whether to return the frequencies of `torch.fft.rfft`.
    """
    own = dtype or torch.get_default_dtype()
    k = torch.arange(n // 2 + 1 if is_half else n, device=device)
    if not is_half:
        k = torch.where(k < (n + 1) // 2, k, k - n)
    length = torch.scalar_tensor(n, dtype=torch.float64, device=device) * d
    return k.to(own) * length.reciprocal().to(own)


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "fft": functools.partial(_transform, is_inverse=False),
    "ifft": functools.partial(_transform, is_inverse=True),
    "rfft": functools.partial(_transform_real, is_inverse=False),
    "ihfft": functools.partial(_transform_real, is_inverse=True),
    "irfft": functools.partial(_invert_to_real, is_inverse=True),
    "hfft": functools.partial(_invert_to_real, is_inverse=False),
}

FOURIER_FORMS: dict[OpOverload, Callable[..., Tensor]] = {
    **{getattr(aten, f"fft_{name}").default: _along_one_dim(form) for name, form in _FUNCTIONS.items()},
    aten.fft_ifft.default: _along_one_dim(functools.partial(_transform, is_inverse=True, is_view=True)),
    **{getattr(aten, f"fft_{name}2").default: _along_two_dims(form) for name, form in _FUNCTIONS.items()},
    **{getattr(aten, f"fft_{name}n").default: _along_dims(form) for name, form in _FUNCTIONS.items()},
    aten.fft_fftfreq.default: list_frequencies,
    aten.fft_rfftfreq.default: functools.partial(list_frequencies, is_half=True),
}
"""Equivalent Python functions for any size."""
