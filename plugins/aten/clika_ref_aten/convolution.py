"""Convolutions and their transposes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from clika_ref.core.accuracy import DOT
from clika_ref.core.operators import operator
from clika_ref.core.traits import compute

aten = torch.ops.aten


@operator(aten.conv2d.default, quant=compute(weight=1, axis=0, bias=2), error=DOT)
def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: tuple[int, ...] = (1, 1),
    padding: tuple[int, ...] = (0, 0),
    dilation: tuple[int, ...] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """Cross-correlate ``x[n, c, h, w]`` with ``weight[k, c / groups, i, j]`` and add ``bias[k]``."""
    return F.conv2d(x, weight, bias, stride, padding, dilation, groups)


@conv2d.onnx
def _(op, x, weight, bias, *, stride, padding, dilation, groups):
    pads = [*padding, *padding] if len(padding) > 1 else [*padding * 4]
    return op.Conv(x, weight, bias, strides=_spread(stride, 2), pads=pads, dilations=_spread(dilation, 2), group=groups)


@conv2d.samples
def _(draw, s):
    groups, k = draw(s.choice(1, 2)), draw(s.choice(1, 2, 3))
    channels, out = groups * draw(s.integers(1, 3)), groups * draw(s.integers(1, 3))
    x = draw(s.tensor(shape=(draw(s.integers(1, 2)), channels, draw(s.integers(6, 9)), draw(s.integers(6, 9)))))
    weight = draw(s.tensor(shape=(out, channels // groups, k, draw(s.choice(1, 3)))))
    bias = draw(s.tensor(shape=(out,))) if draw(s.booleans()) else None
    return s.call(
        x,
        weight,
        bias,
        stride=(draw(s.choice(1, 2)), draw(s.choice(1, 3))),
        padding=(draw(s.choice(0, 1)), draw(s.choice(0, 2))),
        dilation=(draw(s.choice(1, 2)), 1),
        groups=groups,
    )


def _spread(value: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return one entry per spatial side: ATen lets a single entry stand for all."""
    return value if len(value) == count else value * count
