"""Elementwise activation functions: ReLU, sigmoid, tanh, ELU, shrinkage and their variants."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from clika_ref.core.accuracy import EXACT, ulp
from clika_ref.core.operators import operator
from clika_ref.core.traits import HOMOGENEOUS_OWN_QPARAMS, OWN_QPARAMS
from clika_ref_aten.elementwise import FLOATS, reshape_per_channel, unary_operator, unary_sampler
from clika_ref_aten.ordering import lower_clip, lower_min_max
from clika_ref_aten.size_arithmetic import same_type

aten = torch.ops.aten

PROMOTING_DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool)
"""Dtypes to draw for functions that promote integers to floats."""

SELU_ALPHA = 1.6732632423543772848170429916717  # Source: Klambauer et al., Self-Normalizing Neural Networks, section 2
SELU_SCALE = 1.0507009873554804934193349852946


def is_exact_as_attribute(op, *numbers):
    """Return whether float32 ONNX attributes hold these numbers as precisely as the result's dtype needs."""
    return op.result.dtype != torch.float64 or all(float(np.float32(n)) == n for n in numbers)


@unary_operator(
    F.relu,
    aten.relu.default,
    quant=HOMOGENEOUS_OWN_QPARAMS,
    error=EXACT,
    dtype=(*FLOATS, torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8),
)
def relu(op, x):
    """``max(x, 0)``, elementwise."""
    if op.dtype(x) in (torch.uint8, torch.uint16, torch.uint32, torch.uint64):
        return x
    return lower_min_max(op, "Max", x, op.like(x, 0)) if op.dtype(x) in (torch.int16, torch.int64) else op.Relu(x)


@unary_operator(F.relu6, aten.relu6.default, quant=OWN_QPARAMS, error=EXACT, dtype=FLOATS, low=-3, high=9)
def relu6(op, x):
    """``min(max(x, 0), 6)``, elementwise."""
    return lower_clip(op, x, 0, 6)


@operator(aten.hardtanh.default, quant=OWN_QPARAMS, error=EXACT)
def hardtanh(x: Tensor, *, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    """``min(max(x, min_val), max_val)``, elementwise."""
    return F.hardtanh(x, min_val, max_val)


@hardtanh.onnx
def _(op, x, *, min_val, max_val):
    return lower_clip(op, x, min_val, max_val)


@hardtanh.samples
def _(draw, s):
    x = draw(s.tensor(dtype=(*FLOATS, torch.int64, torch.int32, torch.int8), low=-5, high=9))
    bounds = (draw(s.integers(-3, 0)), draw(s.integers(1, 6)))
    if x.dtype.is_floating_point:
        bounds = (draw(s.choice(-1.0, 0.0, -2.5)), draw(s.choice(1.0, 6.0, 0.3)))
    return s.call(x, min_val=bounds[0], max_val=bounds[1])


@unary_operator(
    F.hardsigmoid, aten.hardsigmoid.default, quant=OWN_QPARAMS, error=ulp(8, 1.0), dtype=FLOATS, low=-5, high=5
)
def hardsigmoid(op, x):
    """``min(max(x + 3, 0), 6) / 6``, elementwise."""
    if is_exact_as_attribute(op, 1 / 6):
        return op.HardSigmoid(x, alpha=1 / 6, beta=0.5)
    return op.Div(lower_clip(op, op.Add(x, op.like(x, 3)), 0, 6), op.like(x, 6))


@unary_operator(F.hardswish, aten.hardswish.default, quant=OWN_QPARAMS, error=ulp(8, "x"), dtype=FLOATS, low=-5, high=5)
def hardswish(op, x):
    """``x * min(max(x + 3, 0), 6) / 6``, elementwise."""
    if is_exact_as_attribute(op, 1 / 6):
        return op.HardSwish(x)
    return op.Div(op.Mul(x, lower_clip(op, op.Add(x, op.like(x, 3)), 0, 6)), op.like(x, 6))


@unary_operator(
    torch.sigmoid,
    aten.sigmoid.default,
    aten.special_expit.default,
    quant=OWN_QPARAMS,
    error=ulp(8, 1.0),
    dtype=PROMOTING_DTYPES,
    low=-5,
    high=5,
)
def sigmoid(op, x):
    """``1 / (1 + exp(-x))``, elementwise."""
    return op.Sigmoid(x)


@unary_operator(torch.tanh, aten.tanh.default, quant=OWN_QPARAMS, error=ulp(8, 1.0), dtype=PROMOTING_DTYPES)
def tanh(op, x):
    """``(exp(2x) - 1) / (exp(2x) + 1)``, elementwise."""
    return op.Tanh(x)


@operator(aten.leaky_relu.default, quant=HOMOGENEOUS_OWN_QPARAMS, error=ulp(8))
def leaky_relu(x: Tensor, *, negative_slope: float = 0.01) -> Tensor:
    """``x`` where positive, else ``negative_slope * x``, elementwise."""
    return F.leaky_relu(x, negative_slope)


@leaky_relu.onnx
def lower_leaky_relu(op, x, negative_slope):
    """Return ``x`` with its negative elements multiplied by ``negative_slope``."""
    if is_exact_as_attribute(op, negative_slope):
        return op.LeakyRelu(x, alpha=float(negative_slope))
    return op.PRelu(x, op.like(x, negative_slope))


leaky_relu.samples(unary_sampler(dtype=FLOATS, attrs={"negative_slope": (0.01, 0.2, 0.0, 1.5, -0.3)}))


@operator(aten.prelu.default, quant=HOMOGENEOUS_OWN_QPARAMS, error=ulp(8))
def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """``x`` where positive, else ``weight * x``, with one weight or ``weight[c]`` for ``x[n, c, ...]``."""
    return torch.prelu(x, weight)


@prelu.onnx
def _(op, x, weight):
    rank = op.rank(x)
    if op.shape(weight) not in ((), (1,)):
        return op.PRelu(x, reshape_per_channel(op, weight, rank))
    return op.PRelu(x, op.reshape(weight, ()) if rank == 0 and op.rank(weight) else weight)


prelu.types(same_type)


@prelu.samples
def _(draw, s):
    x = draw(s.tensor(rank=draw(s.choice(4, 3, 2, 1, 0)), dtype=FLOATS))
    shape = x.shape[1:2] if x.rank > 1 and draw(s.booleans()) else draw(s.choice((1,), ()))
    if x.rank > 2 and draw(s.booleans()):  # the weight would also broadcast along the last dim
        x = draw(s.tensor(shape=(*x.shape[:-1], x.shape[1]), dtype=x.dtype))
    return s.call(x, draw(s.tensor(shape=shape, dtype=x.dtype, low=-1, high=1)))


@operator(aten.elu.default, quant=OWN_QPARAMS, error=ulp(8, 1.0))
def elu(x: Tensor, *, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    """``scale * x`` where positive, else ``scale * alpha * (exp(input_scale * x) - 1)``, elementwise."""
    return aten.elu.default(x, alpha, scale, input_scale)


@elu.onnx
def lower_elu(op, x, alpha, scale, input_scale):
    """Lower the formula of `elu`, which `selu` and `celu` share."""
    if input_scale == 1 and is_exact_as_attribute(op, alpha):
        unit = op.Elu(x, alpha=float(alpha))
    elif input_scale < 0:  # exp(input_scale * x) grows for negative x, and the quotient below would divide by 0
        unit = op.Mul(op.Sub(op.Exp(op.Mul(x, op.like(x, input_scale))), op.like(x, 1)), op.like(x, alpha))
        unit = op.Where(op.LessOrEqual(x, op.like(x, 0)), unit, x)
    else:
        half = op.Tanh(op.Mul(x, op.like(x, input_scale / 2)))  # expm1(2a) = 2 tanh(a) / (1 - tanh(a)): no cancellation
        bent = op.Div(op.Mul(half, op.like(x, 2 * alpha)), op.Sub(op.like(x, 1), half))
        unit = op.Where(op.LessOrEqual(x, op.like(x, 0)), bent, x)
    return unit if scale == 1 else op.Mul(unit, op.like(x, scale))


elu.samples(
    unary_sampler(dtype=FLOATS, attrs={"alpha": (1.0, 0.3, 2.0), "scale": (1.0, 1.5), "input_scale": (1.0, 0.7)})
)


@unary_operator(F.selu, aten.selu.default, quant=OWN_QPARAMS, error=ulp(8, 1.0), dtype=FLOATS)
def selu(op, x):
    """``1.0507 * x`` where positive, else ``1.0507 * 1.6733 * (exp(x) - 1)``, elementwise."""
    if is_exact_as_attribute(op, SELU_ALPHA):
        return op.Selu(x)
    return lower_elu(op, x, SELU_ALPHA, SELU_SCALE, 1.0)


@operator(aten.celu.default, quant=OWN_QPARAMS, error=ulp(8, 1.0))
def celu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """``x`` where positive, else ``alpha * (exp(x / alpha) - 1)``, elementwise."""
    return F.celu(x, alpha)


@celu.onnx
def _(op, x, *, alpha):
    if alpha <= 0:
        return lower_elu(op, x, alpha, 1.0, 1 / alpha)
    if alpha == 1:
        return op.Elu(x, alpha=1.0)
    return op.Mul(op.Elu(op.Div(x, op.like(x, alpha)), alpha=1.0), op.like(x, alpha))


@celu.samples
def _(draw, s):
    alpha = draw(s.choice(1.0, 0.4, 2.5, -1.5))
    grows = alpha < 0  # exp(x / alpha) amplifies the rounding error of x / alpha by its size: 8 ulp hold to 4 / 1.5
    return s.call(draw(s.tensor(dtype=FLOATS, domain=(-4.0, math.inf) if grows else None)), alpha=alpha)


@operator(aten.threshold.default, quant=OWN_QPARAMS, error=EXACT)
def threshold(x: Tensor, *, threshold: float, value: float) -> Tensor:
    """``x`` where above ``threshold``, else ``value``, elementwise."""
    return F.threshold(x, threshold, value)


@threshold.onnx
def _(op, x, *, threshold, value):
    return op.Where(op.LessOrEqual(x, op.like(x, threshold)), op.like(x, value), x)


threshold.samples(
    unary_sampler(dtype=(*FLOATS, torch.int64, torch.int32), attrs={"threshold": (0, 1, -1, 0.5), "value": (0, 2, -3)})
)


@operator(aten.softshrink.default, quant=OWN_QPARAMS, error=ulp(8, "x"))
def softshrink(x: Tensor, *, lambd: float = 0.5) -> Tensor:
    """``x`` shrunk towards 0 by ``lambd``, and 0 where ``|x| <= lambd``, elementwise."""
    return F.softshrink(x, lambd)


@softshrink.onnx
def _(op, x, *, lambd):
    return op.Sub(x, lower_clip(op, x, -lambd, lambd))  # ONNX's Shrink turns NaN into 0


softshrink.samples(unary_sampler(dtype=FLOATS, attrs={"lambd": (0.5, 0.0, 1.3)}))


@operator(aten.hardshrink.default, quant=OWN_QPARAMS, error=EXACT)
def hardshrink(x: Tensor, *, lambd: float = 0.5) -> Tensor:
    """0 where ``|x| <= lambd``, else ``x``, elementwise."""
    return F.hardshrink(x, lambd)


@hardshrink.onnx
def _(op, x, *, lambd):
    return op.Where(op.LessOrEqual(op.Abs(x), op.like(x, lambd)), op.like(x, 0), x)  # ONNX's Shrink turns NaN into 0


hardshrink.samples(unary_sampler(dtype=FLOATS, attrs={"lambd": (0.5, 0.0, 1.3)}))
