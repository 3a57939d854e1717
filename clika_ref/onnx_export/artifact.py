"""Shared by targets that read ONNX: find nodes without an ONNX form, cache reasons per call, and write artifacts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import ClikaError
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.onnx_export.emission import emit, emit_node
from clika_ref.onnx_export.writing import write_model

if TYPE_CHECKING:
    import onnx

MAX_CACHED_CALLS = 256
"""Maximum number of cached calls. The conformance suite asks about each candidate call, and then about the graph."""


def onnx_unsupported_reason(node: Node) -> str | None:
    """Return why a node cannot be written as ONNX, or None if it can."""
    if node.op.lowering is None:
        return f"{node.op.name} has no ONNX lowering. Declare one with @{node.op.name}.onnx"
    if any(v.type.dtype.is_complex for v in (*node.inputs, *node.outputs) if isinstance(v, Value)):
        return "it computes with complex numbers, which ONNX does not support. Compute with real and imaginary parts"
    return None


def cache_per_call(ask: Callable[[Node, onnx.ModelProto], str | None]) -> Callable[[Node], str | None]:
    """Decorate ``ask``, a function of a node and the ONNX model of its lowering that returns why to reject the node.

    The decorated function takes the node alone. Its results are cached for nodes with the same lowering, attributes,
    and types of operands and outputs. It returns None if the lowering fails, since the export then raises a more
    specific error.
    """
    reasons: dict[Any, str | None] = {}

    @functools.wraps(ask)
    def cached_reason(node: Node) -> str | None:
        operands = tuple(v.type if isinstance(v, Value) else repr(v) for v in node.inputs)
        bodies = tuple(map(str, node.bodies))
        call = (node.op.lowering, operands, repr(node.attrs), tuple(v.type for v in node.outputs), bodies)
        if call not in reasons:
            if len(reasons) == MAX_CACHED_CALLS:
                reasons.clear()
            try:
                model = emit_node(node)
            except ClikaError:
                reasons[call] = None
            else:
                reasons[call] = ask(node, ir.to_proto(model))
        return reasons[call]

    return cached_reason


def write_artifact(
    graph: Graph,
    path: Path,
    target: str,
    *,
    external_data: bool = False,
    rewrite: Callable[[ir.Model], None] | None = None,
) -> Artifact:
    """Write a graph as an ONNX file for a target.

    Args:
        graph: the graph; each node has an ONNX form.
        path: the path of the file.
        target: the name of the target.
        external_data: whether to write weights to a separate file even if one file could hold them.
        rewrite: changes the model to the forms that the target prefers.

    Raises:
        ModelError: the file cannot be written.
        PluginError: a lowering returned something other than results of its operator.
        TargetError: a node has no ONNX form, or the ONNX checker rejects the file.
    """
    model = emit(graph)
    if rewrite is not None:
        rewrite(model)
    size = write_model(model, path, external_data=external_data)
    inputs = tuple(v.name or "" for v in model.graph.inputs)
    outputs = tuple(v.name or "" for v in model.graph.outputs)
    guards = tuple(map(str, graph.guards))
    return Artifact(path, target, inputs, outputs, {"bytes": size, "nodes": len(model.graph), "guards": guards})
