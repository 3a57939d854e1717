"""The output of ``clika-ref inspect``: the graph of a module or of an ONNX file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

import clika_ref
from clika_ref.core.ir import Node, Value
from clika_ref.onnx_export.emission import SCOPE_KEY, SOURCE_KEY
from clika_ref.reporting.console import format_size
from clika_ref.reporting.tables import render_text_table
from clika_ref_cli.artifacts import read_onnx


@dataclass(frozen=True)
class GraphView:
    """A graph as text and as plain data."""

    text: str
    data: Mapping[str, Any]

    def __str__(self) -> str:
        return self.text

    def as_json(self) -> Mapping[str, Any]:
        """Return plain data: names, types and nodes, without weights."""
        return self.data


def describe_module(module: clika_ref.ClikaModule) -> GraphView:
    """Return the graph of a module."""
    graph = module.graph
    constants = [value.data for value in graph.constants.values()]
    weights = sum(data.nbytes for data in constants if data is not None)
    target = module.clika_state.target
    last = f"{len(graph):,} nodes, {format_size(weights)} of weights"
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
    return GraphView(f"{graph}\n{last}", data)


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


def describe_onnx(path: Path) -> GraphView:
    """Return the graph of an ONNX file from any exporter.

    Raises:
        ModelError: the file cannot be read as ONNX.
    """
    model = read_onnx(path)
    graph, initializers = model.graph, {tensor.name for tensor in model.graph.initializer}
    tensors = {x["name"]: x for x in onnx_values_as_json((*graph.value_info, *graph.input, *graph.output))}
    data = {
        "name": graph.name,
        "inputs": [tensors[value.name] for value in graph.input if value.name not in initializers],
        "outputs": [tensors[value.name] for value in graph.output],
        "symbols": sorted({dim for v in graph.input for dim in tensors[v.name]["shape"] if isinstance(dim, str)}),
        "guards": [entry.value for entry in model.metadata_props if entry.key == "clika.guards"],
        "nodes": [_onnx_node_as_json(node, tensors) for node in graph.node],
        "weights_bytes": sum(_count_bytes(tensor) for tensor in graph.initializer),
        "quantized_for": None,
    }
    return GraphView(_render_text(data, model), data)


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
            f"{len(rows):,} nodes, {format_size(data['weights_bytes'])} of weights",
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


def onnx_values_as_json(values: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the names, dtypes and shapes that an ONNX file declares; unknown dims are ``?``."""
    return [_onnx_value_as_json(value) for value in values]


def _onnx_value_as_json(value: Any) -> dict[str, Any]:
    tensor = value.type.tensor_type
    dtype = str(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)) if tensor.elem_type else ""
    shape = [d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in tensor.shape.dim]
    return _tensor_as_json(value.name, dtype, shape)


def _count_bytes(tensor: Any) -> int:
    """Return the size of a tensor in bytes, in the file or in external data."""
    length = next((int(entry.value) for entry in tensor.external_data if entry.key == "length"), None)
    return length if length is not None else len(tensor.raw_data) or tensor.ByteSize()
