"""How a target wants numbers quantized, as data that it declares; placement joins it with the traits of operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clika_ref.core.errors import TargetError

if TYPE_CHECKING:
    from clika_ref.core.targets import Target
    from clika_ref.core.types import TensorType


CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})
TRANSPOSED = frozenset({"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})
PRODUCTS = frozenset({"linear", "matmul"})
"""Operators that multiply and add up, by the kinds that schemes speak of."""


@dataclass(frozen=True, slots=True)
class Integers:
    """A kind of integers that stand for floats."""

    bits: int = 8
    """How many each has."""
    is_signed: bool = False
    """Whether some are negative."""
    is_symmetric: bool = False
    """Whether as much is covered below 0 as above: signed ones have the zero point 0 whatever the range is, unsigned
    ones their middle, but 0 where nothing lies below."""
    is_narrow: bool = False
    """Whether the least of signed ones is left out, so that the negative of each is one of them."""

    @property
    def low(self) -> int:
        """The least of them."""
        return -(2 ** (self.bits - 1)) + self.is_narrow if self.is_signed else 0

    @property
    def high(self) -> int:
        """The greatest of them."""
        return 2 ** (self.bits - 1) - 1 if self.is_signed else 2**self.bits - 1


def _none() -> frozenset[str]:
    return frozenset()


@dataclass(frozen=True, slots=True)
class WeightsOnly:
    """Weights that a target takes in few bits, where it computes in float."""

    layers: frozenset[str] = field(default_factory=_none)
    """Operators whose weight it reads so."""
    bits: frozenset[int] = frozenset({4, 8})
    """How wide they may be."""
    blocks: Mapping[int, frozenset[int]] = field(default_factory=dict[int, frozenset[int]], hash=False)
    """Of a width that is named here, how many neighbours may share a scale, 0 for a whole row; of others any number."""
    rounds_inputs: bool = False
    """Whether it rounds what such a layer reads to 8 bits as it multiplies, each block of a row with its own scale."""
    block_size: int = 32
    """Of those blocks where a scale of the weight belongs to a whole row."""
    is_default: bool = False
    """Whether models are quantized so for the target, unless their user says otherwise."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums that a target computes along with the layer whose result they add something to, such as residuals."""

    layers: frozenset[str]
    """Operators of these layers."""
    of_two_rounded: bool
    """Whether the result of the layer itself is rounded, too, or only what is added to it."""


@dataclass(frozen=True, slots=True)
class QuantizationScheme:
    """What a target computes in integers, and in which.

    A target has one as an attribute ``scheme``; whoever has none computes in float. Operators are said by their names.
    """

    activations: Integers
    """Of a value between layers, one scale for all of it."""
    weights: Integers
    """Of a weight, one scale for each output channel, but see ``one_scale``."""
    layers: frozenset[str] = field(default_factory=_none)
    """Operators with weights that run in integers, where what they read is quantized."""
    closed: frozenset[str] = field(default_factory=_none)
    """Of those, the ones that do so only if their result is quantized, too."""
    absorbed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]], hash=False)
    """Operators that the runtime computes along with the one before them, which is said to return what they do; with
    the attributes that they must have."""
    elementwise: frozenset[str] = field(default_factory=_none)
    """Operators that run in integers if all tensors that they read and return are quantized, each with its scale."""
    moving: frozenset[str] = field(default_factory=_none)
    """Operators that hand integers on, with the scale that they had."""
    moves_integers: bool = False
    """Whether a float is rounded before it is moved to a layer, and not behind that."""
    sums: Sums | None = None
    """Those that take integers as long as one operand is the result of a layer; none where None."""
    joined: frozenset[str] = field(default_factory=_none)
    """Operators that join tensors, which must all have the scale of what becomes of them."""
    from_zero: frozenset[str] = field(default_factory=_none)
    """Layers that run in integers only if the zero point of what they read is 0."""
    undivided: frozenset[str] = field(default_factory=_none)
    """Layers that run in integers only if their channels are not divided into groups."""
    one_scale: frozenset[str] = field(default_factory=_none)
    """Layers whose weight has one scale in all where it has parts: groups of channels, or a stack of matrices."""
    is_all_or_none: bool = False
    """Whether what a layer or a join reads must be integers altogether, or not at all: those that compute in float read
    the float of a value that others read in integers."""
    integer_bias: frozenset[str] = field(default_factory=_none)
    """Layers whose bias is an integer of 32 bits, its scale that of the input times that of the weight; to others it is
    added in float."""
    flat_bias: frozenset[str] = field(default_factory=_none)
    """Of those, the ones that do so only where what they read has two sides, or none that differs from call to call."""
    weights_only: WeightsOnly | None = None
    """What it takes where values between layers stay float; nothing where None."""


def adds_integer_bias(scheme: QuantizationScheme, operator: str, read: TensorType) -> bool:
    """Whether a layer has an integer for a bias where it reads a tensor of a type."""
    is_flat = read.rank == 2 or all(isinstance(side, int) for side in read.shape)
    return operator in scheme.integer_bias and (is_flat or operator not in scheme.flat_bias)


def absorbs(scheme: QuantizationScheme, operator: str, attributes: Mapping[str, Any]) -> bool:
    """Whether the runtime computes an operator with such attributes along with the layer before it."""
    wanted = scheme.absorbed.get(operator)
    return wanted is not None and all(attributes[name] == value for name, value in wanted.items())


def scheme_of(target: Target) -> QuantizationScheme | None:
    """Return the target's attribute ``scheme``, None where it has none and computes in float.

    Raises:
        TargetError: it is no `QuantizationScheme`.
    """
    stated: Any = getattr(target, "scheme", None)
    if not isinstance(stated, QuantizationScheme | None):
        msg = (
            f"the target {target.name} states scheme = {stated!r}; "
            "it must be a clika_ref.quantization_scheme.QuantizationScheme, or None"
        )
        raise TargetError(msg)
    return stated
