"""Continuously differentiable activation functions, most of them gated: GELU, SiLU, Mish, GLU and softplus."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from clika_ref.core.accuracy import ulp
from clika_ref.core.errors import PassError
from clika_ref.core.operators import operator
from clika_ref.core.symbols import is_symbolic
from clika_ref.core.traits import OWN_QPARAMS
from clika_ref.core.types import TensorType
from clika_ref_aten.elementwise import FLOATS, unary_operator, unary_sampler
from clika_ref_aten.error_function import error_function
from clika_ref_aten.size_arithmetic import floor_quotient

aten = torch.ops.aten


@operator(aten.gelu.default, quant=OWN_QPARAMS, error=ulp(8, "x"))
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """``x * P(X <= x)`` for the normal distribution, elementwise; ``approximate="tanh"`` replaces erf by a tanh."""
    return F.gelu(x, approximate=approximate)


@gelu.onnx
def _(op, x, *, approximate):
    if approximate == "tanh" and op.rank(x) == 0:  # ONNX Runtime 1.31 fuses the formula into a kernel without 0-d
        return op.reshape(_gelu(op, op.reshape(x, (1,)), approximate), ())
    return _gelu(op, x, approximate)


def _gelu(op, x, approximate):
    if approximate == "tanh":
        cubic = op.Mul(op.Pow(x, op.like(x, 3)), op.like(x, 0.044715))  # Source: Hendrycks, Gimpel, section 2
        gate = op.Tanh(op.Mul(op.Add(x, cubic), op.like(x, math.sqrt(2 / math.pi))))
        return op.Mul(op.Mul(x, op.like(x, 0.5)), op.Add(gate, op.like(x, 1)))
    # Multiply by 0.5 last: with both forms of one tensor, ONNX Runtime shares the halved x, then fuses it away.
    gate = error_function(op, op.Div(x, op.like(x, math.sqrt(2))))
    return op.Mul(op.Mul(x, op.Add(gate, op.like(x, 1))), op.like(x, 0.5))


gelu.samples(unary_sampler(dtype=FLOATS, low=-5, high=5, attrs={"approximate": ("none", "tanh")}))


@unary_operator(F.silu, aten.silu.default, quant=OWN_QPARAMS, error=ulp(8, "x"), dtype=FLOATS, low=-5, high=5)
def silu(op, x):
    """``x / (1 + exp(-x))``, elementwise."""
    return op.Mul(x, op.Sigmoid(x))


@unary_operator(F.mish, aten.mish.default, quant=OWN_QPARAMS, error=ulp(8, "x"), dtype=FLOATS, low=-5, high=5)
def mish(op, x):
    """``x * tanh(log(1 + exp(x)))``, elementwise."""
    return op.Mul(x, op.Tanh(op.Softplus(x)))


@operator(aten.glu.default, quant=OWN_QPARAMS, error=ulp(8, "x"))
def glu(x: Tensor, *, dim: int = -1) -> Tensor:
    """The first half of ``x`` along ``dim`` times the sigmoid of the second half."""
    return F.glu(x, dim)


@glu.onnx
def _(op, x, *, dim):
    half = floor_quotient(op.shape(x)[dim], 2)
    if is_symbolic(half):
        value, gate = op.Split(x, axis=dim, num_outputs=2, outputs=2)
    else:  # ONNX Runtime splits an empty dim into parts of given sizes, but not into a number of parts
        value, gate = op.Split(x, op.ints([half, half]), axis=dim, outputs=2)
    return op.Mul(value, op.Sigmoid(gate))


@glu.types
def _(x, *, dim):
    size = x.shape[dim]
    if isinstance(size, int) and size % 2:
        raise PassError(f"glu({x}, dim={dim}): the size of the dim is odd")
    dim %= x.rank
    return TensorType(x.dtype, (*x.shape[:dim], floor_quotient(size, 2), *x.shape[dim + 1 :]))


@glu.samples
def _(draw, s):
    shape = list(draw(s.tensor(rank=(1, 5))).shape)
    dim = draw(s.integers(-len(shape), len(shape) - 1))
    shape[dim] *= 2
    return s.call(draw(s.tensor(shape=shape, dtype=FLOATS)), dim=dim)


@unary_operator(
    F.logsigmoid, aten.log_sigmoid.default, quant=OWN_QPARAMS, error=ulp(8, 1.0), dtype=FLOATS, low=-30, high=3
)
def log_sigmoid(op, x):
    """``-log(1 + exp(-x))``, elementwise."""
    return op.Neg(stable_softplus(op, op.Neg(x)))


def stable_softplus(op, x):
    """Return ``log(1 + exp(x))``, which ONNX Runtime computes without overflow in float32 only."""
    if op.dtype(x) != torch.float64:
        return op.cast(op.Softplus(op.cast(x, torch.float32)), op.dtype(x))
    tail = op.Log(op.Add(op.Exp(op.Neg(op.Abs(x))), op.like(x, 1)))
    return op.Add(op.Relu(x), tail)


@operator(aten.softplus.default, quant=OWN_QPARAMS, error=ulp(8, 1.0))
def softplus(x: Tensor, *, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """``log(1 + exp(beta * x)) / beta``, elementwise; ``x`` where ``beta * x > threshold``."""
    return F.softplus(x, beta, threshold)


@softplus.onnx
def _(op, x, *, beta, threshold):
    scaled = x if beta == 1 else op.Mul(x, op.like(x, beta))
    soft = stable_softplus(op, scaled)
    soft = soft if beta == 1 else op.Div(soft, op.like(x, beta))
    return op.Where(op.Greater(scaled, op.like(x, threshold)), x, soft)


@softplus.samples
def _(draw, s):
    x = draw(s.tensor(dtype=FLOATS, low=-30, high=30))
    return s.call(x, beta=draw(s.choice(1.0, 0.5, 3.7)), threshold=draw(s.floats(2, 30)))
