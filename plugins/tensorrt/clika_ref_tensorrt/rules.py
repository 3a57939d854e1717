"""What TensorRT asks of an ONNX file with integers in it, rule by rule; each names the node and what to do.

Sources: NVIDIA's guides to explicit quantization and quantization schemes (TensorRT 11), its ONNX operator support and
the headers of its builder; the placement that ModelOpt and the tensorflow-quantization toolkit emit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx

from clika_ref.violations import Violation
from clika_ref_tensorrt.onnx_file import DEQUANTIZE, QUANTIZE, OnnxFile

Found = Iterator[tuple[onnx.NodeProto | None, str]]
"""What breaks a rule: the node, None where it is the file, and what is wrong."""

WEIGHTED = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
"""Operators that multiply with weights."""

FUSED_BEHIND = frozenset({"BatchNormalization", "Relu", "Clip"})
"""What is computed along with a convolution before it."""

OPSETS = range(9, 26)
BLOCKS = (64, 128)
MOST_TOP = 3840

TYPES = onnx.TensorProto
INTEGERS_OF_8 = TYPES.INT8
INT4 = (TYPES.INT4, TYPES.UINT4)
FLOATS_OF_8 = (TYPES.FLOAT8E4M3FN, TYPES.FLOAT8E4M3FNUZ, TYPES.FLOAT8E5M2, TYPES.FLOAT8E5M2FNUZ)
FROM_OPSET: dict[int, int] = {TYPES.INT4: 21, TYPES.UINT4: 21, TYPES.FLOAT8E4M3FN: 19}

NOT_IMPORTED = frozenset(
    {"QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear", "QGemm", "QLinearAdd"}
)


Check = Callable[[OnnxFile], Found]

RULES: dict[str, Check] = {}
"""Every rule by its name."""


def rule(name: str) -> Callable[[Check], Check]:
    """Declare a rule."""

    def declare(check: Check) -> Check:
        RULES[name] = check
        return check

    return declare


def violations(model: onnx.ModelProto) -> list[Violation]:
    """Return every place where a file breaks a rule, rule by rule."""
    file = OnnxFile(model)
    return [
        Violation(name, (node.name or node.output[0]) if node is not None else "", message)
        for name, check in RULES.items()
        for node, message in check(file)
    ]


# The file


@rule("opset")
def _(file: OnnxFile) -> Found:
    if file.opset not in OPSETS:
        yield None, f"opset {file.opset} is outside {OPSETS.start} to {OPSETS.stop - 1}; export with one of these"


@rule("static-rank")
def _(file: OnnxFile) -> Found:
    for value in file.graph.input:
        if not value.type.tensor_type.HasField("shape"):
            yield None, f"the input {value.name!r} has no rank; sides may be dynamic, ranks may not"


@rule("known-operators")
def _(file: OnnxFile) -> Found:
    for node in file.nodes:
        if node.op_type in NOT_IMPORTED:
            yield node, f"{node.op_type} is not imported; write float operators between QuantizeLinear and its inverse"
        elif node.domain not in ("", "ai.onnx"):
            yield node, f"{node.domain}.{node.op_type} is no operator of ONNX; it needs a plugin of TensorRT's"


@rule("top-k")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind("TopK"):
        count = file.constant(node.input[1])
        if count is not None and int(count.flat[0]) > MOST_TOP:
            yield node, f"K is {int(count.flat[0])}; at most {MOST_TOP} are taken"


# Types, scales and zero points


@rule("integer-type")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(QUANTIZE, DEQUANTIZE):
        kind = file.integer_type(node)
        if kind == TYPES.INT32:
            continue  # a bias, of which another rule speaks
        if kind not in (INTEGERS_OF_8, *INT4, *FLOATS_OF_8):
            name = TYPES.DataType.Name(kind) if kind else "unknown"
            yield node, f"its integers are {name}; TensorRT computes with INT8: give a zero point of int8 zeros"


@rule("type-needs-opset")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(QUANTIZE, DEQUANTIZE):
        kind, scale = file.integer_type(node), file.constant(node.input[1])
        needed = FROM_OPSET.get(kind, 13 if scale is not None and scale.size > 1 else 10)
        needed = 21 if file.attribute(node, "block_size", 0) else needed
        if file.opset < needed:
            yield node, f"needs opset {needed} by its type, axis or blocks, and the file has {file.opset}"


@rule("zero-point")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(QUANTIZE, DEQUANTIZE):
        if len(node.input) > 2 and node.input[2]:
            zero = file.constant(node.input[2])
            if zero is None:
                yield node, "its zero point is computed; it must be a constant of zeros"
            elif np.any(zero.astype(np.float32) != 0):
                yield node, f"its zero point is {zero.flat[np.flatnonzero(zero)[0]]}; quantize symmetrically, around 0"


@rule("scale")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(QUANTIZE, DEQUANTIZE):
        scale = file.constant(node.input[1])
        if scale is None:
            yield node, "its scale is computed; it must be a constant, which depends on no input and no shape"
        elif not np.all(np.isfinite(scale.astype(np.float64)) & (scale.astype(np.float64) > 0)):
            yield node, "a scale is not above 0, or not finite"


@rule("scale-type")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(QUANTIZE):
        given, scale = (file.types.get(name, 0) for name in node.input[:2])
        if given in (TYPES.FLOAT16, TYPES.BFLOAT16) and scale not in (0, given):
            yield node, f"its input is {TYPES.DataType.Name(given)}, and its scale {TYPES.DataType.Name(scale)}"


@rule("activation-per-tensor")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(QUANTIZE, DEQUANTIZE):
        scale = file.constant(node.input[1])
        if scale is not None and scale.size > 1 and not file.is_weight(node):
            yield node, f"{scale.size} scales of a value that is computed; give it one for the whole tensor"


@rule("blocks")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(DEQUANTIZE):
        if file.integer_type(node) not in INT4:
            continue
        block = int(file.attribute(node, "block_size", 0))
        if block not in BLOCKS:
            yield node, f"int4 weights in blocks of {block}; TensorRT takes {' or '.join(map(str, BLOCKS))}"
        readers = [n for n in file.readers.get(node.output[0], []) if n.op_type not in ("MatMul", "Gemm", "Transpose")]
        for reader in readers:
            yield reader, "reads an int4 weight, which only matrix products do; give it int8, or leave it float"


# Weights


@rule("weight-axis")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(*WEIGHTED):
        made = file.dequantizer(node.input[1]) if len(node.input) > 1 else None
        scale = file.constant(made.input[1]) if made is not None else None
        if made is None or scale is None or scale.size == 1 or file.attribute(made, "block_size", 0):
            continue
        rank = scale.ndim if scale.ndim > 1 else _rank(file, made.input[0])
        axis, wanted = int(file.attribute(made, "axis", 1)), _channel_axis(file, node, rank)
        if axis % max(rank, 1) != wanted:
            yield (
                made,
                f"the scales of a weight of {node.op_type} lie along axis {axis}; its output channels on {wanted}",
            )


def _rank(file: OnnxFile, name: str) -> int:
    elements = file.constant(name)
    made = file.makers.get(name)
    if elements is None and made is not None and made.op_type == QUANTIZE:
        elements = file.constant(made.input[0])
    return 2 if elements is None else elements.ndim


def _channel_axis(file: OnnxFile, node: onnx.NodeProto, rank: int) -> int:
    match node.op_type:
        case "Conv":
            return 0
        case "ConvTranspose":
            return 1
        case "Gemm":
            return 0 if file.attribute(node, "transB", 0) else 1
        case _:
            return rank - 1


@rule("transposed-groups")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind("ConvTranspose"):
        made = file.dequantizer(node.input[1])
        if made is not None and int(file.attribute(node, "group", 1)) > 1:
            scale = file.constant(made.input[1])
            if scale is not None and scale.size > 1:
                yield (
                    node,
                    "has groups and a weight with a scale for each channel; give it one scale, or leave it float",
                )


@rule("float-bias")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind("Conv", "ConvTranspose", "Gemm"):
        if len(node.input) > 2 and file.dequantizer(node.input[2]) is not None:
            yield node, "its bias is quantized; leave biases float"


# Placement


@rule("all-inputs")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(*WEIGHTED):
        found = [file.dequantizer(name) for name in node.input[:2]]
        kinds = [file.integer_type(made) for made in found if made is not None]
        if len(kinds) == 1 and not (found[1] is not None and kinds[0] in INT4):
            lacking = "weight" if found[1] is None else "input"
            yield (
                node,
                f"its {lacking} is not quantized, though the other is: it runs in float; quantize both, or neither",
            )


@rule("before-fusion")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(QUANTIZE):
        made = file.makers.get(node.input[0])
        if made is not None and made.op_type in ("Conv", "ConvTranspose"):
            for reader in file.behind_pair(node):
                if reader.op_type in FUSED_BEHIND:
                    yield (
                        node,
                        f"lies between {made.op_type} and {reader.op_type}, which then do not fuse; put it behind",
                    )


@rule("residual")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind("Add"):
        sources = [_behind_quantizer(file, name) for name in node.input]
        from_conv = [s is not None and s.op_type in ("Conv", "ConvTranspose") for s in sources]
        if all(s is not None for s in sources) and any(from_conv):
            yield node, "both branches are quantized; quantize only the one that does not come from the convolution"


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


@rule("one-quantizer")
def _(file: OnnxFile) -> Found:
    for name, readers in file.readers.items():
        quantizers = [n for n in readers if n.op_type == QUANTIZE and n.input[0] == name]
        if len({_key(file, n) for n in quantizers}) > 1:
            yield quantizers[1], f"quantizes {name!r}, as {quantizers[0].name!r} does with another scale; share one"


def _key(file: OnnxFile, node: onnx.NodeProto) -> bytes:
    scale = file.constant(node.input[1])
    return b"" if scale is None else scale.tobytes()


@rule("pair")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(QUANTIZE):
        for reader in file.readers.get(node.output[0], []):
            if reader.op_type != DEQUANTIZE:
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
        if readers and not any(reader.op_type in useful | moving for reader in readers):
            kinds = ", ".join(sorted({reader.op_type for reader in readers}))
            yield node, f"only {kinds} reads what it makes, which runs in float: the pair costs time and accuracy"
