"""Supported dtypes of ONNX operators in ONNX Runtime; ``kernels.toml`` lists the missing ones."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from clika_ref.core.ir import Node
from clika_ref.onnx_export.artifact import cache_per_call
from clika_ref.onnx_export.builder import OPSET
from clika_ref.onnx_export.dtypes import TO_TORCH

KERNEL_TABLE_PATH = Path(__file__).with_name("kernels.toml")

UNSUPPORTED_DTYPES = frozenset({"bfloat16", "complex64", "complex128"})
"""Dtypes that the target generally rejects; messages do not suggest them."""

CONVERT_ADVICE = "Convert its inputs, or the model, to one of them"

FLOAT16_ADVICE = (
    "Export without export_fp16, or export a float module; if the model itself quantizes, convert its inputs"
)
"""Advice for quantization of float16, which the runtime lacks. Usually ``export_fp16`` requested it."""


@cache_per_call
def find_missing_kernel(node: Node, model: onnx.ModelProto) -> str | None:
    """Return a description of an ONNX operator in a node's lowering with an unsupported dtype, or None."""
    proto = onnx.shape_inference.infer_shapes(model)
    dtypes = _dtypes(proto.graph)
    for onnx_node in proto.graph.node:
        if onnx_node.domain:
            continue
        for parameter, name in _iterate_type_parameters(onnx_node):
            taken = _list_supported_dtypes(onnx_node, parameter)
            if name in dtypes and taken and dtypes[name] not in taken:
                shown = ", ".join(t for t in taken if t not in UNSUPPORTED_DTYPES)
                is_of_half = node.op_type == "quantize" and dtypes[name] == "float16"
                return (
                    f"it computes {onnx_node.op_type} in {dtypes[name]}, but ONNX Runtime's CPU kernels support "
                    f"{shown}. {FLOAT16_ADVICE if is_of_half else CONVERT_ADVICE}"
                )
    return None


def _dtypes(graph: onnx.GraphProto) -> dict[str, str]:
    found = {t.name: _dtype_name(t.data_type) for t in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        found[value.name] = _dtype_name(value.type.tensor_type.elem_type)
    return {name: dtype for name, dtype in found.items() if dtype}


def _dtype_name(element: int) -> str:
    dtype = TO_TORCH.get(ir.DataType(element))
    return str(dtype).removeprefix("torch.") if dtype else ""


def _iterate_type_parameters(node: onnx.NodeProto) -> Iterator[tuple[str, str]]:
    """Yield the type parameter and the name of each operand and result; the last operand may be variadic."""
    schema = _schema(node.op_type)
    for declared, names in ((schema.inputs, node.input), (schema.outputs, node.output)):
        for position, name in enumerate(names):
            if name and declared:
                yield declared[min(position, len(declared) - 1)].type_str, name


def _list_supported_dtypes(node: onnx.NodeProto, parameter: str) -> list[str]:
    """Return the supported dtypes of a type parameter; empty if it is fixed or no tensor."""
    without = {*_list_missing_dtypes(_runtime_version()).get(node.op_type, {}).get(parameter, ())}
    given = {a.name: _value(a) for a in (*_defaults(node.op_type), *node.attribute)}
    for entry in _load_table()["failing"]:
        if node.op_type in entry["operators"] and parameter == entry["parameter"] and _is_matching(given, entry):
            without.update(entry["dtypes"])
    return [name for name in _list_schema_dtypes(node.op_type, parameter) if name not in without]


def _is_matching(given: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    return all(given[name] == value for name, value in entry.get("where", {}).items())


def _value(attribute: onnx.AttributeProto) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    return value.decode() if isinstance(value, bytes) else value


@cache
def _defaults(op_type: str) -> tuple[onnx.AttributeProto, ...]:
    return tuple(a.default_value for a in _schema(op_type).attributes.values() if a.default_value.name)


@cache
def _list_schema_dtypes(op_type: str, parameter: str) -> tuple[str, ...]:
    (constraint,) = [c for c in _schema(op_type).type_constraints if c.type_param_str == parameter] or [None]
    allowed = constraint.allowed_type_strs if constraint else ()
    elements = {f"tensor({data.name.lower()})": dtype for data, dtype in TO_TORCH.items()}
    return tuple(str(elements[text]).removeprefix("torch.") for text in allowed if text in elements)


@cache
def _schema(op_type: str) -> onnx.defs.OpSchema:
    return onnx.defs.get_schema(op_type, OPSET)


@cache
def _list_missing_dtypes(version: tuple[int, ...]) -> Mapping[str, Mapping[str, set[str]]]:
    """Return the dtypes that a version of the runtime lacks, by operator and type parameter."""
    found = {op: {p: {*names} for p, names in row.items()} for op, row in _load_table()["missing"].items()}
    for entry in _load_table()["added"]:
        if version < _parse_version(entry["version"]):
            for op, row in entry["missing"].items():
                for parameter, names in row.items():
                    found.setdefault(op, {}).setdefault(parameter, set()).update(names)
    return found


@cache
def _runtime_version() -> tuple[int, ...]:
    """Return the version of the installed runtime, or the highest number if there is none."""
    if find_spec("onnxruntime") is None:
        return (sys.maxsize,)
    return _parse_version(importlib.import_module("onnxruntime").__version__)


def _parse_version(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


@cache
def _load_table() -> dict[str, Any]:
    return tomllib.loads(KERNEL_TABLE_PATH.read_text(encoding="utf-8"))
