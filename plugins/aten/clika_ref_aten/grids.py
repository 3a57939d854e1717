"""Grid sampling and affine grids."""

from __future__ import annotations

import torch
from torch import Tensor

from clika_ref.core.accuracy import COMPOSE, INTERPOLATION
from clika_ref.core.operators import operator
from clika_ref.core.symbols import is_symbolic
from clika_ref.core.traits import OWN_QPARAMS
from clika_ref.core.types import TensorType
from clika_ref_aten.size_arithmetic import make_index_range

aten = torch.ops.aten

INTERPOLATION_MODES = ("bilinear", "nearest", "bicubic")

RENAMED_MODES, RENAMING_OPSET = {"bilinear": "linear", "bicubic": "cubic"}, 20
"""New ONNX names of some modes, and the first opset that uses them."""
PADDING_MODES = ("zeros", "border", "reflection")

FAR_COORDINATE = 2
"""A coordinate with all neighbours beyond the border, for any image size."""


@operator(
    aten.grid_sampler.default,
    aten.grid_sampler_2d.default,
    aten.grid_sampler_3d.default,
    quant=OWN_QPARAMS,
    error=INTERPOLATION,
)
def grid_sampler(x: Tensor, grid: Tensor, *, interpolation_mode: int, padding_mode: int, align_corners: bool) -> Tensor:
    """Sample ``x[n, c, h, w]`` at the points ``grid[n, i, j, 2]``, given as (x, y) in [-1, 1]; volumes likewise.

    ``interpolation_mode``: 0 linear, 1 nearest, 2 cubic. ``padding_mode``: 0 zeros, 1 border, 2 reflection.
    """
    return torch.grid_sampler(x, grid, interpolation_mode, padding_mode, align_corners)


@grid_sampler.types
def _(x, grid, **_):
    return TensorType(x.dtype, (*x.shape[:2], *grid.shape[1:-1]))


@grid_sampler.onnx
def _(op, x, grid, *, interpolation_mode, padding_mode, align_corners):
    mode, padding = INTERPOLATION_MODES[interpolation_mode], PADDING_MODES[padding_mode]
    if padding == "border":  # beyond 2^24 ONNX Runtime 1.31 gives both neighbours weight 0, and puts infinities at one
        grid = op.Clip(grid, op.like(grid, -FAR_COORDINATE), op.like(grid, FAR_COORDINATE))
    mode = RENAMED_MODES.get(mode, mode) if op.opset >= RENAMING_OPSET else mode
    return op.GridSample(x, grid, mode=mode, padding_mode=padding, align_corners=align_corners)


@grid_sampler.samples
def _(draw, s):
    dims = draw(s.choice(2, 2, 3))
    n, c = draw(s.integers(1, 2)), draw(s.integers(1, 3))
    x = draw(s.tensor(shape=(n, c, *(draw(s.integers(2, 6)) for _ in range(dims)))))
    points = (draw(s.integers(1, 5)) for _ in range(dims))
    grid = draw(s.tensor(shape=(n, *points, dims), low=-1.5, high=1.5, domain=(-1e3, 1e3), nan=False))
    mode = draw(s.choice(0, 1, 2) if dims == 2 else s.choice(0, 1))
    return s.call(
        x, grid, interpolation_mode=mode, padding_mode=draw(s.choice(0, 1, 2)), align_corners=draw(s.booleans())
    )


@operator(aten.affine_grid_generator.default, error=COMPOSE)
def affine_grid_generator(theta: Tensor, *, size: tuple[int, ...], align_corners: bool) -> Tensor:
    """The grid ``[n, h, w, 2]`` of ``theta[n, 2, 3] @ (x, y, 1)`` over [-1, 1], for a ``size`` of [n, c, h, w].

    -1 and 1 are the centres of the outermost elements with ``align_corners``, else their outer edges.
    """
    return torch.affine_grid_generator(theta, size, align_corners)


@affine_grid_generator.types
def _(theta, *, size, align_corners):
    return TensorType(theta.dtype, (size[0], *size[2:], len(size) - 2))


def _coordinates(op, n, dtype, *, align_corners):
    """Return ``n`` equally spaced coordinates in [-1, 1]; a single one is 0."""
    if not is_symbolic(n):
        steps, count = torch.arange(n, dtype=torch.float64), max(n - 1, 1) if align_corners else n
        return op.constant((2 * steps - (n - 1)) / count, dtype)
    steps = op.Sub(op.Mul(make_index_range(op, n), op.scalar(2, torch.int64)), op.scalar(n - 1, torch.int64))
    count = op.scalar(n - 1, torch.int64) if align_corners else op.scalar(n, torch.int64)
    return op.Div(op.cast(steps, dtype), op.cast(op.Max(count, op.scalar(1, torch.int64)), dtype))


@affine_grid_generator.onnx
def _(op, theta, *, size, align_corners):
    dims = len(size) - 2
    dtype = op.dtype(theta)
    parts = op.Split(op.Transpose(theta, perm=[0, 2, 1]), axis=1, num_outputs=dims + 1, outputs=dims + 1)
    *columns, total = (op.Unsqueeze(part, op.ints(range(2, 1 + dims))) for part in parts)
    for i, (column, n) in enumerate(zip(columns, reversed(size[2:]), strict=True)):  # x runs along the last dim
        line = _coordinates(op, n, dtype, align_corners=align_corners)
        total = op.Add(total, op.Mul(column, op.Unsqueeze(line, op.ints(range(1, 2 + i)))))
    return total


@affine_grid_generator.samples
def _(draw, s):
    dims = draw(s.choice(2, 2, 3))
    size = tuple(draw(s.integers(1, 5)) for _ in range(dims + 2))
    theta = draw(s.tensor(shape=(size[0], dims, dims + 1)))
    return s.call(theta, size=size, align_corners=draw(s.booleans()))
