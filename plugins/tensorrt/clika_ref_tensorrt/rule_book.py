"""Declaration of TensorRT rules, and constants that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import onnx

from clika_ref_tensorrt.onnx_file import OnnxFile

Found = Iterator[tuple[onnx.NodeProto | None, str]]
"""Violations of a rule: the node, or None for the file, and the message."""

Check = Callable[[OnnxFile], Found]

RULES: dict[str, Check] = {}
"""Rules on each graph, by name."""

RULES_OF_FILES: dict[str, Check] = {}
"""Rules on a whole file, by name. They make no assumptions."""

PRODUCTS = ("MatMul", "Gemm")

CONVOLUTIONS = ("Conv", "ConvTranspose")

WEIGHTED = frozenset({*CONVOLUTIONS, *PRODUCTS, "Einsum"})
"""Operators that multiply with weights."""

LAYERS = WEIGHTED | {"Attention"}
"""Operators that run in INT8 if all factors are quantized."""

FUSED_BEHIND = frozenset({"BatchNormalization", "Relu", "Clip"})
"""Operators that are fused into a preceding layer."""

SCALING = ("Add", "Mul", "Sub", "Div")
"""Operators that are fused into a preceding layer if one operand is constant, such as biases and norms."""

POINTWISE = frozenset(
    {
        *SCALING, "Abs", "Cast", "Celu", "Clip", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu",
        "Log", "Max", "Min", "Mish", "Neg", "PRelu", "Pow", "Reciprocal", "Relu", "Selu", "Sigmoid", "Softplus",
        "Softsign", "Sqrt", "Swish", "Tanh", "ThresholdedRelu",
    }
)  # fmt: skip
"""Elementwise operators that make up activations."""

TYPES = onnx.TensorProto

FEW_BITS = (TYPES.INT4, TYPES.FLOAT4E2M1)
"""Weight types of layers that compute in float."""

COMPUTED = frozenset({TYPES.INT8, TYPES.FLOAT8E4M3FN, *FEW_BITS})
"""Quantized types."""


def multiplied(node: onnx.NodeProto) -> Sequence[str]:
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
        (RULES_OF_FILES if of_file else RULES)[name] = check
        return check

    return declare
