"""Random numbers from parametrized distributions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.types import Number

from clika_ref.core.errors import TargetError
from clika_ref.core.operators import operator
from clika_ref.core.symbols import is_symbolic
from clika_ref_aten.randomness import FLOATS, normal_of_shape, uniform_of_shape

aten = torch.ops.aten


def scale_and_shift(op, x, factor, offset):
    """Return ``x * factor + offset`` for scalar ``factor`` and ``offset``."""
    return op.Add(op.Mul(x, op.like(x, factor)), op.like(x, offset))


def exponential_of_shape(op, shape, dtype):
    """Draw exponential random numbers with mean 1."""
    share = op.Sub(op.scalar(1, dtype), uniform_of_shape(op, shape, dtype))  # in (0, 1]: its logarithm is finite
    return op.Neg(op.Log(share))


@operator(aten.bernoulli.default, aten.bernoulli.Tensor, random=True)
def bernoulli(x: Tensor, p: Tensor | Number | None = None) -> Tensor:
    """1 with probability ``p``, else 0, in the shape and dtype of ``x``; without ``p`` the probabilities are ``x``."""
    if p is None:
        return torch.bernoulli(x)
    return aten.bernoulli.Tensor(x, p) if isinstance(p, Tensor) else aten.bernoulli.p(x, p)


@bernoulli.onnx
def _(op, x, p=None):
    p = x if p is None else p
    dtype = torch.float32 if isinstance(p, Number) else torch.promote_types(op.dtype(p), torch.float32)
    share = uniform_of_shape(op, op.shape(x), dtype)
    return op.cast(op.Less(share, *op.promote(p, to=dtype)), op.result.dtype)


@bernoulli.samples
def _(draw, s):
    x = draw(s.tensor(dtype=FLOATS, low=0, high=1, domain=(0, 1)))
    chance = draw(s.tensor(shape=x.shape, dtype=x.dtype, low=0, high=1, domain=(0, 1)))
    return s.call(x, draw(s.choice(None, 0.3, 0.0, 1.0, chance)))


@bernoulli.from_torch(aten.bernoulli.p)
def _(x, p=0.5, *, generator=None):  # the default of bernoulli_, which is traced as this overload
    return bernoulli.call(x, p)


@operator(
    aten.normal.float_float, aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor, random=True
)
def normal(
    mean: Tensor | Number,
    std: Tensor | Number = 1.0,  # pyright: ignore[reportArgumentType] - a float is a Number
    *,
    size: tuple[int, ...] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Normal random numbers with the given means and standard deviations; of shape ``size`` if both are scalars."""
    if size is None:
        drawn = torch.normal(mean, std)  # pyright: ignore[reportCallIssue, reportArgumentType] - never two numbers
        return drawn.to(mean.dtype) if isinstance(mean, Tensor) else drawn  # meta tensors are promoted
    return torch.normal(mean, std, size, dtype=dtype, device=device)  # pyright: ignore[reportArgumentType] - two numbers


@normal.onnx
def _(op, mean, std=1.0, *, size, dtype, device):
    mean, std = op.promote(mean, std)
    return op.Add(op.Mul(normal_of_shape(op, op.result.shape, op.result.dtype), std), mean)


@normal.samples
def _(draw, s):
    dtype = draw(s.choice(*FLOATS))
    if draw(s.booleans()):
        size = draw(s.tensor(rank=(0, 3))).shape
        return s.call(draw(s.floats(-2, 2)), draw(s.floats(0.1, 2)), size=size, dtype=dtype)
    mean = draw(s.tensor(rank=(1, 3), dtype=dtype))
    std = draw(s.tensor(shape=mean.shape, dtype=dtype, low=0.1, high=2, domain=(0, 8)))
    return s.call(draw(s.choice(mean, 0.5)), std) if draw(s.booleans()) else s.call(mean, 0.7)


@normal.from_torch(aten.normal_functional.default)
def _(x, mean=0.0, std=1.0, *, generator=None):
    return normal.call(mean, std, size=x.type.shape, dtype=x.type.dtype)


@operator(random=True)
def uniform(x: Tensor, *, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Random numbers in ``[low, high)``, in the shape and dtype of ``x``."""
    return aten.uniform.default(x, low, high)


@uniform.onnx
def _(op, x, *, low, high):
    return scale_and_shift(op, uniform_of_shape(op, op.shape(x), op.dtype(x)), high - low, low)


@uniform.samples
def _(draw, s):
    return s.call(draw(s.tensor(dtype=FLOATS)), low=draw(s.choice(0.0, -1.5)), high=draw(s.choice(1.0, 4.0)))


@uniform.from_torch(aten.uniform.default)
def _(x, low=0.0, high=1.0, *, generator=None, **named):
    return uniform.call(x, low=named.get("from", low), high=named.get("to", high))


@operator(aten.exponential.default, random=True)
def exponential(x: Tensor, *, lambd: float = 1.0) -> Tensor:
    """Exponential random numbers with mean ``1 / lambd``, in the shape and dtype of ``x``."""
    return aten.exponential.default(x, lambd)


@exponential.onnx
def _(op, x, *, lambd):
    return op.Div(exponential_of_shape(op, op.shape(x), op.dtype(x)), op.like(x, lambd))


@exponential.samples
def _(draw, s):
    return s.call(draw(s.tensor(dtype=FLOATS)), lambd=draw(s.choice(1.0, 0.5, 3.0)))


@operator(aten.log_normal.default, random=True)
def log_normal(x: Tensor, *, mean: float = 1.0, std: float = 2.0) -> Tensor:
    """``exp`` of normal random numbers with that mean and standard deviation, in the shape and dtype of ``x``."""
    return aten.log_normal.default(x, mean, std)


@log_normal.onnx
def _(op, x, *, mean, std):
    return op.Exp(scale_and_shift(op, normal_of_shape(op, op.shape(x), op.dtype(x)), std, mean))


@log_normal.samples
def _(draw, s):
    return s.call(draw(s.tensor(dtype=FLOATS)), mean=draw(s.choice(1.0, 0.0)), std=draw(s.choice(2.0, 0.3)))


@operator(aten.multinomial.default, random=True)
def multinomial(x: Tensor, *, num_samples: int, replacement: bool = False) -> Tensor:
    """Draw ``num_samples`` indices along the last dim of ``x[c]`` or ``x[n, c]``, in proportion to ``x``."""
    return torch.multinomial(x, num_samples, replacement)


@multinomial.onnx
def _(op, x, *, num_samples, replacement):
    chances = op.cast(x, torch.float32)
    if not replacement:
        times = op.Max(exponential_of_shape(op, op.shape(x), torch.float32), op.like(chances, 1e-30))  # 0 / 0 would win
        _, first = op.TopK(op.Div(chances, times), op.ints([num_samples]), outputs=2)  # an exponential race
        return op.declare(first, torch.int64)
    if is_symbolic(num_samples):
        msg = f"ONNX's Multinomial needs a constant number of samples, not {num_samples}. Draw without replacement."
        raise TargetError(msg)
    if op.rank(x) == 1:
        return op.Squeeze(_draw_multinomial(op, op.Unsqueeze(chances, op.ints([0])), num_samples), op.ints([0]))
    rows, classes = op.shape(x)
    if not op.sizes.may_be_zero(rows):
        return _draw_multinomial(op, chances, num_samples)
    more = op.Concat(op.Expand(op.like(chances, 1.0), op.ints([1, classes])), chances, axis=0)
    return op.Slice(
        _draw_multinomial(op, more, num_samples), *(op.ints([n]) for n in (1, rows + 1, 0))
    )  # it rejects 0 rows


def _draw_multinomial(op, chances, num_samples):
    """Draw indices ``int64[n, num_samples]`` from ``chances[n, c]``."""
    return op.declare(op.Multinomial(op.Log(chances), sample_size=num_samples, dtype=torch.int64), torch.int64)


@multinomial.samples
def _(draw, s):
    x = draw(s.tensor(rank=(1, 2), side=(2, 5), dtype=FLOATS, low=0.1, high=1, domain=(0, 9)))
    return s.call(x, num_samples=draw(s.integers(1, x.shape[-1])), replacement=draw(s.booleans()))
