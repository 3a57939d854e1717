"""Low-bit weights with a scale for each channel or for each block of it, and the rounding of inputs next to them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from clika_ref.core.errors import ModelError, TargetError
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.quantization_scheme import QuantizedType
from clika_ref.core.targets import Target
from clika_ref.core.types import TensorType
from clika_ref.quantization.qdq.layer_weights import bias_of, data_of, weight_of, weight_position_of
from clika_ref.settings.quantization import INT8_BITS

INT4_BITS = 4
"""Bit width of weights of which two are stored in a byte."""

MAX_INT8 = 127
"""Maximum of the 8-bit integers of an input's block, which the element of largest magnitude gets."""


@dataclass(frozen=True)
class PackedWeight:
    """The low-bit form of a layer's weight ``[outputs, inputs]``."""

    bits: int
    block_size: int
    """Number of neighbors in a row that share a scale; 0 for one scale per row."""
    scales: Tensor
    """``float32[outputs, blocks]``."""
    offsets: Tensor | None = None
    """``int8[outputs, inputs]``: steps between each integer and the nearest one; None for rounding to nearest."""
    is_narrow: bool = False
    """Whether the minimum of the type is excluded."""

    def is_equal(self, other: PackedWeight) -> bool:
        """Return whether two forms of one weight have the same integers and scales."""
        if (self.quantized_type, self.block_size) != (other.quantized_type, other.block_size):
            return False
        pairs = (self.scales, other.scales), (self.offsets, other.offsets)
        return all(one is two or (one is not None and two is not None and torch.equal(one, two)) for one, two in pairs)

    @property
    def quantized_type(self) -> QuantizedType:
        """The quantized type."""
        return QuantizedType(self.bits, is_signed=True, is_symmetric=True, is_narrow=self.is_narrow)

    def to_device(self, device: torch.device) -> PackedWeight:
        """Return a copy with its tensors on a device."""
        offsets = None if self.offsets is None else self.offsets.to(device)
        return replace(self, scales=self.scales.to(device), offsets=offsets)

    def select_rows(self, indices: Tensor) -> PackedWeight:
        """Return the form of some rows ``int64[n]`` of the weight."""
        offsets = None if self.offsets is None else self.offsets[indices]
        return replace(self, scales=self.scales[indices], offsets=offsets)

    def bytes_of(self, elements: int) -> int:
        """Return the bytes that this many elements take on disk, scales included."""
        return elements * self.bits // 8 + self.scales.numel() * self.scales.element_size()

    def steps(self, rows: Tensor) -> Tensor:
        """Quantize a weight ``float32[outputs, inputs]`` to ``int8[outputs, inputs]``."""
        kind, blocks = self.quantized_type, rows.reshape(*self.scales.shape, -1)
        nearest = (blocks / self.scales[..., None]).reshape(rows.shape).round().clamp(kind.low, kind.high)
        offsets = nearest if self.offsets is None else (nearest + self.offsets).clamp(kind.low, kind.high)
        return offsets.to(torch.int8)

    def dequantize(self, rows: Tensor) -> Tensor:
        """Return the dequantized weight, ``float32[outputs, inputs]``."""
        blocks = self.steps(rows).float().reshape(*self.scales.shape, -1) * self.scales[..., None]
        return blocks.reshape(rows.shape)


def round_in_blocks(x: Tensor, size: int) -> Tensor:
    """Quantize and dequantize blocks of ``size`` elements along the last dim to 8 bits; the last block is padded."""
    length = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -length % size))
    blocks = padded.reshape(*x.shape[:-1], -1, size)
    scales = blocks.abs().amax(-1, keepdim=True) / MAX_INT8
    rounded = torch.where(scales > 0, (blocks / scales).round() * scales, blocks)
    return rounded.reshape(padded.shape)[..., :length]


def has_output_rows(node: Node) -> bool:
    """Return whether the weight of a layer has a row for each output, not a column."""
    return (node.op.trait.axis or 0) == 0


def weight_rows(node: Node, weight: Tensor) -> Tensor:
    """Return the weight of a layer as ``float32[outputs, inputs]``."""
    weight = weight.detach().float()
    return weight if has_output_rows(node) else weight.T


class StoredOrder(enum.Enum):
    """How the weight ``[outputs, inputs]`` of a layer with low bits is stored."""

    COLUMNS = enum.auto()
    """As ``[inputs, outputs]``, as matrix products read it."""
    ROWS = enum.auto()
    """As it is, for a lookup in the same table; transposed after it is dequantized."""
    ROWS_FUSED = enum.auto()
    """As it is; transposed before it is dequantized, where a runtime fuses only that."""


def choose_stored_order(bits: int, *, is_fused: bool) -> StoredOrder:
    """Return how a layer stores a weight that is also the table of a lookup; `COLUMNS` if they cannot share it.

    Args:
        bits: of the weight.
        is_fused: see `WeightOnlyScheme.lookups`.
    """
    if is_fused:
        return StoredOrder.ROWS_FUSED
    return StoredOrder.COLUMNS if bits == INT4_BITS else StoredOrder.ROWS


def pack_layer_weight(
    graph: Graph,
    node: Node,
    packed: PackedWeight,
    operators: Mapping[str, Operator],
    order: StoredOrder = StoredOrder.COLUMNS,
) -> Value:
    """Replace the weight of a layer by its low-bit form and a ``dequantize`` node.

    A layer with a row for each output becomes a ``matmul`` with the transposed weight, and an ``add``. Runtimes look
    for low-bit weights as ``[inputs, outputs]`` before a matrix product.

    Args:
        graph: that of the layer.
        node: the layer.
        packed: the low-bit form.
        operators: those of the registry.
        order: how to store it; a transposition in the graph is computed when a runtime loads the file.

    Returns:
        The quantized weight as it is stored.
    """
    weight, build = weight_of(node), Builder(graph, operators, node, node.origin)
    is_swapped = has_output_rows(node) and order is StoredOrder.COLUMNS
    made = partial(_pack_columns if order is StoredOrder.COLUMNS else _pack_rows, node, weight, packed)
    shape = weight.type.shape[::-1] if is_swapped else weight.type.shape
    stored = build.constant(made, f"{weight.name}_integers", TensorType(torch.int8, shape))
    steps = build("permute", stored, dims=(1, 0)) if order is StoredOrder.ROWS_FUSED else stored
    in_blocks, has_rows = packed.block_size > 0, order is StoredOrder.ROWS
    blocks = packed.scales if has_rows else packed.scales.T.contiguous()
    scales = build.constant(
        (blocks if in_blocks else packed.scales[:, 0]).to(weight.type.dtype), f"{weight.name}_scale"
    )
    axis = 0 if in_blocks != has_rows else 1
    kind = {"dtype": weight.type.dtype, "bits": packed.bits, "block_size": packed.block_size or None}
    read = build("dequantize", steps, scales, axis=axis, **kind)
    read = build("permute", read, dims=(1, 0)) if has_rows else read
    if not has_output_rows(node):
        graph.set_input(node, weight_position_of(node), read)
        return stored
    product = result = build("matmul", node.inputs[0], read)
    bias = bias_of(node)
    if bias is not None:
        result = build("add", product, bias)
    graph.replace(node.output, result)
    product.name, node.output.name = node.output.name, product.name
    graph.erase(node)
    return stored


def pack_dynamic_layer(graph: Graph, node: Node, packed: PackedWeight, operators: Mapping[str, Operator]) -> None:
    """Replace a layer by one with the 8-bit form of its weight that rounds its input at run time.

    Args:
        graph: that of the layer.
        node: the layer.
        packed: the 8-bit form, with one scale for each row.
        operators: those of the registry.
    """
    weight, build = weight_of(node), Builder(graph, operators, node, node.origin)
    rows, columns = weight.type.shape if has_output_rows(node) else weight.type.shape[::-1]
    made = partial(_pack_columns, node, weight, packed)
    stored = build.constant(made, f"{weight.name}_integers", TensorType(torch.int8, (columns, rows)))
    scales = build.constant(packed.scales[:, 0].to(weight.type.dtype), f"{weight.name}_scale")
    result = build("dynamic_linear", node.inputs[0], stored, scales, bias_of(node))
    _replace_node(graph, node, result)


def pack_table(
    graph: Graph,
    node: Node,
    packed: PackedWeight,
    operators: Mapping[str, Operator],
    shared: Value | None,
    *,
    is_fused: bool,
) -> Value:
    """Replace the table of a lookup by its low-bit form, of which only the rows in use are dequantized.

    Args:
        graph: that of the lookup.
        node: the lookup.
        packed: the low-bit form.
        operators: those of the registry.
        shared: the quantized weight of a layer, with the same values; None to store them once more.
        is_fused: whether to use the operator that `WeightOnlyScheme.lookups` describes.

    Returns:
        The quantized table, ``int8[rows, elements]``.
    """
    table, build = weight_of(node), Builder(graph, operators, node, node.origin)
    quantized = shared
    if quantized is None:
        made = partial(_pack_rows, node, table, packed)
        quantized = build.constant(made, f"{table.name}_integers", TensorType(torch.int8, table.type.shape))
    scales = build.constant(packed.scales.to(table.type.dtype), f"{table.name}_scale")
    indices, kind = (
        node.inputs[1],
        {"bits": INT4_BITS if packed.bits == INT4_BITS else INT8_BITS, "dtype": table.type.dtype},
    )
    result = build("quantized_embedding", quantized, scales, indices, is_fused=is_fused, **kind)
    _replace_node(graph, node, result)
    return quantized


def _replace_node(graph: Graph, node: Node, result: Value) -> None:
    """Replace a node by the one with this result, which takes its name."""
    graph.replace(node.output, result)
    result.name, node.output.name = node.output.name, result.name
    graph.erase(node)


def _pack_rows(node: Node, weight: Value, packed: PackedWeight) -> Tensor:
    return packed.steps(weight_rows(node, data_of(weight)))


def _pack_columns(node: Node, weight: Value, packed: PackedWeight) -> Tensor:
    return packed.steps(weight_rows(node, data_of(weight))).T.contiguous()


def set_int4_storage(graph: Graph, target: Target, *, as_such: bool | None) -> None:
    """Store INT4 weights in half a byte each or, if ``as_such`` is False, in a byte.

    Raises:
        ModelError: ``as_such`` is True, and there are no INT4 weights.
        TargetError: ``as_such`` is False, there are INT4 weights, and the target has no weight-only INT8.
    """
    int4_nodes = [node for node in graph.nodes if node.attrs.get("bits") == INT4_BITS]
    if as_such and not int4_nodes:
        raise ModelError(
            "export_int4=True, but no layer has INT4 weights. Quantize with "
            "QuantizationSettings(weights_num_bits=[8, 4], prefer_weights_only_quantization=True), or export without "
            "it."
        )
    if as_such is False and int4_nodes and not _is_weight_only_int8_supported(target):
        raise TargetError(
            f"export_int4=False stores INT4 weights as INT8, but {target.name} does not support INT8 weight-only "
            "layers. Export without it."
        )
    for node in int4_nodes if as_such is False else ():
        node.attrs = {**node.attrs, "bits": INT8_BITS}


def _is_weight_only_int8_supported(target: Target) -> bool:
    """Return whether a target supports weight-only INT8."""
    scheme = target.scheme
    return scheme is not None and scheme.weights_only is not None and INT8_BITS in scheme.weights_only.bits
