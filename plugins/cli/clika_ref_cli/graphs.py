"""The output of ``clika-ref inspect``: the graph of a module or of an ONNX file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

import clika_ref
from clika_ref.compiled.lowering import target_for
from clika_ref.core.errors import format_count
from clika_ref.core.ir import Node, Value
from clika_ref.core.registry import load_registry
from clika_ref.export.dry_run import count_operators
from clika_ref.onnx_export.emission import SCOPE_KEY, SOURCE_KEY
from clika_ref.reporting.console import format_size
from clika_ref.reporting.tables import render_text_table
from clika_ref.settings.compile_options import BaseDeploymentSettings
from clika_ref_cli.artifacts import find_inputs, read_onnx

GRAPH_FACTS = ("name", "inputs", "outputs", "symbols", "guards", "weights_bytes")
"""Facts of a graph in the JSON of a dry run."""


def describe_module(module: clika_ref.ClikaModule) -> tuple[str, dict[str, Any]]:
    """Return the graph of a module."""
    graph = module.graph
    constants = [value.data for value in graph.constants.values()]
    weights = sum(data.nbytes for data in constants if data is not None)
    target = module.clika_state.target
    last = f"{format_count(len(graph), 'node')}, {format_size(weights)} of weights"
    if target is not None:
        last += f", quantized for {target}: see `clika-ref explain`"
    data = {
        "name": graph.name,
        "inputs": [_value_as_json(value) for value in graph.inputs],
        "outputs": [_value_as_json(value) for value in graph.outputs],
        "symbols": [str(symbol) for symbol in graph.symbols.values()],
        "guards": [str(guard) for guard in graph.guards],
        "nodes": [_node_as_json(node) for node in graph.nodes],
        "weights_bytes": weights,
        "quantized_for": target,
    }
    return f"{graph}\n{last}", data


def dry_run_as_json(module: clika_ref.ClikaModule, deployment: BaseDeploymentSettings) -> dict[str, Any]:
    """Return the result of a dry run as plain data: operators with their support by the target, and facts of the graph.

    Raises:
        TargetError: no plugin provides the target.
    """
    target, (_, graph) = target_for(deployment, load_registry()), describe_module(module)
    operators = [
        {"operator": name, "nodes": count, "unsupported_reason": reason}
        for name, count, reason in count_operators(module.graph, target)
    ]
    return {"target": target.name, "operators": operators, **{key: graph[key] for key in GRAPH_FACTS}}


def _node_as_json(node: Node) -> dict[str, Any]:
    return {
        "name": node.name,
        "operator": node.op_type,
        "inputs": [value.name if isinstance(value, Value) else str(value) for value in node.inputs],
        "outputs": [_value_as_json(value) for value in node.outputs],
        "attributes": {name: str(value) for name, value in node.attrs.items()},
        "scope": node.origin.scope,
        "line": node.origin.line,
    }


def _value_as_json(value: Value) -> dict[str, Any]:
    return _tensor_as_json(value.name, str(value.type.dtype).removeprefix("torch."), value.type.shape)


def _tensor_as_json(name: str, dtype: str, shape: Sequence[Any]) -> dict[str, Any]:
    """Return a tensor as plain data; symbolic dims are expressions over symbol names."""
    return {"name": name, "dtype": dtype, "shape": [dim if isinstance(dim, int) else str(dim) for dim in shape]}


def describe_onnx(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the graph of an ONNX file from any exporter.

    Raises:
        ModelError: the file cannot be read as ONNX.
    """
    model = read_onnx(path)
    graph = model.graph
    values = map(onnx_value_as_json, (*graph.value_info, *graph.input, *graph.output))
    tensors = {value["name"]: value for value in values}
    data = {
        "name": graph.name,
        "inputs": [tensors[value.name] for value in find_inputs(graph)],
        "outputs": [tensors[value.name] for value in graph.output],
        "symbols": sorted({dim for v in graph.input for dim in tensors[v.name]["shape"] if isinstance(dim, str)}),
        "guards": [entry.value for entry in model.metadata_props if entry.key == "clika.guards"],
        "nodes": [_onnx_node_as_json(node, tensors) for node in graph.node],
        "weights_bytes": sum(_count_bytes(tensor) for tensor in graph.initializer),
        "quantized_for": None,
    }
    return _render_text(data, model), data


def _render_text(data: Mapping[str, Any], model: Any) -> str:
    versions = ", ".join(f"{entry.domain or 'ai.onnx'} {entry.version}" for entry in model.opset_import)
    rows = [
        (n["name"], n["operator"], ", ".join(n["inputs"]), ", ".join(map(_format_tensor, n["outputs"])), n["scope"])
        for n in data["nodes"]
    ]
    return "\n".join(
        [
            f"graph {data['name']}({', '.join(map(_format_tensor, data['inputs']))}), opsets {versions}",
            render_text_table(("node", "operator", "inputs", "outputs", "module"), rows),
            f"return {', '.join(map(_format_tensor, data['outputs']))}",
            f"{format_count(len(rows), 'node')}, {format_size(data['weights_bytes'])} of weights",
        ]
    )


def _format_tensor(tensor: Mapping[str, Any]) -> str:
    if not tensor["dtype"]:
        return tensor["name"]
    return f"{tensor['name']}: {tensor['dtype']}[{', '.join(map(str, tensor['shape']))}]"


def _onnx_node_as_json(node: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {entry.key: entry.value for entry in node.metadata_props}
    return {
        "name": node.name,
        "operator": node.op_type,
        "inputs": list(node.input),
        "outputs": [tensors.get(name, _tensor_as_json(name, "", ())) for name in node.output],
        "attributes": {
            a.name: str(onnx.helper.printable_attribute(a)).partition("=")[2].strip() for a in node.attribute
        },
        "scope": metadata.get(SCOPE_KEY, ""),
        "line": metadata.get(SOURCE_KEY, ""),
    }


def onnx_value_as_json(value: Any) -> dict[str, Any]:
    """Return the name, dtype and shape of a value of an ONNX graph; the dtype is empty if unknown."""
    tensor = value.type.tensor_type
    dtype = str(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)) if tensor.elem_type else ""
    shape = [d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in tensor.shape.dim]
    return _tensor_as_json(value.name, dtype, shape)


def _count_bytes(tensor: Any) -> int:
    """Return the size of a tensor in bytes, in the file or in external data."""
    length = next((int(entry.value) for entry in tensor.external_data if entry.key == "length"), None)
    return length if length is not None else len(tensor.raw_data) or tensor.ByteSize()
