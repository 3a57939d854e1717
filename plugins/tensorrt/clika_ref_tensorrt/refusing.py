"""Which calls TensorRT cannot run, as the rules say of the ONNX nodes that they are written as."""

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
    """Say why TensorRT builds no engine of a call, or return None."""
    model = None
    with contextlib.suppress(ClikaError):  # a lowering that fails says more itself
        model = emit_alone(node)
    return None if model is None else fault_of_nodes(ir.to_proto(model))
