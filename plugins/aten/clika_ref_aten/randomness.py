"""Random tensors of a given shape."""

from __future__ import annotations

import torch
from torch import Tensor

from clika_ref.core.operators import operator
from clika_ref.core.symbols import is_symbolic
from clika_ref.core.types import TensorType

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
        values = op.declare(op.node(op_type, shape=[int(side) for side in shape], dtype=kind), kind)
    return op.cast(values, dtype)


def uniform_of_shape(op, shape, dtype):
    """Draw uniform random numbers in ``[0, 1)``."""
    if dtype in GENERATOR_DTYPES:
        return draw_random(op, "RandomUniform", shape, dtype)
    share = draw_random(op, "RandomUniform", shape, torch.float32)
    steps = op.scalar(2 / torch.finfo(dtype).eps, torch.float32)  # half precision would round the largest to 1
    return op.cast(op.Div(op.Floor(op.Mul(share, steps)), steps), dtype)


def normal_of_shape(op, shape, dtype):
    """Draw normal random numbers with mean 0 and standard deviation 1."""
    return draw_random(op, "RandomNormal", shape, dtype)


def integers_of_shape(op, shape, low, high):
    """Draw int64 random numbers in ``[low, high)`` from float64, which is precise enough for any range in a model."""
    share = uniform_of_shape(op, shape, torch.float64)
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


rand.onnx(_generator_lowering(uniform_of_shape))
rand.samples(_shape_samples)


@operator(aten.randn.default, aten.randn.generator, random=True)
def randn(*, size: tuple[int, ...], dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
    """Normal random numbers with mean 0 and standard deviation 1, of shape ``size``."""
    return torch.randn(size, dtype=dtype, device=device)


randn.onnx(_generator_lowering(normal_of_shape))
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
    return op.cast(integers_of_shape(op, size, low, high), op.result.dtype)


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
    keys = uniform_of_shape(op, (n,), torch.float32)
    _, order = op.TopK(keys, op.ints([n]), outputs=2)
    return op.cast(op.declare(order, torch.int64), op.result.dtype)


@randperm.samples
def _(draw, s):
    return s.call(n=draw(s.integers(1, 9)), dtype=draw(s.choice(None, torch.int32)))


@randperm.from_torch(aten.randperm.default, aten.randperm.generator)
def _(n, *, dtype=None, device=None, **storage):
    return randperm.call(n=n, dtype=dtype, device=device)
