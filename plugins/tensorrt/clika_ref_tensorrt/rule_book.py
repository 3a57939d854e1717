"""How a rule of TensorRT's is declared, and the words that all of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import onnx

from clika_ref_tensorrt.onnx_file import OnnxFile

Found = Iterator[tuple[onnx.NodeProto | None, str]]
"""What breaks a rule: the node, None where it is the file, and what is wrong."""

Check = Callable[[OnnxFile], Found]

RULES: dict[str, Check] = {}
"""Every rule of a graph by its name."""

RULES_OF_FILES: dict[str, Check] = {}
"""Every rule of a file as a whole, which takes nothing for granted."""

PRODUCTS = ("MatMul", "Gemm")

CONVOLUTIONS = ("Conv", "ConvTranspose")

WEIGHTED = frozenset({*CONVOLUTIONS, *PRODUCTS, "Einsum"})
"""Operators that multiply with weights."""

LAYERS = WEIGHTED | {"Attention"}
"""Operators that run in integers where all that they multiply is."""

FUSED_BEHIND = frozenset({"BatchNormalization", "Relu", "Clip"})
"""What is computed along with a layer before it."""

SCALING = ("Add", "Mul", "Sub", "Div")
"""What is computed along with a layer before it where one operand is constant, as a bias and a norm are."""

POINTWISE = frozenset(
    {
        *SCALING, "Abs", "Cast", "Celu", "Clip", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu",
        "Log", "Max", "Min", "Mish", "Neg", "PRelu", "Pow", "Reciprocal", "Relu", "Selu", "Sigmoid", "Softplus",
        "Softsign", "Sqrt", "Swish", "Tanh", "ThresholdedRelu",
    }
)  # fmt: skip
"""Of what activations consist, element by element."""

TYPES = onnx.TensorProto

FEW_BITS = (TYPES.INT4, TYPES.FLOAT4E2M1)
"""Types of weights whose layers compute in float."""

COMPUTED = frozenset({TYPES.INT8, TYPES.FLOAT8E4M3FN, *FEW_BITS})
"""Types of what stands for floats."""


def multiplied(node: onnx.NodeProto) -> Sequence[str]:
    """Return what a layer multiplies: of a weighted one its input and weight, of attention query, key and value."""
    match node.op_type:
        case "Einsum":
            return node.input
        case "Attention":
            return node.input[:3]
        case _:
            return node.input[:2]


def type_name(kind: int) -> str:
    """Return how ONNX calls a type; its number, where this version of ONNX knows no such type."""
    return TYPES.DataType.Name(kind) if kind in TYPES.DataType.values() else f"type {kind}"


def rule(name: str, *, of_file: bool = False) -> Callable[[Check], Check]:
    """Declare a rule: of each graph, or of the file as a whole."""

    def declare(check: Check) -> Check:
        (RULES_OF_FILES if of_file else RULES)[name] = check
        return check

    return declare
