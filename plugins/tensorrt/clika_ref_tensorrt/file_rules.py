"""Rules of TensorRT about a file as a whole, and about operators in it."""

from __future__ import annotations

import numpy as np
import onnx

from clika_ref_tensorrt.form import misshapen
from clika_ref_tensorrt.onnx_file import OnnxFile
from clika_ref_tensorrt.outline import ONNX_DOMAINS, complaint, malformed
from clika_ref_tensorrt.rule_book import Found, rule

OPSETS = range(9, 26)
MOST_TOP = 3840

NOT_IMPORTED = frozenset(
    {"QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear", "QGemm", "QLinearAdd"}
)

SHAPED = ("Reshape", "Expand", "ConstantOfShape")
"""Operators whose result has as many sides as their last operand has elements."""

FORM = "form"
"""The rule without which no node can be looked at."""


@rule("empty", of_file=True)
def _(file: OnnxFile) -> Found:
    if not file.graph.node:
        yield None, "it has no nodes: there is nothing to build; is it what was exported?"


@rule("opset", of_file=True)
def _(file: OnnxFile) -> Found:
    if file.opset not in OPSETS:
        yield None, f"opset {file.opset} is outside {OPSETS.start} to {OPSETS.stop - 1}; export with one of these"


@rule(FORM, of_file=True)
def _(file: OnnxFile) -> Found:
    yield from _misshapen(file)


def _misshapen(file: OnnxFile) -> Found:
    return misshapen((node for node in file.everywhere if node.domain in ONNX_DOMAINS), file.opset)


@rule("valid-onnx", of_file=True)
def _(file: OnnxFile) -> Found:
    if any(_misshapen(file)):
        return
    for reason in malformed(file.model):
        yield None, reason
    if reason := complaint(file.outline):
        yield None, f"ONNX refuses it: {reason}"


@rule("static-rank", of_file=True)
def _(file: OnnxFile) -> Found:
    for value in file.graph.input:
        if not value.type.tensor_type.HasField("shape"):
            yield None, f"the input {value.name!r} has no rank; sides may be dynamic, ranks may not"


@rule("known-operators", of_file=True)
def _(file: OnnxFile) -> Found:
    functions = {(function.domain, function.name) for function in file.model.functions}  # which ONNX refuses
    for node in file.everywhere:
        if node.op_type in NOT_IMPORTED:
            yield node, f"{node.op_type} is not imported; write float operators between QuantizeLinear and its inverse"
        elif node.domain not in ONNX_DOMAINS and (node.domain, node.op_type) not in functions:
            yield node, f"{node.domain}.{node.op_type} is no operator of ONNX; it needs a plugin of TensorRT's"


@rule("static-rank")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(*SHAPED):
        sizes = node.input[-1]
        if file.sides(sizes) == [None] and any(file.sides(name) == [None] for name in _given(file, sizes)):
            yield node, f"its result has as many sides as {sizes!r} has elements, whose number must be fixed"


def _given(file: OnnxFile, name: str) -> set[str]:
    """Return the inputs whose elements a value is computed from."""
    waiting, seen = [name], {name}
    while waiting:
        node = file.makers.get(waiting.pop())
        if node is not None and node.op_type not in ("Shape", "Size"):
            waiting += {*node.input} - seen
            seen.update(node.input)
    return {one for one in seen if one and one not in file.makers and one not in file.initializers}


@rule("top-k")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind("TopK"):
        is_operand = len(node.input) > 1  # from opset 10 on
        count = file.constant(node.input[1]) if is_operand else np.asarray(file.attribute(node, "k", 0))
        if count is not None and count.size and int(count.flat[0]) > MOST_TOP:
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
