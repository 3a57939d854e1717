"""Variance and standard deviation, alone and with the mean."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.types import Number

from clika_ref.core.accuracy import NORM
from clika_ref.core.operators import Operator, operator
from clika_ref.core.symbols import is_symbolic
from clika_ref.core.traits import OWN_QPARAMS
from clika_ref.core.types import TensorType
from clika_ref_aten.elementwise import HALF_DTYPES
from clika_ref_aten.families import name_reference
from clika_ref_aten.reduction import as_dims, axes_operand, count_reduced, draw_dims, mean_of

aten = torch.ops.aten


def _moments(op, x, dim, correction, *, keepdim):
    """Return the mean, with reduced dims kept, and the variance."""
    over, count = axes_operand(op, x, dim), count_reduced(op.shape(x), dim)
    mean = mean_of(op, x, count, over, keepdims=True)
    deviation = op.Sub(x, mean)
    if correction == 0:
        return mean, mean_of(op, op.Pow(deviation, op.like(x, 2)), count, over, keepdims=keepdim)
    squares = op.ReduceSumSquare(deviation, over, keepdims=keepdim)
    return mean, op.Div(squares, _degrees_of_freedom(op, x, count, correction))


def _degrees_of_freedom(op, x, count, correction):
    """Return ``max(count - correction, 0)``: a sample that is too small gives 0 / 0 or infinity, as in eager."""
    if not is_symbolic(count):
        return op.like(x, max(count - correction, 0))
    free = op.Sub(op.like(x, count), op.like(x, correction))
    return op.Max(free, op.like(x, 0))


def _squeeze_mean(op, x, mean, dim, *, keepdim):
    """Return the mean of `_moments`, without the reduced dims unless ``keepdim``."""
    if keepdim or not op.rank(x):
        return mean
    return op.Squeeze(mean, axes_operand(op, x, as_dims(dim) or range(op.rank(x))))


def _check_correction(correction: Number) -> Number:
    if correction != correction:  # noqa: PLR0124 - NaN alone differs from itself
        raise ValueError("the correction of a variance is NaN. Give a number.")
    return correction


def _declare(name: str, doc: str, *, root: bool = False, with_mean: bool = False) -> Operator:
    """Declare the variance or its root, with or without the mean."""
    function, overloads = getattr(torch, name), getattr(aten, name)

    @operator(quant=OWN_QPARAMS, error=NORM)
    @name_reference(name, f"{doc} over the dims ``dim`` (None: all).", returns_pair=with_mean)
    def declared(
        x: Tensor, *, dim: tuple[int, ...] | None = None, correction: Number = 1, keepdim: bool = False
    ) -> Tensor:
        return function(x, dim, correction=_check_correction(correction), keepdim=keepdim)

    @declared.onnx
    def _(op, x, *, dim, correction, keepdim):
        dtype = op.dtype(x)
        if dtype in HALF_DTYPES:  # they hold neither a large count nor the square of a small deviation
            x = op.declare(op.cast(x, torch.float32), TensorType(torch.float32, op.shape(x)))
        mean, result = _moments(op, x, dim, correction, keepdim=keepdim)
        result = op.cast(op.Sqrt(result) if root else result, dtype)
        return (result, op.cast(_squeeze_mean(op, x, mean, dim, keepdim=keepdim), dtype)) if with_mean else result

    @declared.samples
    def _(draw, s):
        x = draw(s.tensor(rank=(1, 5), size=(1, 6), low=-1))  # errors are relative, and a mean near 0 would fail
        dim, keepdim = draw_dims(draw, s, x), draw(s.booleans())
        return s.call(x, dim=dim, correction=draw(s.choice(0, 1, 2, 0.5)), keepdim=keepdim)

    @declared.from_torch(overloads.default)
    def _(x, unbiased=True):
        return declared.call(x, correction=int(unbiased))

    @declared.from_torch(overloads.dim)
    def _(x, dim, unbiased=True, keepdim=False):
        return declared.call(x, dim=as_dims(dim), correction=int(unbiased), keepdim=keepdim)

    @declared.from_torch(overloads.correction)
    def _(x, dim=None, *, correction=None, keepdim=False):
        return declared.call(x, dim=as_dims(dim), correction=1 if correction is None else correction, keepdim=keepdim)

    return declared


var = _declare("var", "``sum((x - mean(x)) ** 2) / max(n - correction, 0)``")
std = _declare("std", "``sqrt(var(x))``", root=True)
var_mean = _declare("var_mean", "``(var(x), mean(x))``", with_mean=True)
std_mean = _declare("std_mean", "``(std(x), mean(x))``", root=True, with_mean=True)
