"""TensorRT rules on the placement of QuantizeLinear/DequantizeLinear pairs around layers."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

import numpy as np
import onnx

from clika_ref_tensorrt.onnx_file import IDENTITY_OPERATORS, OnnxFile
from clika_ref_tensorrt.own_operators import DEQUANTIZE, DYNAMIC_QUANTIZERS, QUANTIZE
from clika_ref_tensorrt.rule_book import (
    CONVOLUTION_OPERATORS,
    FUSED_WITH_CONSTANT,
    LAYER_OPERATORS,
    LOW_BIT_TYPES,
    MATMUL_OPERATORS,
    POINTWISE_OPERATORS,
    QUANTIZED_TYPES,
    WEIGHTED_OPERATORS,
    Violations,
    factors_of,
    rule,
    type_name,
)


@rule("all-inputs")
def _(file: OnnxFile) -> Violations:
    for node in file.nodes_of_type(*LAYER_OPERATORS):
        found = [file.dequantizer(name) for name in factors_of(node)]
        kinds = [file.integer_type(made) for made in found if made is not None]
        low_bit = [
            position
            for position, made in enumerate(found)
            if made is not None and file.integer_type(made) in LOW_BIT_TYPES
        ]
        is_weight_only = all(made is None or file.is_weight(made) for made in found)
        is_supported_weight_only = file.has_weight_only and node.op_type in MATMUL_OPERATORS and is_weight_only
        if len({*kinds}) > 1 and low_bit:
            yield node, _describe_mixed_types(file, node, low_bit[0])
        elif len({*kinds} & QUANTIZED_TYPES) > 1:
            yield node, f"its operands are {' and '.join(map(type_name, kinds))}. Give both the same quantized type."
        elif 0 < len(kinds) < len(found) and not low_bit and not is_supported_weight_only:
            lacking = _operand_name(file, node, found.index(None))
            quantized = "the other is" if len(found) == 2 else "others are"
            yield (
                node,
                f"its {lacking} is not quantized, but {quantized}: it runs in float. Quantize all, or none.",
            )


def _describe_mixed_types(file: OnnxFile, node: onnx.NodeProto, position: int) -> str:
    """Return the message for a layer with one low-bit operand and another type for the other."""
    made, operand = file.dequantizer(node.input[position]), _operand_name(file, node, position)
    kind = type_name(file.integer_type(made)).lower() if made is not None else ""
    if node.op_type not in MATMUL_OPERATORS:
        return f"its {operand} is {kind}, which only matrix products support. Use int8, or keep it float."
    if made is None or not file.is_weight(made):
        return (
            f"its {operand} is {kind}, but its {_operand_name(file, node, 1 - position)} is not. Give both the same "
            "quantized type."
        )
    other = _operand_name(file, node, 1 - position)
    return f"its {operand} is {kind}, and its {other} is quantized. Such weights are for weight-only layers."


def _operand_name(file: OnnxFile, node: onnx.NodeProto, position: int) -> str:
    """Return the name of a layer's operand: ``weight`` for the one stored in the file, in either order."""
    match node.op_type:
        case "Attention":
            return ("query", "key", "value")[position]
        case "Conv" | "ConvTranspose":
            return ("input", "weight")[position]
        case kind if kind in MATMUL_OPERATORS:
            is_stored = [_is_stored(file, name) for name in factors_of(node)]
            return f"operand {position}" if sum(is_stored) != 1 else "weight" if is_stored[position] else "input"
        case _:
            return f"operand {position}"


def _is_stored(file: OnnxFile, name: str) -> bool:
    """Whether a value is stored in the file, in float or quantized."""
    made = file.dequantizer(name)
    return name in file.constants if made is None else file.is_weight(made)


@rule("before-fusion")
def _(file: OnnxFile) -> Violations:
    for node in file.nodes_of_type(QUANTIZE):
        made = file.source(node.input[0], IDENTITY_OPERATORS)
        if made is None or (made.op_type != "BatchNormalization" and layer_of(file, made) is None):
            continue
        readers = file.readers_after_pairs(node.output[0])
        if readers and all(_is_fused(file, reader) for reader in readers):
            kinds = " and ".join(dict.fromkeys(reader.op_type for reader in readers))
            yield node, f"is between {made.op_type} and {kinds}, which prevents their fusion. Put it after them."


def _is_fused(file: OnnxFile, node: onnx.NodeProto) -> bool:
    """Whether a node would be fused into a layer before it: a norm, or part of an activation.

    The part may be an elementwise product of a value with a function of it, as in SiLU.
    """
    roots = file.compute_once(_elementwise_roots)
    computed = {roots.get(name, name) for name in _variable_operands(file, node)}
    return node.op_type == "BatchNormalization" or (node.op_type in POINTWISE_OPERATORS and len(computed) == 1)


def _elementwise_roots(file: OnnxFile) -> MutableMapping[str, str]:
    """Return the single value that each value depends on elementwise, through pairs and constants, if there is one."""
    found = file.extend_enclosing({}, _elementwise_roots)
    for node in file.nodes:
        computed = {found.get(name, name) for name in _variable_operands(file, node)}
        if node.op_type in {QUANTIZE, DEQUANTIZE, *IDENTITY_OPERATORS, *POINTWISE_OPERATORS} and len(computed) == 1:
            found[node.output[0]] = computed.pop()
    return found


def _variable_operands(file: OnnxFile, node: onnx.NodeProto) -> Sequence[str]:
    """Return the operands of a node that are not constant."""
    return [name for name in node.input if name and name not in file.constants]


def layer_of(
    file: OnnxFile, node: onnx.NodeProto | None, layers: Sequence[str] | frozenset[str] = WEIGHTED_OPERATORS
) -> onnx.NodeProto | None:
    """Return the layer that a node is or is fused into before the activation, as a bias or a norm."""
    layer = file.compute_once(_layers_by_output).get(node.output[0]) if node is not None else None
    return layer if layer is not None and layer.op_type in layers else None


def _layers_by_output(file: OnnxFile) -> MutableMapping[str, onnx.NodeProto]:
    """Return the layers by their outputs, including outputs of fused nodes."""
    found = file.extend_enclosing({}, _layers_by_output)
    for node in file.nodes:
        if node.op_type in WEIGHTED_OPERATORS:
            found[node.output[0]] = node
        elif node.op_type in ("BatchNormalization", *FUSED_WITH_CONSTANT):
            computed = [name for name in node.input if name not in file.constants]
            is_inverse = node.op_type == "Div" and computed != [node.input[0]]
            source = file.source(computed[0]) if len(computed) == 1 and not is_inverse else None
            if source is not None and source.output[0] in found:
                found[node.output[0]] = found[source.output[0]]
    return found


@rule("residual")
def _(file: OnnxFile) -> Violations:
    for node in file.nodes_of_type("Add"):
        if any(name in file.constants for name in node.input):
            continue  # a bias
        sources = [_quantizer_source(file, name) for name in node.input]
        if not any(layer_of(file, source, CONVOLUTION_OPERATORS) for source in sources):
            if _is_float_residual(file, node):
                lacking = "adds a float tensor to an INT8 convolution, but the tensor is quantized for other readers"
                yield node, f"{lacking}. Add its quantized value."
            continue
        floats = [file.source(name) for name, source in zip(node.input, sources, strict=True) if source is None]
        pairs = [made for name in node.input if (made := file.dequantizer(name)) is not None]
        if not floats:
            yield node, "both branches are quantized. Quantize only the one that does not come from the convolution."
        elif not layer_of(file, floats[0], CONVOLUTION_OPERATORS) and not any(
            is_read_by_layers(file, made) for made in pairs
        ):
            yield node, "the branch that comes from the convolution is quantized. Quantize only the other one."


def _is_float_residual(file: OnnxFile, node: onnx.NodeProto) -> bool:
    """Whether a node adds a float to a quantized convolution, although the float or its origin is also quantized."""
    for branch, identity in (node.input, node.input[::-1]):
        layer = layer_of(file, file.source(branch), CONVOLUTION_OPERATORS)
        if layer is not None and all(file.dequantizer(name) is not None for name in layer.input[:2]):
            other = layer_of(file, file.source(identity), CONVOLUTION_OPERATORS)
            return other is None and identity in file.compute_once(_values_from_quantized)
    return False


def _values_from_quantized(file: OnnxFile) -> set[str]:
    """Return the quantized values, and values moved from them."""
    found = {file.origin(node.input[0], IDENTITY_OPERATORS) for node in file.nodes_of_type(QUANTIZE)}
    for node in file.nodes:
        if file.is_moving(node) and node.input[0] in found:
            found.update(node.output)
    return found


def _quantizer_source(file: OnnxFile, name: str) -> onnx.NodeProto | None:
    """Return the producer of a value before its quantization, or the quantizer itself for a graph input."""
    made = file.dequantizer(name)
    quantizer = file.producers.get(made.input[0]) if made is not None else None
    if quantizer is None or quantizer.op_type != QUANTIZE:
        return None
    return file.source(quantizer.input[0]) or quantizer


def is_read_by_layers(file: OnnxFile, made: onnx.NodeProto) -> bool:
    """Whether a layer reads the result of a dequantizer, or of another one with the same input."""
    around: OnnxFile | None = file
    while around is not None:
        if made.input[0] in around.compute_once(_layer_inputs):
            return True
        around = around.enclosing
    return False


def _layer_inputs(file: OnnxFile) -> set[str]:
    """Return the quantized values that layers of a graph and of its branches read."""
    found = set[str]().union(*(branch.compute_once(_layer_inputs) for _, _, branch in file.branches))
    for node in file.nodes_of_type(*LAYER_OPERATORS):
        made = [file.dequantizer(name) for name in factors_of(node)]
        found.update(one.input[0] for one in made if one is not None)
    return found


@rule("one-quantizer")
def _(file: OnnxFile) -> Violations:
    around = file.enclosing.compute_once(_find_first_quantizers) if file.enclosing is not None else {}
    first = dict[str, onnx.NodeProto]()
    for node in file.nodes_of_type(QUANTIZE):
        name = file.origin(node.input[0], IDENTITY_OPERATORS)
        if file.is_weight(node):
            continue  # each reader may have it quantized along its own channels
        if (other := around.get(name) or first.get(name)) is not None:
            yield node, f"quantizes {name!r}, as {other.name!r} does. Use one node for all readers."
        first.setdefault(name, node)
        made = file.source(node.input[0], IDENTITY_OPERATORS)
        if made is not None and made.op_type == DEQUANTIZE and _is_inverse(file, node, made):
            yield node, f"quantizes the result of the dequantization {made.name!r}. Read its input instead."


def _is_inverse(file: OnnxFile, node: onnx.NodeProto, made: onnx.NodeProto) -> bool:
    """Whether a quantizer restores the quantized value that a dequantizer reads."""
    return file.integer_type(node) == file.integer_type(made) and not _scale_difference(file, node, made)


def _find_first_quantizers(file: OnnxFile) -> MutableMapping[str, onnx.NodeProto]:
    """Return the quantized values of a graph and its enclosing graphs, each with its first quantizer."""
    found = file.extend_enclosing({}, _find_first_quantizers)
    for node in file.nodes_of_type(QUANTIZE):
        found.setdefault(file.origin(node.input[0], IDENTITY_OPERATORS), node)
    return found


@rule("pair")
def _(file: OnnxFile) -> Violations:
    for node in file.nodes_of_type(QUANTIZE):
        for inverse in file.dequantizers_of(node.output[0]):
            if differing := _scale_difference(file, node, inverse):
                other = f"its {DEQUANTIZE} or {QUANTIZE}, {inverse.name!r}"
                yield node, f"has {differing} than {other}. Use the same for both."
        for reader in file.readers.get(node.output[0], []):
            if reader.op_type != DEQUANTIZE and not file.is_moving(reader):
                yield reader, f"reads the quantized output of {node.name!r} directly. Insert a DequantizeLinear."
    for value in file.graph.output:
        source = file.source(value.name)
        if source is not None and source.op_type == QUANTIZE:
            yield source, "its quantized output is an output of the model. Return the output of a DequantizeLinear."
    for node in file.nodes_of_type(DEQUANTIZE):
        made = file.source(node.input[0])
        is_quantizer = made is not None and made.op_type in (QUANTIZE, *DYNAMIC_QUANTIZERS)
        if made is not None and not is_quantizer and node.input[0] not in file.constants:
            supported = f"those of a {QUANTIZE}, a constant or an input are supported"
            yield node, f"reads integers from {made.op_type}, but only {supported}."


def _scale_difference(file: OnnxFile, node: onnx.NodeProto, inverse: onnx.NodeProto) -> str:
    """Return the difference between a quantizer's and a dequantizer's scales as text; empty if they agree."""
    own_factor, inverse_factor = (file.constant(one.input[1]) for one in (node, inverse))
    if own_factor is None or inverse_factor is None or not (own_factor.size and inverse_factor.size):
        return ""  # another rule reports it
    one, other = (scales.astype(np.float64).flatten() for scales in (own_factor, inverse_factor))
    # They may differ by rounding to bfloat16.
    if one.size != other.size or not np.allclose(one, other, rtol=2**-8, atol=0, equal_nan=True):
        return "other scales"
    if file.block(node) != file.block(inverse):
        return "other blocks"
    rank = file.rank(node.input[0]) or 0
    return "scales along another axis" if one.size > 1 and file.axis(node, rank) != file.axis(inverse, rank) else ""


@rule("scalar")
def _(file: OnnxFile) -> Violations:
    for node in file.nodes_of_type(QUANTIZE, DEQUANTIZE):
        if file.rank(node.input[0]) == 0:
            yield node, f"{'quantizes' if node.op_type == QUANTIZE else 'dequantizes'} a scalar. Keep it float."
