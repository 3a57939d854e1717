"""TensorRT's requirements on quantized ONNX files, as rules. Each violation names the node and the remedy.

For TensorRT 11, with strongly typed networks, and the operators that its parser imports as of 10.15.

Sources: NVIDIA's guides to explicit quantization and quantization schemes (TensorRT 11), its ONNX operator support and
the headers of its builder; the placement that ModelOpt and the tensorflow-quantization toolkit emit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import onnx

from clika_ref.core.artifacts import Violation
from clika_ref.core.ir import Node
from clika_ref.onnx_export.artifact import cache_per_call
from clika_ref_tensorrt import (
    file_rules,
    placement_rules,
    quantized_type_rules,
    scale_rules,
    unweighted_rules,
    value_type_rules,
)
from clika_ref_tensorrt.onnx_file import OnnxFile
from clika_ref_tensorrt.own_operators import ONNX_DOMAINS, separate_own_operators
from clika_ref_tensorrt.rule_book import FILE_RULES, GRAPH_RULES, Check
from clika_ref_tensorrt.stripped_model import inline_functions

RULE_MODULES = (file_rules, quantized_type_rules, placement_rules, scale_rules, unweighted_rules, value_type_rules)
"""Modules that declare rules on import."""

NODE_RULES = ("known-operators", "data-type", "top-k")
"""Rules on single nodes, independent of their context."""


def find_violations(
    model: onnx.ModelProto, *, folder: Path | None = None, has_weight_only: bool = False
) -> list[Violation]:
    """Return all violations in a file, ordered by rule.

    Args:
        model: the model; its weights need not be loaded.
        folder: folder of external data.
        has_weight_only: whether 8-bit weights may be multiplied with floats, as in TensorRT-LLM.

    Raises:
        TargetError: scales, zero points or sizes are in another file, which cannot be read.
    """
    file = OnnxFile(separate_own_operators(inline_functions(model)), folder=folder, has_weight_only=has_weight_only)
    found = [*_run_rules(FILE_RULES, [file])]
    if any(one.rule == file_rules.FORM_RULE for one in found):
        return found  # the other rules assume well-formed nodes
    return [*found, *_run_rules(GRAPH_RULES, [file, *file.inner_graphs])]


@cache_per_call
def find_node_fault(_: Node, model: onnx.ModelProto) -> str | None:
    """Return why TensorRT cannot build an engine of the lowering of a node in any context, or None if it may.

    Operators outside of ONNX are accepted, since the building machine may have a plugin for them.
    """
    file = OnnxFile(separate_own_operators(inline_functions(model)))
    checks = [check for name, check in (FILE_RULES | GRAPH_RULES).items() if name in NODE_RULES]
    found = (broken for check in checks for broken in check(file))
    return next((message for node, message in found if node is not None and node.domain in ONNX_DOMAINS), None)


def _run_rules(rules: Mapping[str, Check], graphs: Sequence[OnnxFile]) -> Iterator[Violation]:
    for name, check in rules.items():
        for graph in graphs:
            for node, message in check(graph):
                yield Violation(name, _node_name(node), message)


def _node_name(node: onnx.NodeProto | None) -> str:
    """Return the name of a node, or else of its output."""
    return "" if node is None else node.name or next(iter(node.output), node.op_type)
