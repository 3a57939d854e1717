"""Rules of TensorRT about where pairs of QuantizeLinear and DequantizeLinear stand around layers."""

from __future__ import annotations

import onnx

from clika_ref_tensorrt.onnx_file import DEQUANTIZE, MOVING, NOTHING, QUANTIZE, OnnxFile
from clika_ref_tensorrt.rule_book import CONVOLUTIONS, FUSED_BEHIND, TYPES, WEIGHTED, Found, rule

FEW_BITS = (TYPES.INT4, TYPES.FLOAT4E2M1)
"""Types of weights whose layers compute in float."""


@rule("all-inputs")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(*WEIGHTED):
        found = [file.dequantizer(name) for name in node.input[:2]]
        kinds = [file.integer_type(made) for made in found if made is not None]
        is_of_weights = found[1] is not None and file.integer_type(found[1]) in FEW_BITS
        if len(kinds) == 2 and is_of_weights and kinds[0] == TYPES.INT8:
            yield node, "its weight is int4, and its input is quantized; int4 weights are multiplied with floats"
        if len(kinds) == 1 and not is_of_weights and not (file.has_weights_alone and found[0] is None):
            lacking = "weight" if found[1] is None else "input"
            yield (
                node,
                f"its {lacking} is not quantized, though the other is: it runs in float; quantize both, or neither",
            )


@rule("before-fusion")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(QUANTIZE):
        made = file.source(node.input[0], NOTHING)
        if made is None or made.op_type not in (*WEIGHTED, "BatchNormalization"):
            continue
        for reader in file.behind_pairs(node.output[0]):
            is_bias = reader.op_type == "Add" and any(map(file.is_constant, reader.input))
            if reader.op_type in FUSED_BEHIND or is_bias:
                yield node, f"lies between {made.op_type} and {reader.op_type}, which do not fuse then; put it behind"


@rule("residual")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind("Add"):
        sources = [_behind_quantizer(file, name) for name in node.input]
        if not any(is_of_layer(file, source, CONVOLUTIONS) for source in sources):
            continue
        floats = [file.source(name) for name, source in zip(node.input, sources, strict=True) if source is None]
        pairs = [made for name in node.input if (made := file.dequantizer(name)) is not None]
        if not floats:
            yield node, "both branches are quantized; quantize only the one that does not come from the convolution"
        elif not is_of_layer(file, floats[0], CONVOLUTIONS) and not any(serves_layers(file, made) for made in pairs):
            yield node, "the branch that comes from the convolution is quantized; quantize only the other one"


def is_of_layer(file: OnnxFile, node: onnx.NodeProto | None, layers: tuple[str, ...]) -> bool:
    """Whether a node is a layer, or what is computed along with one before its activation: a norm, or its bias."""
    while node is not None and node.op_type in ("BatchNormalization", "Add"):
        computed = [name for name in node.input if not file.is_constant(name)]
        if node.op_type == "Add" and len(computed) != 1:
            return False
        node = file.source(computed[0])
    return node is not None and node.op_type in layers


def _behind_quantizer(file: OnnxFile, name: str) -> onnx.NodeProto | None:
    """Return what makes a value that is then quantized; the quantizer itself where that is an input of the graph."""
    made = file.dequantizer(name)
    quantizer = file.makers.get(made.input[0]) if made is not None else None
    if quantizer is None or quantizer.op_type != QUANTIZE:
        return None
    return file.source(quantizer.input[0]) or quantizer


def serves_layers(file: OnnxFile, made: onnx.NodeProto) -> bool:
    """Whether a layer reads what a dequantizer, or another one of the same integers, makes."""
    return any(reader.op_type in WEIGHTED for reader in file.behind_pairs(made.input[0]))


@rule("one-quantizer")
def _(file: OnnxFile) -> Found:
    first = _quantized(file.around) if file.around is not None else {}
    for node in file.of_kind(QUANTIZE):
        name = _renamed(file, node.input[0])
        if name in first:
            yield node, f"quantizes {name!r}, as {first[name].name!r} does; let one serve all"
        first.setdefault(name, node)


def _quantized(file: OnnxFile) -> dict[str, onnx.NodeProto]:
    """Return what is quantized in a graph and around it, and by whom first."""
    found = _quantized(file.around) if file.around is not None else {}
    for node in file.of_kind(QUANTIZE):
        found.setdefault(_renamed(file, node.input[0]), node)
    return found


def _renamed(file: OnnxFile, name: str) -> str:
    """Return what a value was called before it was handed on as it is."""
    made = file.makers.get(name)
    return _renamed(file, made.input[0]) if made is not None and made.op_type in NOTHING else name


@rule("pair")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(QUANTIZE):
        for reader in file.readers.get(node.output[0], []):
            if reader.op_type == DEQUANTIZE:
                if file.attribute(reader, "axis", 1) != file.attribute(node, "axis", 1):
                    yield node, f"has scales along another axis than its inverse, {reader.name!r}"
            elif reader.op_type not in MOVING:
                yield reader, f"reads the integers of {node.name!r} itself; a DequantizeLinear must come between"
        if node.output[0] in file.outputs:
            yield node, "its integers are an output; return floats, behind a DequantizeLinear"


@rule("scalar")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(QUANTIZE):
        if file.rank(node.input[0]) == 0:
            yield node, "quantizes a scalar; leave it float"
