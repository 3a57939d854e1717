"""How a target quantizes, as data that it declares; placement combines it with the traits of operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clika_ref.core.types import TensorType


CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})
TRANSPOSED_CONVOLUTIONS = frozenset({"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})
MATRIX_PRODUCTS = frozenset({"linear", "matmul"})
"""Operators that multiply and accumulate, grouped as schemes list them."""


@dataclass(frozen=True, slots=True)
class QuantizedType:
    """A quantized type: a range of integers that represent floats."""

    bits: int = 8
    """Bit width."""
    is_signed: bool = False
    """Whether the type has negative integers."""
    is_symmetric: bool = False
    """Whether the range is symmetric around 0.

    Signed types then have zero point 0 for any range. Unsigned ones have their middle as zero point, or 0 if no value
    is negative.
    """
    is_narrow: bool = False
    """Whether the minimum of a signed type is excluded, so that the type contains the negative of each integer."""

    @property
    def low(self) -> int:
        """Minimum of the type."""
        return -(2 ** (self.bits - 1)) + self.is_narrow if self.is_signed else 0

    @property
    def high(self) -> int:
        """Maximum of the type."""
        return 2 ** (self.bits - 1) - 1 if self.is_signed else 2**self.bits - 1


@dataclass(frozen=True, slots=True)
class WeightOnlyScheme:
    """Low-bit weights that a target supports in layers that compute in float."""

    layers: frozenset[str] = frozenset()
    """Operators with such weights."""
    bits: frozenset[int] = frozenset({4, 8})
    """Supported bit widths."""
    blocks: Mapping[int, frozenset[int]] = field(default_factory=dict[int, frozenset[int]], hash=False)
    """Supported block sizes by bit width, 0 for a whole row; any size for widths that are not listed."""
    lookups: Mapping[str, bool] = field(default_factory=dict[str, bool], hash=False)
    """Operators that read rows of low-bit tables, also where layers compute in INT8.

    True if the target has an operator of its own for rows of a 4-bit table, and fuses a layer with the same table if
    this is transposed before it is dequantized.
    """
    rounds_inputs: bool = False
    """Whether the target rounds the input of such a layer to 8 bits at run time, with a scale per block of a row.

    A target that does so on request has False, and implements `Target.with_rounded_inputs`.
    """
    block_size: int = 32
    """Size of these blocks if a scale of the weight covers a whole row."""
    needs_whole_bytes: bool = False
    """Whether the elements of each stored row must fill whole bytes: 4-bit rows then have an even length."""
    is_default: bool = False
    """Whether models are quantized like this for the target by default."""


@dataclass(frozen=True, slots=True)
class FusedSums:
    """Sums that a target fuses with the layer of one operand, such as residuals."""

    layers: frozenset[str]
    """Operators of these layers."""
    rounds_layer_result: bool
    """Whether the result of the layer itself is also rounded, or only the other operand."""


@dataclass(frozen=True, slots=True)
class QuantizationScheme:
    """The operators that a target quantizes, and the types that it uses.

    A target has one as the attribute ``scheme``; a target without one computes in float. Operators are given by name.
    """

    activations: QuantizedType
    """Type of activations, with one scale for each."""
    weights: QuantizedType
    """Type of weights, with one scale for each output channel except for ``per_tensor_weights``."""
    layers: frozenset[str] = frozenset()
    """Operators with weights that run quantized if their inputs are quantized."""
    needs_quantized_output: frozenset[str] = frozenset()
    """Those of ``layers`` that also need a quantized result."""
    fused: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]], hash=False)
    """Operators that the runtime fuses with the one before them, with the attributes that they must have.

    The fused node returns their result.
    """
    elementwise: frozenset[str] = frozenset()
    """Operators that run quantized if all their inputs and outputs are quantized, each with its own scale."""
    data_movement: frozenset[str] = frozenset()
    """Operators that pass quantized data on, with the scale that it has."""
    quantizes_before_moves: bool = False
    """Whether a value is quantized before it is moved to a layer, not after."""
    fused_sums: FusedSums | None = None
    """Sums that run quantized if one operand is the result of a layer; None if there are none."""
    shared_qparams: frozenset[str] = frozenset()
    """Operators that join tensors, which must all have the scale of the result."""
    needs_zero_point_0: frozenset[str] = frozenset()
    """Layers that run quantized only if the zero point of their input is 0."""
    needs_single_group: frozenset[str] = frozenset()
    """Layers that run quantized only without channel groups."""
    per_tensor_weights: frozenset[str] = frozenset()
    """Layers with a single weight scale if the weight has parts: groups of channels, or a stack of matrices."""
    is_all_or_none_quantized: bool = False
    """Whether all inputs of a layer or a join must be quantized, or none.

    Layers and joins in float then read the float form of a value that others read quantized.
    """
    int32_bias: frozenset[str] = frozenset()
    """Layers with an INT32 bias; its scale is the input scale times the weight scale.

    Other layers add the bias in float.
    """
    int32_bias_2d_or_static: frozenset[str] = frozenset()
    """Those of ``int32_bias`` that need an input with two dims, or with static dims only."""
    weights_only: WeightOnlyScheme | None = None
    """Weight-only support; None if there is none."""
    dynamic: Mapping[str, int | None] = field(default_factory=dict[str, "int | None"], hash=False)
    """Layers that the target computes in INT8, with inputs that it quantizes at run time; recurrent ones by default.

    The number is that of the states of a recurrent layer from which on this is faster. With None, the target only reads
    8-bit weights, for weight-only quantization, and computes in float.
    """
    has_float_bodies: bool = False
    """Whether layers inside control flow run in float."""


def is_int32_bias_supported(scheme: QuantizationScheme, operator: str, read: TensorType) -> bool:
    """Return whether a layer has an INT32 bias.

    Args:
        scheme: of the target.
        operator: of the layer.
        read: the type of its input.
    """
    is_flat = read.rank == 2 or all(isinstance(size, int) for size in read.shape)
    return operator in scheme.int32_bias and (is_flat or operator not in scheme.int32_bias_2d_or_static)


def is_fused(scheme: QuantizationScheme, operator: str, attributes: Mapping[str, Any]) -> bool:
    """Return whether the runtime fuses an operator with the layer before it.

    Args:
        scheme: of the target.
        operator: the operator.
        attributes: its attributes.
    """
    required = scheme.fused.get(operator)
    return required is not None and all(attributes[name] == value for name, value in required.items())
