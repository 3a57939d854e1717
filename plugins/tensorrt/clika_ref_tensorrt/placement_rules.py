"""Rules of TensorRT about where pairs of QuantizeLinear and DequantizeLinear stand."""

from __future__ import annotations

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
        for reader in file.behind_pair(node):
            is_bias = reader.op_type == "Add" and any(map(file.is_constant, reader.input))
            if reader.op_type in FUSED_BEHIND or is_bias:
                yield node, f"lies between {made.op_type} and {reader.op_type}, which do not fuse then; put it behind"


@rule("residual")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind("Add"):
        sources = [_behind_quantizer(file, name) for name in node.input]
        if not any(_is_of_convolution(file, source) for source in sources):
            continue
        floats = [file.makers.get(name) for name, source in zip(node.input, sources, strict=True) if source is None]
        if not floats:
            yield node, "both branches are quantized; quantize only the one that does not come from the convolution"
        elif not _is_of_convolution(file, floats[0]):
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
        made = [file.dequantizer(name) for name in node.input]
        if sum(m is not None for m in made) == 1:
            yield (
                node,
                "one of its factors is quantized, and the other is not: it runs in float; quantize both, or neither",
            )


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
    given = [v for v in file.graph.input if v.type.tensor_type.HasField("shape")]
    scalars = {v.name for v in given if not v.type.tensor_type.shape.dim}
    for node in file.of_kind(QUANTIZE):
        elements = file.constant(node.input[0])
        if node.input[0] in scalars or (elements is not None and elements.ndim == 0):
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
