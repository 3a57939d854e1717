"""ONNX's own inference and checks, run on a file without its weights, because they do not depend on them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner

from clika_ref.core.errors import TargetError
from clika_ref_tensorrt.bfloat16 import computes_in_bfloat16
from clika_ref_tensorrt.own_operators import ONNX_DOMAINS, graphs_of, output_types

MAX_KEPT_ELEMENTS = 1024
"""Maximum elements of a constant that shapes may depend on."""

TENSOR_PROTO = onnx.TensorProto


def inline_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a file with local functions inlined, where its opset allows."""
    if not model.functions:
        return model
    try:
        return onnx.inliner.inline_local_functions(_unify_opsets(model))
    except Exception:  # noqa: BLE001 - such as recursive functions, which `validation_error` reports
        return model


def _unify_opsets(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a file with functions at its own opset if their operators are equal there; ONNX rejects others."""
    versions = {opset.domain: opset.version for opset in model.opset_import if opset.domain in ONNX_DOMAINS}
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    for function in whole.functions:
        graphs = graphs_of(onnx.GraphProto(node=function.node))
        kinds = {node.op_type for graph in graphs for node in graph.node if node.domain in ONNX_DOMAINS}
        for opset in function.opset_import:
            own, required = opset.version, versions.get(opset.domain, 0)
            if required and all(_schema_version(kind, own) == _schema_version(kind, required) for kind in kinds):
                opset.version = required
    return whole


def _schema_version(operator: str, opset: int) -> int | None:
    """Return the version that introduced an operator's schema at an opset, or None if the opset lacks it."""
    return onnx.defs.get_schema(operator, opset).since_version if onnx.defs.has(operator, opset) else None


def read_elements(tensor: onnx.TensorProto, folder: Path | None) -> np.ndarray[Any, Any]:
    """Return the elements of a constant, possibly from a file in ``folder``; none if it is malformed.

    Raises:
        TargetError: the elements are in another file, which cannot be read.
    """
    try:
        return np.asarray(onnx.numpy_helper.to_array(tensor, base_dir=str(folder or "")))
    except Exception as error:
        if tensor.data_location != TENSOR_PROTO.EXTERNAL:
            return np.zeros(0, np.float32)  # `find_malformed_constants` reports it
        reason = str(error).rstrip(".")
        msg = f"the elements of {tensor.name!r} cannot be read: {reason}. Put the file next to its external data."
        raise TargetError(msg) from error


def convert_elements(found: np.ndarray[Any, Any], kind: int) -> np.ndarray[Any, Any] | None:
    """Return the elements in another type, or None if NumPy lacks it."""
    if kind not in onnx.helper.get_all_tensor_dtypes():
        return None
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind)
    with np.errstate(all="ignore"):  # a rule reports infinite results
        return None if dtype.kind in "OSU" else found.astype(dtype)


def expand_elements(found: np.ndarray[Any, Any], shape: Sequence[int] | None) -> np.ndarray[Any, Any] | None:
    """Expand a single element to a shape; None for several elements, or an unknown shape."""
    if shape is None:
        return None
    if found.size == 1:
        return np.resize(found, shape)
    return found if found.size in (0, math.prod(shape)) else None


def find_malformed_constants(model: onnx.ModelProto) -> Iterator[str]:
    """Yield a message for each constant with unreadable elements; those in other files may be missing."""
    for graph in graphs_of(model.graph):
        for name, tensor in _constants(graph):
            if reason := _unreadable_reason(tensor):
                yield f"the elements of {name!r} cannot be read: {reason}. Export it again."


def _unreadable_reason(tensor: onnx.TensorProto) -> str:
    """Return why the elements of a constant cannot be read; empty if they can, or are in another file."""
    if tensor.data_location == TENSOR_PROTO.EXTERNAL:
        return ""
    try:
        onnx.numpy_helper.to_array(tensor)
    except Exception as error:  # noqa: BLE001 - the exception is the answer
        is_known = tensor.data_type in onnx.helper.get_all_tensor_dtypes()
        return str(error) if is_known else f"there is no type {tensor.data_type}"
    return ""


def _constants(graph: onnx.GraphProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """Yield the constants of a graph with their names."""
    yield from ((tensor.name, tensor) for tensor in graph.initializer)
    for node in graph.node:
        if node.op_type == "Constant":
            yield from ((node.output[0], a.t) for a in node.attribute if a.HasField("t"))


def make_outline(model: onnx.ModelProto, folder: Path | None) -> onnx.ModelProto:
    """Return a copy of a file with large or unreadable constants replaced by inputs.

    Declared types of computed values are kept only if they cannot be inferred: others may predate changes to the model,
    and TensorRT infers them itself.
    """
    whole = model.graph
    graph = onnx.GraphProto(
        name=whole.name, node=whole.node, input=whole.input, output=whole.output, value_info=whole.value_info,
        initializer=map(_drop_elements, whole.initializer), sparse_initializer=whole.sparse_initializer,
    )  # fmt: skip
    known = {value.name for value in graph.input}
    for number, inner in enumerate(graphs_of(graph)):
        _drop_inferable_types(inner)
        names = dict[str, str]()
        for tensor in _pop_large_constants(inner):
            if (sizes := _read_sizes(tensor, folder)) is not None:
                inner.initializer.append(onnx.numpy_helper.from_array(sizes, tensor.name))
                continue
            # Another branch may have a different constant of this name.
            names[tensor.name] = f"{tensor.name}/{number}" if number else tensor.name
            if (name := names[tensor.name]) not in known:
                known.add(name)
                graph.input.append(onnx.helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
        if number and names:
            _rename(inner, names)
    return onnx.ModelProto(
        ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions, graph=graph
    )


def _drop_inferable_types(graph: onnx.GraphProto) -> None:
    """Drop declared types of values, except outputs of operators unknown to ONNX."""
    foreign = [node for node in graph.node if node.domain not in ONNX_DOMAINS]
    types = {name: kind for node in foreign for name, kind in output_types(node).items()}
    made = {name for node in foreign for name in node.output} - types.keys()
    kept = [value for value in graph.value_info if value.name in made]
    del graph.value_info[:]
    graph.value_info.extend(kept)
    graph.value_info.extend(onnx.helper.make_tensor_value_info(name, kind, None) for name, kind in types.items())


def _rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Rename values that a branch and its nested graphs read; outputs of the branch keep their names."""
    for node in graph.node:
        for position, name in enumerate(node.input):
            node.input[position] = names.get(name, name)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _rename(attribute.g, names)
    returned = [value.name for value in graph.output if value.name in names]
    graph.node.extend(onnx.helper.make_node("Identity", [names[name]], [name]) for name in returned)


def _read_sizes(tensor: onnx.TensorProto, folder: Path | None) -> np.ndarray[Any, Any] | None:
    """Return the elements of a constant that may be sizes, if readable."""
    if (
        tensor.data_type not in (TENSOR_PROTO.INT64, TENSOR_PROTO.INT32)
        or math.prod(tensor.dims) > MAX_KEPT_ELEMENTS
        or _unreadable_reason(tensor)
    ):
        return None
    try:
        return read_elements(tensor, folder)
    except TargetError:
        return None  # it may be a bias; a rule that needs it reads it itself


def _drop_elements(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """Return a constant, without its elements if there are many."""
    if tensor.data_location == TENSOR_PROTO.EXTERNAL or math.prod(tensor.dims) <= MAX_KEPT_ELEMENTS:
        return tensor
    return TENSOR_PROTO(
        name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, data_location=TENSOR_PROTO.EXTERNAL
    )


def _pop_large_constants(graph: onnx.GraphProto) -> list[onnx.TensorProto]:
    """Remove large or unreadable constants from a graph, and return them."""
    initializers = graph.initializer
    indices = [index for index, tensor in enumerate(initializers) if _is_large_or_unreadable(tensor)]
    found = [initializers.pop(index) for index in reversed(indices)]
    for index in reversed(range(len(graph.node))):
        node = graph.node[index]
        if node.op_type == "Constant" and any(a.HasField("t") and _is_large_or_unreadable(a.t) for a in node.attribute):
            found.append(node.attribute[0].t)
            found[-1].name = node.output[0]
            graph.node.pop(index)
    return found


def _is_large_or_unreadable(tensor: onnx.TensorProto) -> bool:
    """Whether the elements of a constant are many, in another file, or invalid for its type."""
    is_elsewhere = tensor.data_location == TENSOR_PROTO.EXTERNAL
    return is_elsewhere or math.prod(tensor.dims) > MAX_KEPT_ELEMENTS or bool(_unreadable_reason(tensor))


def infer_types(model: onnx.ModelProto) -> tuple[onnx.GraphProto, str]:
    """Return a graph with inferred types, and the reason if ONNX rejects it, otherwise an empty string.

    Inference time is quadratic in the number of branches, so a valid file is inferred only once.
    """
    try:
        return onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True).graph, ""
    except Exception as error:  # noqa: BLE001 - the exception is the answer
        message = _one_line(error)
    try:
        typed = onnx.shape_inference.infer_shapes(model).graph
    except Exception:  # noqa: BLE001 - as above
        return model.graph, message
    # ONNX's own operators support bfloat16 from opset 22 on; TensorRT's support it before that.
    if computes_in_bfloat16(onnx.ModelProto(graph=typed)):
        try:
            onnx.shape_inference.infer_shapes(model, strict_mode=True)
        except Exception as error:  # noqa: BLE001 - as above
            return typed, _one_line(error)
        return typed, ""
    return typed, message


def validation_error(model: onnx.ModelProto) -> str:
    """Return why an outline is invalid ONNX, apart from types and undeclared ranks; empty if it is valid."""
    ranked = onnx.ModelProto()
    ranked.CopyFrom(model)
    del ranked.graph.value_info[:]  # their ranks may be undeclared
    for value in (*ranked.graph.input, *ranked.graph.output):
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.shape.SetInParent()  # the checker requires a rank; inference does not
    try:
        onnx.checker.check_model(ranked)
    except Exception as error:  # noqa: BLE001 - the exception is the answer
        return _one_line(error)
    return ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
