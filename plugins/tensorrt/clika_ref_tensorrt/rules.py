"""What TensorRT asks of an ONNX file with integers in it, rule by rule; each names the node and what to do.

Of TensorRT 11, whose networks are strongly typed, with the operators that its parser imports as of 10.15.

Sources: NVIDIA's guides to explicit quantization and quantization schemes (TensorRT 11), its ONNX operator support and
the headers of its builder; the placement that ModelOpt and the tensorflow-quantization toolkit emit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import onnx

from clika_ref.violations import Violation
from clika_ref_tensorrt import file_rules, number_rules, placement_rules, scale_rules, unweighted_rules, value_rules
from clika_ref_tensorrt.onnx_file import OnnxFile
from clika_ref_tensorrt.outline import inlined
from clika_ref_tensorrt.own_operators import ONNX_DOMAINS, told_apart
from clika_ref_tensorrt.rule_book import RULES, RULES_OF_FILES, Check

DECLARING = (file_rules, number_rules, placement_rules, scale_rules, unweighted_rules, value_rules)
"""The modules whose import declares the rules."""

OF_NODES = ("known-operators", "data-type", "top-k")
"""The rules that a node breaks, or keeps, whatever stands around it."""


def violations(
    model: onnx.ModelProto, *, folder: Path | None = None, has_weights_alone: bool = False
) -> list[Violation]:
    """Return every place where a file breaks a rule, rule by rule.

    Args:
        model: what is in the file; its weights need not be read.
        folder: where what it refers to lies.
        has_weights_alone: whether weights of 8 bits may be multiplied with floats, as TensorRT-LLM does.

    Raises:
        TargetError: scales, zero points or sizes lie in another file, which cannot be read.
    """
    file = OnnxFile(told_apart(inlined(model)), folder=folder, has_weights_alone=has_weights_alone)
    found = [*_broken(RULES_OF_FILES, [file])]
    if any(one.rule == file_rules.FORM for one in found):
        return found  # as the other rules take the form of nodes for granted
    return [*found, *_broken(RULES, [file, *file.within])]


def fault_of_nodes(model: onnx.ModelProto) -> str | None:
    """Say why TensorRT builds no engine of ONNX nodes, whatever is going to stand around them; None where it may.

    Of operators that are not ONNX's, there may be a plugin where the engine is built.
    """
    file = OnnxFile(told_apart(inlined(model)))
    checks = [check for name, check in (RULES_OF_FILES | RULES).items() if name in OF_NODES]
    found = (broken for check in checks for broken in check(file))
    return next((message for node, message in found if node is not None and node.domain in ONNX_DOMAINS), None)


def _broken(rules: Mapping[str, Check], graphs: Sequence[OnnxFile]) -> Iterator[Violation]:
    for name, check in rules.items():
        for graph in graphs:
            for node, message in check(graph):
                yield Violation(name, _name(node), message)


def _name(node: onnx.NodeProto | None) -> str:
    """Return what a node is called, or what it makes."""
    return "" if node is None else node.name or next(iter(node.output), node.op_type)
