"""Bilinear interpolation of feature maps at any points."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_points(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return ``x[b, c, rows[b, p], columns[b, p]]`` for ``x[b, c, h, w]``; positions outside are moved inside."""
    height, width = x.shape[-2:]
    flat = rows.clamp(0, height - 1).long() * width + columns.clamp(0, width - 1).long()
    return x.flatten(2).gather(2, flat.unsqueeze(1).expand(-1, x.shape[1], -1))


def interpolate(x: Tensor, rows: Tensor, columns: Tensor, *, is_zero_outside: bool) -> Tensor:
    """Interpolate ``x[b, c, h, w]`` at the points ``(rows[b, p], columns[b, p])``; return ``[b, c, p]``.

    Points more than 1 outside give 0. Neighbors outside count as 0 with ``is_zero_outside``, else as the nearest
    element inside.
    """
    height, width = x.shape[-2:]
    is_near = (rows > -1) & (rows < height) & (columns > -1) & (columns < width)
    if not is_zero_outside:
        is_near = (rows >= -1) & (rows <= height) & (columns >= -1) & (columns <= width)
        rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    top, left = rows.floor(), columns.floor()
    below, right = rows - top, columns - left
    total = torch.zeros((), dtype=x.dtype, device=x.device)
    for row, row_weight in ((top, 1 - below), (top + 1, below)):
        for column, column_weight in ((left, 1 - right), (left + 1, right)):
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            weight = (row_weight * column_weight).where(inside & is_near, 0)
            total = total + weight.unsqueeze(1) * gather_points(x, row, column)
    return total
