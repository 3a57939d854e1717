"""Random tensors: of a given shape, and from distributions with parameters."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.types import Number

from clika_ref.core.errors import TargetError
from clika_ref.core.operators import operator
from clika_ref.core.symbols import is_symbolic
from clika_ref.core.types import TensorType
from clika_ref_aten.elementwise import unary_sampler

aten = torch.ops.aten

FLOATS = (torch.float32, torch.float64, torch.float16)
GENERATOR_DTYPES = FLOATS[:2]
"""The dtypes of ONNX Runtime's random number generators."""


def draw_random(op, op_type, shape, dtype):
    """Draw random numbers with an ONNX generator; the shape may be symbolic."""
    kind = dtype if dtype in GENERATOR_DTYPES else torch.float32
    if is_symbolic(tuple(shape)) or not shape:
        model = op.Expand(op.scalar(0.0, kind), op.ints(shape)) if shape else op.scalar(0.0, kind)
        values = op.node(f"{op_type}Like", model)
    else:
        values = op.declare(op.node(op_type, shape=[int(size) for size in shape], dtype=kind), kind)
    return op.cast(values, dtype)


def draw_uniform(op, shape, dtype):
    """Draw uniform random numbers in ``[0, 1)``."""
    if dtype in GENERATOR_DTYPES:
        return draw_random(op, "RandomUniform", shape, dtype)
    share = draw_random(op, "RandomUniform", shape, torch.float32)
    steps = op.scalar(2 / torch.finfo(dtype).eps, torch.float32)  # FP16 would round the largest to 1
    return op.cast(op.Div(op.Floor(op.Mul(share, steps)), steps), dtype)


def draw_normal(op, shape, dtype):
    """Draw normal random numbers with mean 0 and standard deviation 1."""
    return draw_random(op, "RandomNormal", shape, dtype)


def draw_integers(op, shape, low, high):
    """Draw int64 random numbers in ``[low, high)`` from float64, which is precise enough for any range in a model."""
    share = draw_uniform(op, shape, torch.float64)
    steps = op.cast(op.Floor(op.Mul(share, op.scalar(high - low, torch.float64))), torch.int64)
    return op.Add(steps, op.scalar(low, torch.int64))


def _generator_lowering(draw_of_shape):
    def lowering(op, *operands, **attributes):
        return draw_of_shape(op, op.result.shape, op.result.dtype)

    return lowering


def _shape_samples(draw, s):
    return s.call(size=draw(s.tensor()).shape, dtype=draw(s.choice(None, *FLOATS)))


@operator(aten.rand.default, aten.rand.generator, random=True)
def rand(*, size: tuple[int, ...], dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
    """Uniform random numbers in ``[0, 1)`` of shape ``size``."""
    return torch.rand(size, dtype=dtype, device=device)


rand.onnx(_generator_lowering(draw_uniform))
rand.samples(_shape_samples)


@operator(aten.randn.default, aten.randn.generator, random=True)
def randn(*, size: tuple[int, ...], dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
    """Normal random numbers with mean 0 and standard deviation 1, of shape ``size``."""
    return torch.randn(size, dtype=dtype, device=device)


randn.onnx(_generator_lowering(draw_normal))
randn.samples(_shape_samples)


def _declare_like(declared, *overloads):
    """Declare factories that use the shape, dtype and device of a tensor."""

    @declared.from_torch(*overloads)
    def _(x, *, dtype=None, device=None, **storage):
        return declared.call(size=x.type.shape, dtype=dtype or x.type.dtype, device=device)


_declare_like(rand, aten.rand_like.default, aten.rand_like.generator)
_declare_like(randn, aten.randn_like.default, aten.randn_like.generator)


@operator(random=True)
def randint(
    *,
    low: int,
    high: int,
    size: tuple[int, ...],
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Random integers in ``[low, high)`` of shape ``size``."""
    return torch.randint(low, high, size, dtype=dtype or torch.int64, device=device)


@randint.onnx
def _(op, *, low, high, size, dtype, device):
    return op.cast(draw_integers(op, size, low, high), op.result.dtype)


@randint.types
def _(*, low, high, size, dtype, device):
    return TensorType(dtype or torch.int64, size)


@randint.samples
def _(draw, s):
    return s.call(
        low=draw(s.integers(-4, 1)),
        high=draw(s.integers(2, 9)),
        size=draw(s.tensor(rank=(0, 3))).shape,
        dtype=draw(s.choice(None, torch.int32, torch.float32)),
    )


@randint.from_torch(aten.randint.low, aten.randint.low_generator)
def _(low, high, size, *, dtype=None, device=None, **storage):
    return randint.call(low=low, high=high, size=tuple(size), dtype=dtype, device=device)


@randint.from_torch(aten.randint.default, aten.randint.generator)
def _(high, size, *, dtype=None, device=None, **storage):
    return randint.call(low=0, high=high, size=tuple(size), dtype=dtype, device=device)


@randint.from_torch(aten.randint_like.low_dtype, aten.randint_like.low_generator_dtype)
def _(x, low, high, *, dtype=None, device=None, **storage):
    return randint.call(low=low, high=high, size=x.type.shape, dtype=dtype or x.type.dtype, device=device)


@randint.from_torch(aten.randint_like.default, aten.randint_like.generator)
def _(x, high, *, dtype=None, device=None, **storage):
    return randint.call(low=0, high=high, size=x.type.shape, dtype=dtype or x.type.dtype, device=device)


@randint.from_torch(aten.random.default)
def _(x, *, generator=None):
    return _random_call(x, 0, None)


@randint.from_torch(aten.random.to)
def _(x, to, *, generator=None):
    return _random_call(x, 0, to)


@randint.from_torch(getattr(aten.random, "from"))
def _(x, low, high, *, generator=None):
    return _random_call(x, low, high)


def _random_call(x, low, high):
    """Return the `randint` call that replaces ``x.random_(low, high)``.

    Source: torch.Tensor.random_. The default range ends at the largest integer, or for floats at the largest one up to
    which all integers are exact.
    """
    dtype = x.type.dtype
    if high is None:
        high = round(2 / torch.finfo(dtype).eps) + 1 if dtype.is_floating_point else torch.iinfo(dtype).max
    return randint.call(low=low, high=high, size=x.type.shape, dtype=dtype)


@operator(random=True)
def randperm(*, n: int, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
    """Integers from 0 to ``n - 1`` in random order."""
    return torch.randperm(n, dtype=dtype or torch.int64, device=device)


@randperm.onnx
def _(op, *, n, dtype, device):
    keys = draw_uniform(op, (n,), torch.float32)
    _, order = op.TopK(keys, op.ints([n]), outputs=2)
    return op.cast(op.declare(order, torch.int64), op.result.dtype)


@randperm.samples
def _(draw, s):
    return s.call(n=draw(s.integers(1, 9)), dtype=draw(s.choice(None, torch.int32)))


@randperm.from_torch(aten.randperm.default, aten.randperm.generator)
def _(n, *, dtype=None, device=None, **storage):
    return randperm.call(n=n, dtype=dtype, device=device)


# Distributions with parameters


def scale_and_shift(op, x, factor, offset):
    """Return ``x * factor + offset`` for scalar ``factor`` and ``offset``."""
    return op.Add(op.Mul(x, op.like(x, factor)), op.like(x, offset))


def draw_exponential(op, shape, dtype):
    """Draw exponential random numbers with mean 1."""
    share = op.Sub(op.scalar(1, dtype), draw_uniform(op, shape, dtype))  # in (0, 1]: its logarithm is finite
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
    share = draw_uniform(op, op.shape(x), dtype)
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
    return op.Add(op.Mul(draw_normal(op, op.result.shape, op.result.dtype), std), mean)


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
    return scale_and_shift(op, draw_uniform(op, op.shape(x), op.dtype(x)), high - low, low)


uniform.samples(unary_sampler(dtype=FLOATS, attrs={"low": (0.0, -1.5), "high": (1.0, 4.0)}))


@uniform.from_torch(aten.uniform.default)
def _(x, low=0.0, high=1.0, *, generator=None, **named):
    return uniform.call(x, low=named.get("from", low), high=named.get("to", high))


@operator(aten.exponential.default, random=True)
def exponential(x: Tensor, *, lambd: float = 1.0) -> Tensor:
    """Exponential random numbers with mean ``1 / lambd``, in the shape and dtype of ``x``."""
    return aten.exponential.default(x, lambd)


@exponential.onnx
def _(op, x, *, lambd):
    return op.Div(draw_exponential(op, op.shape(x), op.dtype(x)), op.like(x, lambd))


exponential.samples(unary_sampler(dtype=FLOATS, attrs={"lambd": (1.0, 0.5, 3.0)}))


@operator(aten.log_normal.default, random=True)
def log_normal(x: Tensor, *, mean: float = 1.0, std: float = 2.0) -> Tensor:
    """``exp`` of normal random numbers with that mean and standard deviation, in the shape and dtype of ``x``."""
    return aten.log_normal.default(x, mean, std)


@log_normal.onnx
def _(op, x, *, mean, std):
    return op.Exp(scale_and_shift(op, draw_normal(op, op.shape(x), op.dtype(x)), std, mean))


log_normal.samples(unary_sampler(dtype=FLOATS, attrs={"mean": (1.0, 0.0), "std": (2.0, 0.3)}))


@operator(aten.multinomial.default, random=True)
def multinomial(x: Tensor, *, num_samples: int, replacement: bool = False) -> Tensor:
    """Draw ``num_samples`` indices along the last dim of ``x[c]`` or ``x[n, c]``, in proportion to ``x``."""
    return torch.multinomial(x, num_samples, replacement)


@multinomial.onnx
def _(op, x, *, num_samples, replacement):
    chances = op.cast(x, torch.float32)
    if not replacement:
        times = op.Max(draw_exponential(op, op.shape(x), torch.float32), op.like(chances, 1e-30))  # 0 / 0 would win
        _, first = op.TopK(op.Div(chances, times), op.ints([num_samples]), outputs=2)  # an exponential race
        return op.declare(first, torch.int64)
    if is_symbolic(num_samples):
        raise TargetError(
            f"ONNX's Multinomial needs a fixed number of samples, not {num_samples}; draw without replacement"
        )
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
    x = draw(s.tensor(rank=(1, 2), size=(2, 5), dtype=FLOATS, low=0.1, high=1, domain=(0, 9)))
    return s.call(x, num_samples=draw(s.integers(1, x.shape[-1])), replacement=draw(s.booleans()))
