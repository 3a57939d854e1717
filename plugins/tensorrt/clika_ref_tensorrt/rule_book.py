"""Declaration of TensorRT rules, and constants that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import onnx

from clika_ref_tensorrt.onnx_file import OnnxFile

Violations = Iterator[tuple[onnx.NodeProto | None, str]]
"""Violations of a rule: the node, or None for the file, and the message."""

Check = Callable[[OnnxFile], Violations]

GRAPH_RULES: dict[str, Check] = {}
"""Rules on each graph, by name."""

FILE_RULES: dict[str, Check] = {}
"""Rules on a whole file, by name. They make no assumptions."""

MATMUL_OPERATORS = ("MatMul", "Gemm")

CONVOLUTION_OPERATORS = ("Conv", "ConvTranspose")

WEIGHTED_OPERATORS = frozenset({*CONVOLUTION_OPERATORS, *MATMUL_OPERATORS, "Einsum"})
"""Operators that multiply with weights."""

LAYER_OPERATORS = WEIGHTED_OPERATORS | {"Attention"}
"""Operators that run in INT8 if all factors are quantized."""

FUSED_OPERATORS = frozenset({"BatchNormalization", "Relu", "Clip"})
"""Operators that are fused into a preceding layer."""

FUSED_WITH_CONSTANT = ("Add", "Mul", "Sub", "Div")
"""Operators that are fused into a preceding layer if one operand is constant, such as biases and norms."""

POINTWISE_OPERATORS = frozenset(
    {
        *FUSED_WITH_CONSTANT,
        "Abs", "Cast", "Celu", "Clip", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu",
        "Log", "Max", "Min", "Mish", "Neg", "PRelu", "Pow", "Reciprocal", "Relu", "Selu", "Sigmoid", "Softplus",
        "Softsign", "Sqrt", "Swish", "Tanh", "ThresholdedRelu",
    }
)  # fmt: skip
"""Elementwise operators that make up activations."""

TYPES = onnx.TensorProto

LOW_BIT_TYPES = (TYPES.INT4, TYPES.FLOAT4E2M1)
"""Weight types of layers that compute in float."""

QUANTIZED_TYPES = frozenset({TYPES.INT8, TYPES.FLOAT8E4M3FN, *LOW_BIT_TYPES})
"""Quantized types."""


def factors_of(node: onnx.NodeProto) -> Sequence[str]:
    """Return the factors of a layer: input and weight, or query, key and value of attention."""
    match node.op_type:
        case "Einsum":
            return node.input
        case "Attention":
            return node.input[:3]
        case _:
            return node.input[:2]


def type_name(kind: int) -> str:
    """Return the ONNX name of a type, or its number if this version of ONNX does not know it."""
    return TYPES.DataType.Name(kind) if kind in TYPES.DataType.values() else f"type {kind}"


def rule(name: str, *, of_file: bool = False) -> Callable[[Check], Check]:
    """Declare a rule on each graph, or on the file as a whole."""

    def declare(check: Check) -> Check:
        (FILE_RULES if of_file else GRAPH_RULES)[name] = check
        return check

    return declare
