"""Rules of TensorRT about where pairs of QuantizeLinear and DequantizeLinear stand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx

from clika_ref_tensorrt.onnx_file import DEQUANTIZE, MOVING, QUANTIZE, OnnxFile
from clika_ref_tensorrt.rule_book import CONVOLUTIONS, FUSED_BEHIND, TYPES, WEIGHTED, Found, rule


@rule("all-inputs")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(*WEIGHTED):
        found = [file.moved_dequantizer(name) for name in node.input[:2]]
        kinds = [file.integer_type(made) for made in found if made is not None]
        is_of_weights = found[1] is not None and file.integer_type(found[1]) == TYPES.INT4
        if len(kinds) == 2 and is_of_weights:
            yield node, "its weight is int4, and its input is quantized; int4 weights are multiplied with floats"
        if len(kinds) == 1 and not is_of_weights:
            lacking = "weight" if found[1] is None else "input"
            yield (
                node,
                f"its {lacking} is not quantized, though the other is: it runs in float; quantize both, or neither",
            )


@rule("before-fusion")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(QUANTIZE):
        made = file.makers.get(node.input[0])
        if made is None or made.op_type not in (*WEIGHTED, "BatchNormalization"):
            continue
        for reader in _unmoved(file, file.behind_pair(node)):
            is_bias = reader.op_type == "Add" and any(map(file.is_constant, reader.input))
            if reader.op_type in FUSED_BEHIND or is_bias:
                yield node, f"lies between {made.op_type} and {reader.op_type}, which do not fuse then; put it behind"


def _unmoved(file: OnnxFile, readers: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield readers, and those of what they only move."""
    for reader in readers:
        yield reader
        if reader.op_type in MOVING:
            yield from _unmoved(file, file.readers.get(reader.output[0], []))


@rule("residual")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind("Add"):
        sources = [_behind_quantizer(file, name) for name in node.input]
        if not any(_is_of_convolution(file, source) for source in sources):
            continue
        floats = [file.makers.get(name) for name, source in zip(node.input, sources, strict=True) if source is None]
        pairs = [made for name in node.input if (made := file.dequantizer(name)) is not None]
        if not floats:
            yield node, "both branches are quantized; quantize only the one that does not come from the convolution"
        elif not _is_of_convolution(file, floats[0]) and not any(_serves_layers(file, made) for made in pairs):
            yield node, "the branch that comes from the convolution is quantized; quantize only the other one"


def _is_of_convolution(file: OnnxFile, node: onnx.NodeProto | None) -> bool:
    while node is not None and node.op_type == "BatchNormalization":
        node = file.makers.get(node.input[0])
    return node is not None and node.op_type in CONVOLUTIONS


def _behind_quantizer(file: OnnxFile, name: str) -> onnx.NodeProto | None:
    """Return what makes a value that is then quantized; the quantizer itself where that is an input of the graph."""
    made = file.dequantizer(name)
    quantizer = file.makers.get(made.input[0]) if made is not None else None
    if quantizer is None or quantizer.op_type != QUANTIZE:
        return None
    return file.makers.get(quantizer.input[0], quantizer)


@rule("concat-scales")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind("Concat"):
        made = [file.dequantizer(name) for name in node.input]
        pairs = [m for m in made if m is not None]
        scales = {float(s.flat[0]) for m in pairs if (s := file.constant(m.input[1])) is not None and s.size}
        if len(scales) > 1:
            yield (
                node,
                f"joins tensors of the scales {', '.join(f'{s:.3g}' for s in sorted(scales))}; give all of them one",
            )
        elif pairs and len(pairs) < len(made):
            yield node, f"{len(pairs)} of the {len(made)} tensors that it joins are quantized; quantize all, or none"


@rule("all-factors")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind("Mul"):
        made = [m for name in node.input if (m := file.dequantizer(name)) is not None]
        if len(made) == 1 and not _serves_layers(file, made[0]):
            yield (
                node,
                "one of its factors is quantized, and the other is not: it runs in float; quantize both, or neither",
            )


def _serves_layers(file: OnnxFile, made: onnx.NodeProto) -> bool:
    """Whether a layer reads what a dequantizer, or another one of the same integers, makes."""
    pairs = [n for n in file.readers.get(made.input[0], []) if n.op_type == DEQUANTIZE]
    readers = [reader for n in pairs for reader in file.readers.get(n.output[0], [])]
    return any(reader.op_type in WEIGHTED for reader in _unmoved(file, readers))


@rule("all-operands")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind("Add", "Resize"):
        data = node.input[:1] if node.op_type == "Resize" else node.input
        made = [m for name in data if (m := file.dequantizer(name)) is not None]
        floats = [name for name in data if file.dequantizer(name) is None and not file.is_constant(name)]
        if not made or any(_serves_layers(file, m) for m in made) or any(map(file.is_weight, made)):
            continue
        if any(_is_of_convolution(file, file.makers.get(name)) for name in floats):
            continue  # which adds what is quantized itself
        if floats:
            yield node, "one of its operands is quantized, and another is not: it runs in float; quantize both, or none"
        elif not any(r.op_type == QUANTIZE for r in _unmoved(file, _behind_activation(file, node))):
            yield node, "its operands are quantized, and its result is not: it runs in float; quantize all, or none"


def _behind_activation(file: OnnxFile, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """Yield who reads the result of a node, or of an activation that is computed along with it."""
    for reader in file.readers.get(node.output[0], []):
        yield reader
        if reader.op_type in FUSED_BEHIND:
            yield from _behind_activation(file, reader)


@rule("pooling")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind("AveragePool", "GlobalAveragePool"):
        readers = file.readers.get(node.output[0], [])
        if file.dequantizer(node.input[0]) is not None and not any(r.op_type in (QUANTIZE, *MOVING) for r in readers):
            yield node, "its input is quantized, and its result is not: it runs in float; quantize both, or neither"


@rule("one-quantizer")
def _(file: OnnxFile) -> Found:
    for name, readers in file.readers.items():
        quantizers = [n for n in readers if n.op_type == QUANTIZE and n.input[0] == name]
        for other in quantizers[1:]:
            yield other, f"quantizes {name!r}, as {quantizers[0].name!r} does; let one serve all"


@rule("pair")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(QUANTIZE):
        for reader in file.readers.get(node.output[0], []):
            if reader.op_type == DEQUANTIZE:
                if file.attribute(reader, "axis", 1) != file.attribute(node, "axis", 1):
                    yield node, f"has scales along another axis than its inverse, {reader.name!r}"
            else:
                yield reader, f"reads the integers of {node.name!r} itself; a DequantizeLinear must come between"
        if node.output[0] in file.outputs:
            yield node, "its integers are an output; return floats, behind a DequantizeLinear"


@rule("scalar")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(QUANTIZE):
        if file.rank(node.input[0]) == 0:
            yield node, "quantizes a scalar; leave it float"


@rule("isolated")
def _(file: OnnxFile) -> Found:
    useful = WEIGHTED | {"Add", "Concat", "MaxPool", "AveragePool", "GlobalAveragePool", "Resize", "ReduceMean", "Mul"}
    moving = {"Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Gather", "Expand", QUANTIZE, "Split"}
    for node in file.of_kind(QUANTIZE):
        readers = file.behind_pair(node)
        if not readers and not file.is_weight(node):
            yield node, "nothing reads what it makes: the pair costs time and accuracy, and saves none"
        if readers and not any(reader.op_type in useful | moving for reader in readers):
            kinds = ", ".join(sorted({reader.op_type for reader in readers}))
            yield node, f"only {kinds} reads what it makes, which runs in float: the pair costs time and accuracy"
