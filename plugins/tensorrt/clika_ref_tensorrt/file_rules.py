"""Rules of TensorRT about a file as a whole, and about operators in it."""

from __future__ import annotations

import numpy as np
import onnx

from clika_ref_tensorrt.onnx_file import OnnxFile
from clika_ref_tensorrt.rule_book import Found, rule

OPSETS = range(9, 26)
MOST_TOP = 3840

NOT_IMPORTED = frozenset(
    {"QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear", "QGemm", "QLinearAdd"}
)


@rule("opset", of_file=True)
def _(file: OnnxFile) -> Found:
    if file.opset not in OPSETS:
        yield None, f"opset {file.opset} is outside {OPSETS.start} to {OPSETS.stop - 1}; export with one of these"


@rule("static-rank", of_file=True)
def _(file: OnnxFile) -> Found:
    for value in file.graph.input:
        if not value.type.tensor_type.HasField("shape"):
            yield None, f"the input {value.name!r} has no rank; sides may be dynamic, ranks may not"


@rule("known-operators", of_file=True)
def _(file: OnnxFile) -> Found:
    for node in file.everywhere:
        if node.op_type in NOT_IMPORTED:
            yield node, f"{node.op_type} is not imported; write float operators between QuantizeLinear and its inverse"
        elif node.domain not in ("", "ai.onnx"):
            yield node, f"{node.domain}.{node.op_type} is no operator of ONNX; it needs a plugin of TensorRT's"


@rule("top-k")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind("TopK"):
        stated = file.attribute(node, "k", None)  # as before opset 10
        count = file.constant(node.input[1]) if stated is None else np.asarray(stated)
        if count is not None and int(count.flat[0]) > MOST_TOP:
            yield node, f"K is {int(count.flat[0])}; at most {MOST_TOP} are taken"


@rule("branches")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind("If"):
        then, otherwise = (_ranks(file, file.attribute(node, f"{name}_branch", None)) for name in ("then", "else"))
        if any(a != b for a, b in zip(then, otherwise, strict=False) if a is not None and b is not None):
            yield node, f"its branches return tensors of the ranks {then} and {otherwise}; they must be alike"


def _ranks(file: OnnxFile, graph: onnx.GraphProto) -> list[int | None]:
    """Return the ranks of what a branch returns, as far as they can be inferred from what it reads."""
    branch = OnnxFile(file.model, graph, file)
    return [branch.rank(value.name) for value in graph.output]
