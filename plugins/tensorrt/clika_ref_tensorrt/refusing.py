"""Calls that TensorRT cannot run, from its rules on the ONNX nodes of their lowering."""

from __future__ import annotations

import contextlib

import onnx_ir as ir

from clika_ref.core.errors import ClikaError
from clika_ref.core.ir import Node
from clika_ref.onnx_emission.calls import once_per_call
from clika_ref.onnx_emission.emission import emit_alone
from clika_ref_tensorrt.rules import fault_of_nodes


@once_per_call
def unbuildable(node: Node) -> str | None:
    """Return why TensorRT cannot build an engine of a call, or None."""
    model = None
    with contextlib.suppress(ClikaError):  # the error of a failing lowering is more specific
        model = emit_alone(node)
    return None if model is None else fault_of_nodes(ir.to_proto(model))
