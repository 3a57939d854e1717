"""TensorRT rules on a whole file and on the operators in it."""

from __future__ import annotations

from collections.abc import MutableMapping

import numpy as np

from clika_ref_tensorrt.node_schemas import find_malformed_nodes
from clika_ref_tensorrt.onnx_file import OnnxFile
from clika_ref_tensorrt.own_operators import CHECKED_DOMAINS, DEQUANTIZE, ONNX_DOMAINS, QUANTIZE, is_known
from clika_ref_tensorrt.rule_book import Violations, rule
from clika_ref_tensorrt.stripped_model import find_malformed_constants, validation_error

SUPPORTED_OPSETS = range(9, 26)
MAX_TOP_K = 3840

UNSUPPORTED_OPERATORS = frozenset(
    {
        "AffineGrid", "Bernoulli", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "CenterCropPad",
        "Col2Im", "Compress", "ConcatFromSequence", "DFT", "Det", "ImageDecoder", "MaxRoiPool", "MaxUnpool",
        "MelWeightMatrix", "Multinomial", "NegativeLogLikelihoodLoss", "Optional", "OptionalGetElement",
        "OptionalHasElement", "RegexFullMatch", "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase",
        "SequenceInsert", "SequenceLength", "SequenceMap", "SoftmaxCrossEntropyLoss", "SplitToSequence",
        "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer", "Unique",
    }
)  # fmt: skip
"""Operators that the parser lacks. Source: docs/operators.md of onnx-tensorrt, of TensorRT 10.15."""

INTEGER_OPERATORS = frozenset(
    {"QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear", "QGemm", "QLinearAdd"}
)
"""Integer operators, which the parser also lacks."""

DATA_DEPENDENT_OPERATORS = ("NonZero", "NonMaxSuppression")
"""Operators with an output size that depends on the elements of their input."""

SHAPE_OPERAND_OPERATORS = ("Reshape", "Expand", "ConstantOfShape")
"""Operators with an output rank equal to the number of elements of their last operand."""

FORM_RULE = "form"
"""The rule that all rules on nodes depend on."""


@rule("empty", of_file=True)
def _(file: OnnxFile) -> Violations:
    if not file.graph.node:
        yield None, "it has no nodes, so there is nothing to build. Export the model again."


@rule("opset", of_file=True)
def _(file: OnnxFile) -> Violations:
    if not file.opset:
        yield None, "it declares no opset of ONNX's operators. Export the model again."
    elif file.opset not in SUPPORTED_OPSETS:
        supported = f"{SUPPORTED_OPSETS.start} to {SUPPORTED_OPSETS.stop - 1}"
        yield None, f"opset {file.opset} is outside {supported}. Export with one of these."


@rule(FORM_RULE, of_file=True)
def _check_form(file: OnnxFile) -> Violations:
    return find_malformed_nodes((node for node in file.all_nodes if node.domain in CHECKED_DOMAINS), file.opset)


@rule("valid-onnx", of_file=True)
def _(file: OnnxFile) -> Violations:
    if any(_check_form(file)):
        return
    for reason in find_malformed_constants(file.model):
        yield None, reason
    if reason := validation_error(file.stripped_model) or file.inference[1]:
        yield None, f"ONNX rejects it: {reason}"


@rule("static-rank", of_file=True)
def _(file: OnnxFile) -> Violations:
    for value in file.graph.input:
        if not value.type.tensor_type.HasField("shape"):
            yield None, f"the input {value.name!r} has no rank. Dims may be dynamic, but the rank must be fixed."


@rule("known-operators", of_file=True)
def _(file: OnnxFile) -> Violations:
    functions = {(function.domain, function.name) for function in file.model.functions}  # ONNX rejects these
    for node in file.all_nodes:
        if node.op_type in UNSUPPORTED_OPERATORS and node.domain in ONNX_DOMAINS:
            yield node, f"{node.op_type} is not supported. Use other operators, or a plugin of TensorRT."
        elif node.op_type in INTEGER_OPERATORS:
            yield node, f"{node.op_type} is not supported. Use float operators between {QUANTIZE} and {DEQUANTIZE}."
        elif node.domain not in ONNX_DOMAINS and (node.domain, node.op_type) not in functions and not is_known(node):
            yield node, f"{node.domain}.{node.op_type} is not an ONNX operator. It needs a plugin of TensorRT."


@rule("static-rank")
def _(file: OnnxFile) -> Violations:
    given = file.compute_once(_data_dependent_values)
    for node in file.nodes_of_type(*SHAPE_OPERAND_OPERATORS):
        if file.dims(node.input[-1]) == [None] and node.input[-1] in given:
            sizes = node.input[-1]
            yield node, f"its output has as many dims as {sizes!r} has elements, but the rank must be fixed"
    dynamic = file.compute_once(_dynamic_values)
    for node in file.nodes_of_type("Squeeze"):
        has_axes = any(node.input[1:]) or file.attribute(node, "axes", None) is not None
        if not has_axes and node.input[0] in dynamic and None in (file.dims(node.input[0]) or []):
            yield node, "has no axes, but dims that may be 1 at run time. State the axes to remove."


def _data_dependent_values(file: OnnxFile) -> MutableMapping[str, bool]:
    """Return the values computed from an unknown number of elements, given as input or found in data."""
    own = {v.name: True for v in file.graph.input if v.name not in file.initializers and file.dims(v.name) == [None]}
    found = file.extend_enclosing(own, _data_dependent_values)
    for node in file.nodes:
        is_counted = node.op_type in ("Shape", "Size")
        if node.op_type in DATA_DEPENDENT_OPERATORS or (not is_counted and any(name in found for name in node.input)):
            found.update(dict.fromkeys(node.output, True))
    return found


def _dynamic_values(file: OnnxFile) -> MutableMapping[str, bool]:
    """Return the values computed from inputs with dynamic dims, or from elements found in data."""
    own = {v.name: True for v in file.graph.input if file.shape(v.name) is None}
    found = file.extend_enclosing(own, _dynamic_values)
    for node in file.nodes:
        if node.op_type in DATA_DEPENDENT_OPERATORS or any(name in found for name in node.input):
            found.update(dict.fromkeys(node.output, True))
    return found


@rule("top-k")
def _(file: OnnxFile) -> Violations:
    for node in file.nodes_of_type("TopK"):
        is_operand = len(node.input) > 1  # since opset 10
        count = file.constant(node.input[1]) if is_operand else np.asarray(file.attribute(node, "k", 0))
        if count is not None and count.size and int(count.flat[0]) > MAX_TOP_K:
            count_value = int(count.flat[0])
            yield (
                node,
                f"TopK requests {count_value:,} elements, but TensorRT supports at most {MAX_TOP_K:,}. Request fewer.",
            )


@rule("branches")
def _(file: OnnxFile) -> Violations:
    ranks = dict[str, dict[str, list[int | None]]]()
    for node, name, branch in file.branches:
        if node.op_type == "If":
            ranks.setdefault(node.output[0], {})[name] = [branch.rank(value.name) for value in branch.graph.output]
    for node in file.nodes_of_type("If"):
        then, otherwise = (ranks.get(node.output[0], {}).get(f"{name}_branch", []) for name in ("then", "else"))
        if any(a != b for a, b in zip(then, otherwise, strict=False) if a is not None and b is not None):
            yield node, f"its branches return tensors of the ranks {then} and {otherwise}. Return equal ranks."
