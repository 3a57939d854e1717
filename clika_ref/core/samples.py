"""Descriptions of legal operator calls. Drivers turn them into concrete calls: random draws, covering arrays or graphs.

A driver decides each description, and operators only describe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGER_DTYPES = (torch.int64, torch.int32, torch.uint8, torch.int8)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the given ``options``. The first is the simplest, and failing cases shrink to it."""

    options: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class IntegerRange:
    """An integer in ``[low, high]``."""

    low: int
    high: int


@dataclass(frozen=True, slots=True)
class FloatRange:
    """A float in ``[low, high]``."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """A tensor of one of ``dtypes``, with a fixed ``shape``, or with bounds for ``rank`` and the ``size`` of dims.

    Elements typically lie in ``[low, high]``. ``domain`` is their legal range; special values outside it are never
    tried. Every range of floats includes NaN unless ``nan`` is false. ``unique`` asks for elements without ties.
    """

    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int, ...] | None
    rank: tuple[int, int]
    size: tuple[int, int]
    low: float
    high: float
    domain: tuple[float, float] | None
    nan: bool
    unique: bool

    def make_sample(self, dtype: torch.dtype, shape: tuple[int, ...]) -> TensorSample:
        """Return a sample with the given dtype and shape."""
        return TensorSample(dtype, shape, self.low, self.high, self.domain, nan=self.nan, unique=self.unique)


@dataclass(frozen=True, slots=True)
class TensorSample:
    """A drawn tensor: dtype and shape are fixed, the driver fills in the elements.

    ``low``, ``high``, ``domain``, ``nan`` and ``unique`` are as in `TensorDescription`.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    low: float
    high: float
    domain: tuple[float, float] | None = None
    nan: bool = True
    unique: bool = False

    @property
    def rank(self) -> int:
        """The number of dims."""
        return len(self.shape)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator: ``operands`` (values, samples, numbers or None), and attributes ``attrs`` by name."""

    operands: tuple[Any, ...]
    attrs: dict[str, Any] = field(default_factory=dict[str, Any])


class Draw(Protocol):
    """The function that a driver passes to a ``samples`` function: it draws a value for one description."""

    def __call__(self, description: Any, /) -> Any:
        """Return a concrete value for a description."""
        ...


class Descriptions:
    """The ``s`` argument of ``samples`` functions: makes descriptions without drawing values."""

    def tensor(
        self,
        *,
        shape: Sequence[int] | None = None,
        rank: int | tuple[int, int] = (0, 5),
        size: tuple[int, int] = (1, 5),
        dtype: torch.dtype | Sequence[torch.dtype] = torch.float32,
        low: float = -3.0,
        high: float = 3.0,
        domain: tuple[float, float] | None = None,
        nan: bool = True,
        unique: bool = False,
    ) -> TensorDescription:
        """Describe a tensor of the given shape, or of any shape with rank and dim sizes in the given ranges.

        Args:
            shape: the size of each dim; None draws them.
            rank: the number of dims, or its minimum and maximum.
            size: the minimum and maximum size of each dim.
            dtype: the dtype of the elements, or several to draw from.
            low: the smallest element.
            high: the largest element.
            domain: the bounds of special elements; None allows any.
            nan: whether elements may be NaN.
            unique: whether all elements differ.
        """
        dtypes = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
        ranks = (rank, rank) if isinstance(rank, int) else rank
        fixed_shape = None if shape is None else tuple(shape)
        return TensorDescription(dtypes, fixed_shape, ranks, size, low, high, domain, nan, unique)

    def floats(self, low: float, high: float) -> FloatRange:
        """Describe a float in ``[low, high]``."""
        return FloatRange(low, high)

    def integers(self, low: int, high: int) -> IntegerRange:
        """Describe an integer in ``[low, high]``."""
        return IntegerRange(low, high)

    def booleans(self) -> Choice:
        """Describe ``False`` or ``True``."""
        return Choice((False, True))

    def choice(self, *options: Any) -> Choice:
        """Describe one of the ``options``, the simplest first."""
        return Choice(options)

    def call(self, *operands: Any, **attrs: Any) -> Call:
        """Describe the call itself from drawn parts: ``operands`` by position, attributes ``attrs`` by name."""
        return Call(operands, attrs)


def random_draw(random: Random) -> Draw:
    """Return the simplest driver: it draws every value from ``random``."""

    def draw(description: Any, /) -> Any:
        match description:
            case Choice(options):
                return random.choice(options)
            case IntegerRange(low, high):
                return random.randint(low, high)
            case FloatRange(low, high):
                return random.uniform(low, high)
            case TensorDescription():
                return _draw_tensor(random, description)
            case _:
                raise TypeError(
                    f"draw(): {description!r} (a {type(description).__name__}) is not a description made by `s`. Pass "
                    "one, such as s.integers(1, 8)."
                )

    return draw


def _draw_tensor(random: Random, d: TensorDescription) -> TensorSample:
    shape = tuple(random.randint(*d.size) for _ in range(random.randint(*d.rank))) if d.shape is None else d.shape
    return d.make_sample(random.choice(d.dtypes), shape)


def realize(sample: TensorSample, generator: torch.Generator) -> torch.Tensor:
    """Return a tensor for a drawn ``sample``: its shape, and elements in ``[low, high]`` drawn from ``generator``."""
    if sample.dtype == torch.bool:
        return torch.randint(0, 2, sample.shape, generator=generator).bool()
    if sample.unique:
        steps = torch.randperm(math.prod(sample.shape), generator=generator).double()
        flat = sample.low + steps / max(len(steps) - 1, 1) * (sample.high - sample.low)
        return flat.reshape(sample.shape).to(sample.dtype)
    if not sample.dtype.is_floating_point:
        low = max(math.ceil(sample.low), torch.iinfo(sample.dtype).min)
        high = max(math.floor(sample.high), low)
        return torch.randint(low, high + 1, sample.shape, generator=generator).to(sample.dtype)
    uniform = torch.rand(sample.shape, generator=generator, dtype=torch.float64)
    return (sample.low + uniform * (sample.high - sample.low)).to(sample.dtype)
