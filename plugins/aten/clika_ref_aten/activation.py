"""Elementwise activation functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from clika_ref.core.accuracy import EXACT, ulp
from clika_ref.core.operators import operator
from clika_ref.core.traits import OWN_SCALE

aten = torch.ops.aten


@operator(aten.relu.default, quant=OWN_SCALE, error=EXACT)
def relu(x: Tensor) -> Tensor:
    """``max(x, 0)``, elementwise."""
    return F.relu(x)


@relu.onnx
def _(op, x):
    return op.Relu(x)


@relu.samples
def _(draw, s):
    return s.call(draw(s.tensor()))


@operator(aten.softplus.default, quant=OWN_SCALE, error=ulp(8, 1.0))
def softplus(x: Tensor, *, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """``log(1 + exp(beta * x)) / beta``, elementwise; ``x`` where ``beta * x > threshold``."""
    return F.softplus(x, beta, threshold)


@softplus.onnx
def _(op, x, *, beta, threshold):
    scaled = op.Mul(x, op.like(x, beta))
    soft = op.Div(op.Softplus(scaled), op.like(x, beta))
    return op.Where(op.Greater(scaled, op.like(x, threshold)), x, soft)


@softplus.samples
def _(draw, s):
    x = draw(s.tensor(low=-30, high=30))
    return s.call(x, beta=draw(s.floats(0.5, 4)), threshold=draw(s.floats(2, 30)))
