"""Calls that TensorRT cannot run, from its rules on the ONNX nodes of their lowering."""

from __future__ import annotations

import contextlib

import onnx_ir as ir

from clika_ref.core.errors import ClikaError
from clika_ref.core.ir import Node
from clika_ref.onnx_export.artifact import cache_per_call
from clika_ref.onnx_export.emission import emit_node
from clika_ref_tensorrt.rules import find_node_fault


@cache_per_call
def unbuildable_reason(node: Node) -> str | None:
    """Return why TensorRT cannot build an engine of a call, or None."""
    model = None
    with contextlib.suppress(ClikaError):  # the error of a failing lowering is more specific
        model = emit_node(node)
    return None if model is None else find_node_fault(ir.to_proto(model))
