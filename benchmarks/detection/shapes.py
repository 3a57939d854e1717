"""Rendered images of colored shapes, with the box and the class of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SIZE = 128
"""Height and width of the images, in pixels."""

MIN_RADIUS, MAX_RADIUS = 7.0, 24.0
"""Distance from the center of a shape to its farthest point, in pixels."""

MAX_SHAPES = 5

MAX_POSITIONS = 20
"""Random positions that are tried for a shape; without a free one, the image has one shape less."""

NOISE = 0.06
"""Standard deviation of the noise of the pixels."""

Polygon = np.ndarray


def _make_polygon(angles: np.ndarray, radii: np.ndarray) -> Polygon:
    return np.stack((radii * np.cos(angles), radii * np.sin(angles)), 1)


def _make_regular(corners: int) -> Polygon:
    return _make_polygon(np.arange(corners) * 2 * math.pi / corners, np.ones(corners))


def _make_star() -> Polygon:
    return _make_polygon(np.arange(10) * math.pi / 5, np.where(np.arange(10) % 2, 0.45, 1.0))


POLYGONS: Mapping[str, Callable[[], Polygon]] = {
    "circle": lambda: _make_regular(24),
    "square": lambda: _make_regular(4),
    "triangle": lambda: _make_regular(3),
    "star": _make_star,
}
"""The corners of each shape around the origin, ``float64[n, 2]`` as x and y, with a radius of 1."""

CLASSES = tuple(POLYGONS)


@dataclass(frozen=True)
class Scene:
    """An image and the shapes in it."""

    image: Tensor
    """``float32[3, size, size]`` from 0 to 1."""
    boxes: Tensor
    """``float32[n, 4]``: x0, y0, x1, y1 in pixels."""
    labels: Tensor
    """``int64[n]``: indices of `CLASSES`."""


def render_scene(seed: int, size: int = SIZE) -> Scene:
    """Return an image of at least one shape; equal seeds give equal images.

    Args:
        seed: of the random numbers.
        size: height and width in pixels.
    """
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:size, :size] + 0.5
    slope = random.uniform(-1, 1, 2)
    gradient = 0.5 + 0.5 * (slope[0] * (x / size - 0.5) + slope[1] * (y / size - 0.5))
    corners = random.uniform(0.1, 0.9, (2, 3, 1, 1))
    image = (corners[0] * gradient + corners[1] * (1 - gradient)).astype(np.float32)
    boxes: list[np.ndarray] = []
    labels: list[int] = []
    for _ in range(int(random.integers(1, MAX_SHAPES + 1))):
        label = int(random.integers(len(CLASSES)))
        polygon = _place_shape(CLASSES[label], boxes, random, size)
        if polygon is None:
            continue
        boxes.append(np.concatenate((polygon.min(0), polygon.max(0))))
        labels.append(label)
        _paint(image, polygon, random.uniform(0, 1, (3, 1, 1)))
    image += NOISE * random.standard_normal(image.shape, np.float32)
    return Scene(
        torch.from_numpy(image.clip(0, 1)), torch.from_numpy(np.stack(boxes).astype(np.float32)), torch.tensor(labels)
    )


def _place_shape(name: str, boxes: list[np.ndarray], random: np.random.Generator, size: int) -> Polygon | None:
    """Return a turned polygon within the image, whose box does not touch the others; None if no place was found."""
    for _ in range(MAX_POSITIONS):
        radius, angle = random.uniform(MIN_RADIUS, MAX_RADIUS), random.uniform(0, 2 * math.pi)
        turn = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
        polygon = radius * POLYGONS[name]() @ turn
        low, high = -polygon.min(0), size - polygon.max(0)
        polygon = polygon + random.uniform(low, high)
        box = np.concatenate((polygon.min(0), polygon.max(0)))
        if not any((box[:2] < other[2:]).all() and (other[:2] < box[2:]).all() for other in boxes):
            return polygon
    return None


def _paint(image: np.ndarray, polygon: Polygon, color: np.ndarray) -> None:
    """Paint a polygon into ``image[3, size, size]``, in its box only; pixels on its border are mixed."""
    left, top = np.floor(polygon.min(0)).astype(int)
    right, bottom = np.ceil(polygon.max(0)).astype(int)
    y, x = np.mgrid[top:bottom, left:right].astype(np.float32) + 0.5
    cover = _compute_coverage(polygon.astype(np.float32), x, y)
    part = image[:, top:bottom, left:right]
    part += (color - part) * cover


def _compute_coverage(polygon: Polygon, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the share of each pixel inside a polygon, from the signed distance of its center to the border."""
    starts, ends = polygon, np.roll(polygon, -1, 0)
    x0, y0, x1, y1 = (part[:, None, None] for part in (*starts.T, *ends.T))
    dx, dy = x1 - x0, y1 - y0
    along = (((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy)).clip(0, 1)
    distance = np.sqrt(((x - x0 - along * dx) ** 2 + (y - y0 - along * dy) ** 2).min(0))
    crossings = ((y0 > y) != (y1 > y)) & (x < dx * (y - y0) / np.where(dy == 0, 1, dy) + x0)
    return (np.where(crossings.sum(0) % 2, distance, -distance) + 0.5).clip(0, 1)
