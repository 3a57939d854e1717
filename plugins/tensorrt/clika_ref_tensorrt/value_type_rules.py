"""TensorRT rules on the types of inputs and outputs of nodes.

Source: docs/operators.md of onnx-tensorrt, of TensorRT 10.15: the types of its values, and of each operator.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

import onnx

from clika_ref_tensorrt.file_rules import INTEGER_OPERATORS, UNSUPPORTED_OPERATORS
from clika_ref_tensorrt.onnx_file import FLOAT_TYPES, IDENTITY_OPERATORS, OnnxFile
from clika_ref_tensorrt.own_operators import DEQUANTIZE, DYNAMIC_QUANTIZERS, ONNX_DOMAINS, QUANTIZE
from clika_ref_tensorrt.rule_book import QUANTIZED_TYPES, TYPES, Violations, rule, type_name

INTEGER_ADVICE, COMPLEX_ADVICE = "Use INT32 or INT64.", "Compute with real and imaginary parts."

UNSUPPORTED_TYPES: Mapping[int, str] = {
    TYPES.INT16: INTEGER_ADVICE, TYPES.UINT16: INTEGER_ADVICE,
    TYPES.UINT32: INTEGER_ADVICE, TYPES.UINT64: INTEGER_ADVICE,
    TYPES.STRING: "Represent it by numbers.",
    TYPES.COMPLEX64: COMPLEX_ADVICE, TYPES.COMPLEX128: COMPLEX_ADVICE,
}  # fmt: skip
"""Unsupported value types, with the remedy."""

CONVERSION_OPERATORS = IDENTITY_OPERATORS | {"Cast", "CastLike", "Shape", "Size"}
"""Operators that may read UINT8 graph inputs, or produce UINT8 graph outputs."""

CHECKED_ELSEWHERE = UNSUPPORTED_OPERATORS | INTEGER_OPERATORS | {QUANTIZE, DEQUANTIZE}
"""Operators that other rules report."""

ARITHMETIC_OPERATORS = frozenset(
    {
        "Abs", "Add", "And", "ArgMax", "ArgMin", "Clip", "CumSum", "Div", "Equal", "Gemm", "Greater", "GreaterOrEqual",
        "Less", "LessOrEqual", "MatMul", "Max", "Mean", "Min", "Mod", "Mul", "Neg", "Pow", "ReduceMax", "ReduceMean",
        "ReduceMin", "ReduceProd", "ReduceSum", "Relu", "Sign", "Sub", "Sum", "TopK",
    }
)  # fmt: skip
"""Operators on 32-bit and 64-bit integers, but no narrower ones."""


@rule("data-type")
def _(file: OnnxFile) -> Violations:
    for node in file.nodes:
        given = file.types.get(node.input[0], 0) if node.op_type == QUANTIZE else 0
        if given not in (0, *FLOAT_TYPES):
            yield node, f"quantizes {type_name(given)}, but only 32-bit and 16-bit floats are supported"
        elif _computes_in_float64(file, node):
            yield (
                node,
                f"{node.op_type} computes in float64, which TensorRT does not support. Export the model in float32.",
            )
        elif fault := _type_problem(file, node):
            yield node, f"{node.op_type} {fault}"


def _computes_in_float64(file: OnnxFile, node: onnx.NodeProto) -> bool:
    """Whether a node reads or returns float64 other than sizes."""
    sizes = file.compute_once(_size_values)
    names = [name for name in node.input if name not in file.constants and name not in sizes]
    names += [name for name in node.output if name in file.outputs and file.enclosing is None]
    return any(file.types.get(name, 0) == TYPES.DOUBLE for name in names)


def _size_values(file: OnnxFile) -> MutableMapping[str, bool]:
    """Return the values computed only from sizes and constants, where TensorRT accepts 64 bits as 32."""
    found = file.extend_enclosing({}, _size_values)
    for node in file.nodes:
        given = [name for name in node.input if name]
        is_derived = bool(given) and all(name in found or name in file.constants for name in given)
        if node.op_type in ("Shape", "Size") or is_derived:
            found.update(dict.fromkeys(node.output, True))
    return found


def _type_problem(file: OnnxFile, node: onnx.NodeProto) -> str:
    """Return the unsupported type that a node reads or produces, with the remedy; empty if all are supported."""
    if node.op_type in CHECKED_ELSEWHERE or node.domain not in ONNX_DOMAINS:
        return ""
    read, made = (
        {name: kind for name in names if name not in file.constants and (kind := file.types.get(name, 0))}
        for names in (node.input, node.output)
    )
    for verb, values in (("reads", read), ("makes", made)):
        for kind in values.values():
            if kind in UNSUPPORTED_TYPES:
                return f"{verb} {type_name(kind)}, which TensorRT does not support. {UNSUPPORTED_TYPES[kind]}"
    is_converting = node.op_type in CONVERSION_OPERATORS
    returned = file.compute_once(_find_returned_values)
    inner = [] if is_converting else [*read.values()]
    inner += [kind for name, kind in made.items() if not (is_converting and name in returned)]
    if TYPES.UINT8 in inner:
        return "computes with UINT8, which is supported only for inputs and outputs. Cast it to INT32 or to floats."
    narrow = [name for name, kind in read.items() if kind in QUANTIZED_TYPES and not _is_quantized(file, name)]
    if narrow and node.op_type in ARITHMETIC_OPERATORS:
        kind = type_name(read[narrow[0]])
        return f"computes with {kind} that does not come from a QuantizeLinear. Cast it to INT32 or to floats."
    return ""


def _is_quantized(file: OnnxFile, name: str) -> bool:
    """Whether a quantizer or dequantizer produced a value; its readers and type are covered by other rules."""
    source = file.source(name)
    return source is not None and source.op_type in (QUANTIZE, DEQUANTIZE, *DYNAMIC_QUANTIZERS)


def _find_returned_values(file: OnnxFile) -> set[str]:
    """Return the values that the file returns unchanged; empty for branches."""
    outputs = file.outputs if file.enclosing is None else ()
    return {name for output in outputs for name in file.trace_back(output, IDENTITY_OPERATORS)}
