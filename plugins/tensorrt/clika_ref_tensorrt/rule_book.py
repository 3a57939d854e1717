"""How a rule of TensorRT's is declared, and the words that all of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx

from clika_ref_tensorrt.onnx_file import OnnxFile

Found = Iterator[tuple[onnx.NodeProto | None, str]]
"""What breaks a rule: the node, None where it is the file, and what is wrong."""

Check = Callable[[OnnxFile], Found]

RULES: dict[str, Check] = {}
"""Every rule by its name."""

WEIGHTED = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
"""Operators that multiply with weights."""

CONVOLUTIONS = ("Conv", "ConvTranspose")

FUSED_BEHIND = frozenset({"BatchNormalization", "Relu", "Clip"})
"""What is computed along with a layer before it."""

TYPES = onnx.TensorProto


def rule(name: str) -> Callable[[Check], Check]:
    """Declare a rule."""

    def declare(check: Check) -> Check:
        RULES[name] = check
        return check

    return declare
