"""Quantized ranges, elements that expose errors on them, and their exact integer results.

This module is the reference for operators and for PyTorch's arithmetic, so it uses neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from random import Random

import numpy as np

RANGES = (
    ("int8", -128, 127),
    ("uint8", 0, 255),
    ("int8", -127, 127),
    ("int8", -8, 7),
    ("uint8", 0, 15),
    ("uint8", 0, 127),
)
"""INT8 and UINT8, symmetric INT8, INT4 and UINT4, and 7 bits for CPUs that add pairs of products in 16 bits."""

SCALES = (0.05, 0.03125, 1 / 3, 1.0, 1e-30, 1e-40, 1e30)
"""A common scale, powers of two (which make halves ties), a tiny, a subnormal and a huge one."""

AXES = (None, 0, 1, -1)

ELEMENTS_SHAPE = (4, 4)
"""Square, so that swapped axes do not show as a shape mismatch."""

UNIT_ROUNDOFF = 2.0**-24
"""Unit roundoff of float32."""

SUBNORMAL_STEP = 2.0**-149
"""Spacing of the subnormal float32 numbers."""


@dataclass(frozen=True)
class QuantizationGrid:
    """Quantization grid: dtype, bounds, and scales and zero points of shape [] or [c] along ``axis``."""

    dtype: str
    low: int
    high: int
    scale: np.ndarray
    zero_point: np.ndarray
    axis: int | None

    def __str__(self) -> str:
        along = "per tensor" if self.axis is None else f"axis {self.axis}"
        parameters = f"scale {self.scale.tolist()}, zero point {self.zero_point.tolist()}"
        return f"{self.dtype}[{self.low}, {self.high}], {parameters}, {along}"

    def broadcast_parameter(self, parameter: np.ndarray, rank: int) -> np.ndarray:
        """Return scales or zero points in a shape that broadcasts along the axis."""
        if self.axis is None:
            return parameter
        return parameter.reshape([-1 if i == self.axis % rank else 1 for i in range(rank)])

    def quantize(self, x: np.ndarray) -> np.ndarray:
        """Return ``x`` quantized: divided in float32, rounded half to even, then exact."""
        with np.errstate(over="ignore"):
            steps = np.rint(x / self.broadcast_parameter(self.scale, x.ndim))
        return np.clip(
            steps.astype(np.float64) + self.broadcast_parameter(self.zero_point, x.ndim), self.low, self.high
        ).astype(int)

    def find_ties(self, x: np.ndarray) -> np.ndarray:
        """Return a mask of the elements where ``x / scale`` in float32 is halfway between two integers."""
        with np.errstate(over="ignore", invalid="ignore"):
            quotient = np.abs(x / self.broadcast_parameter(self.scale, x.ndim))
            return quotient - np.floor(quotient) == 0.5

    def values(self, codes: np.ndarray) -> np.ndarray:
        """Return codes dequantized, with one product in float32."""
        with np.errstate(over="ignore"):
            steps = (codes - self.broadcast_parameter(self.zero_point, codes.ndim)).astype(np.float32)
            return steps * self.broadcast_parameter(self.scale, codes.ndim)

    def find_error(self, x: np.ndarray, codes: np.ndarray, values: np.ndarray) -> str | None:
        """Return a message about the first wrong element, or None.

        Within the range, an element may differ by half a step at most. Outside, it must have the code of the nearest
        bound. The quotient and the product round: they add ``|x| * u`` each, and a subnormal step.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            scale = self.broadcast_parameter(self.scale.astype(np.float64), x.ndim)
            zero = self.broadcast_parameter(self.zero_point, x.ndim)
            exact = x.astype(np.float64)
            below, above = exact < scale * (self.low - zero - 0.5), exact > scale * (self.high - zero + 0.5)
            bound = scale / 2 + 2 * np.abs(exact) * UNIT_ROUNDOFF + SUBNORMAL_STEP
            inside = (exact >= scale * (self.low - zero)) & (exact <= scale * (self.high - zero))
            finite = np.isfinite(values)  # with a huge scale, even correct codes overflow
            far = inside & finite & (np.abs(values.astype(np.float64) - exact) > bound)
        slack = np.abs(exact) * 2 * UNIT_ROUNDOFF
        for wrong, problem in (
            (below & (codes != self.low) & (exact < scale * (self.low - zero - 0.5) - slack), f"expected {self.low}"),
            (
                above & (codes != self.high) & (exact > scale * (self.high - zero + 0.5) + slack),
                f"expected {self.high}",
            ),
            (far, "the error exceeds half a step"),
        ):
            if wrong.any():
                at = tuple(int(i) for i in np.argwhere(wrong)[0])
                became = f"{int(codes[at])}, which dequantizes to {float(values[at])!r}"
                return f"element {list(at)}, {float(x[at])!r}, becomes {became}: {problem}"
        return None


def draw_quantization_grids(count: int, seed: int) -> list[QuantizationGrid]:
    """Return ``count`` quantization grids, or all if there are fewer; the same seed gives the same grids."""
    every = list(product(RANGES, ("middle", "low", "high"), SCALES, AXES))
    Random(seed).shuffle(every)  # noqa: S311 - draws tests, not keys
    return [_make_quantization_grid(*choice) for choice in every[:count]]


def _make_quantization_grid(bits: tuple[str, int, int], place: str, scale: float, axis: int | None) -> QuantizationGrid:
    dtype, low, high = bits
    middle = (low + high + 1) // 2
    zero = {"middle": middle, "low": low, "high": high}[place]
    if axis is None:
        return QuantizationGrid(dtype, low, high, np.asarray(scale, np.float32), np.asarray(zero), None)
    scales = (scale * np.array([1.0, 0.5, 2.0, 1.5])).astype(np.float32)
    return QuantizationGrid(dtype, low, high, scales, np.asarray([zero, middle, low, high]), axis)


def make_elements(grid: QuantizationGrid, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield names and float32 tensors of `ELEMENTS_SHAPE` that a quantizer must get right on a range."""
    random = np.random.default_rng(seed)
    scale = grid.broadcast_parameter(grid.scale, len(ELEMENTS_SHAPE)).astype(np.float64)
    zero = grid.broadcast_parameter(grid.zero_point, len(ELEMENTS_SHAPE))
    steps = random.integers(grid.low - 2, grid.high + 3, ELEMENTS_SHAPE) - zero
    halves = np.where(random.random(ELEMENTS_SHAPE) < 0.4, 0.5, random.random(ELEMENTS_SHAPE))
    spread = random.uniform(-1.5, 1.5, ELEMENTS_SHAPE) * (grid.high - grid.low)
    ends = np.where(random.random(ELEMENTS_SHAPE) < 0.5, grid.low, grid.high) - zero
    special = np.array([np.inf, -np.inf, 0.0, -0.0, 3e38, -3e38, 1e-45, -1e-45])
    with np.errstate(over="ignore"):
        found = {
            "halves": (steps + halves) * scale,
            "ends": (ends + random.choice([-1.0, -0.5, 0.0, 0.5, 1.0], ELEMENTS_SHAPE)) * scale,
            "wide": spread * np.exp2(random.integers(-8, 9, ELEMENTS_SHAPE)) * scale,
            "equal": np.full(ELEMENTS_SHAPE, 0.3) * scale,
            "zero": np.zeros(ELEMENTS_SHAPE),
            "special": random.choice(special, ELEMENTS_SHAPE),
        }
        for name, x in found.items():
            yield name, x.astype(np.float32)
