"""Strip large constants from an ONNX model, and run ONNX's own inference and checks, which do not depend on them."""

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
    """Return a model with its local functions inlined; the model itself if ONNX cannot inline them."""
    if not model.functions:
        return model
    try:
        return onnx.inliner.inline_local_functions(_align_function_opsets(model))
    except Exception:  # noqa: BLE001 - such as recursive functions, which `validation_error` reports
        return model


def _align_function_opsets(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model with its own opset in each function, if the schemas of the operators are equal there.

    ONNX only inlines functions with the opset of the model.
    """
    versions = {opset.domain: opset.version for opset in model.opset_import if opset.domain in ONNX_DOMAINS}
    aligned = onnx.ModelProto()
    aligned.CopyFrom(model)
    for function in aligned.functions:
        graphs = graphs_of(onnx.GraphProto(node=function.node))
        op_types = {node.op_type for graph in graphs for node in graph.node if node.domain in ONNX_DOMAINS}
        for opset in function.opset_import:
            before, required = opset.version, versions.get(opset.domain, 0)
            if required and all(_schema_version(op, before) == _schema_version(op, required) for op in op_types):
                opset.version = required
    return aligned


def _schema_version(op_type: str, opset: int) -> int | None:
    """Return the version that introduced an operator's schema at an opset, or None if the opset lacks it."""
    return onnx.defs.get_schema(op_type, opset).since_version if onnx.defs.has(op_type, opset) else None


def strip_constants(model: onnx.ModelProto, folder: Path | None) -> onnx.ModelProto:
    """Return a copy of a model with large or unreadable constants replaced by inputs.

    Small integer constants are kept, since shapes may depend on them. Declared types of computed values are kept only
    if ONNX cannot infer them: others may predate changes to the model, and TensorRT infers them itself.
    """
    source = model.graph
    graph = onnx.GraphProto(
        name=source.name, node=source.node, input=source.input, output=source.output, value_info=source.value_info,
        initializer=map(_drop_elements, source.initializer), sparse_initializer=source.sparse_initializer,
    )  # fmt: skip
    input_names = {value.name for value in graph.input}
    for number, inner in enumerate(graphs_of(graph)):
        _drop_inferable_types(inner)
        new_names = dict[str, str]()
        for tensor in _pop_large_constants(inner):
            if (sizes := _read_sizes(tensor, folder)) is not None:
                inner.initializer.append(onnx.numpy_helper.from_array(sizes, tensor.name))
                continue
            # Another branch may have a different constant of this name.
            new_names[tensor.name] = f"{tensor.name}/{number}" if number else tensor.name
            if (name := new_names[tensor.name]) not in input_names:
                input_names.add(name)
                graph.input.append(onnx.helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
        if number and new_names:
            _rename(inner, new_names)
    return onnx.ModelProto(
        ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions, graph=graph
    )


def _drop_inferable_types(graph: onnx.GraphProto) -> None:
    """Drop declared types of values, except for outputs of operators that ONNX does not know."""
    foreign = [node for node in graph.node if node.domain not in ONNX_DOMAINS]
    types = {name: elem_type for node in foreign for name, elem_type in output_types(node).items()}
    uninferable = {name for node in foreign for name in node.output} - types.keys()
    kept = [value for value in graph.value_info if value.name in uninferable]
    del graph.value_info[:]
    graph.value_info.extend(kept)
    graph.value_info.extend(
        onnx.helper.make_tensor_value_info(name, elem_type, None) for name, elem_type in types.items()
    )


def _pop_large_constants(graph: onnx.GraphProto) -> list[onnx.TensorProto]:
    """Remove large or unreadable constants from a graph, and return them."""
    initializers = graph.initializer
    indices = [index for index, tensor in enumerate(initializers) if _is_large_or_unreadable(tensor)]
    popped = [initializers.pop(index) for index in reversed(indices)]
    for index in reversed(range(len(graph.node))):
        node = graph.node[index]
        if node.op_type == "Constant" and any(a.HasField("t") and _is_large_or_unreadable(a.t) for a in node.attribute):
            popped.append(node.attribute[0].t)
            popped[-1].name = node.output[0]
            graph.node.pop(index)
    return popped


def _is_large_or_unreadable(tensor: onnx.TensorProto) -> bool:
    """Whether the elements of a constant are many, in another file, or invalid for its type."""
    is_external = tensor.data_location == TENSOR_PROTO.EXTERNAL
    return is_external or math.prod(tensor.dims) > MAX_KEPT_ELEMENTS or bool(_unreadable_reason(tensor))


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
    """Return a constant without its elements if there are many, and the constant itself otherwise."""
    if tensor.data_location == TENSOR_PROTO.EXTERNAL or math.prod(tensor.dims) <= MAX_KEPT_ELEMENTS:
        return tensor
    return TENSOR_PROTO(
        name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, data_location=TENSOR_PROTO.EXTERNAL
    )


def _rename(graph: onnx.GraphProto, new_names: Mapping[str, str]) -> None:
    """Rename values that a branch and its nested graphs read; outputs of the branch keep their names."""
    for node in graph.node:
        for position, name in enumerate(node.input):
            node.input[position] = new_names.get(name, name)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _rename(attribute.g, new_names)
    returned = [value.name for value in graph.output if value.name in new_names]
    graph.node.extend(onnx.helper.make_node("Identity", [new_names[name]], [name]) for name in returned)


def infer_types(model: onnx.ModelProto) -> tuple[onnx.GraphProto, str]:
    """Return the graph of a model with inferred types, and the reason why ONNX rejects it; empty if it is valid.

    Inference time is quadratic in the number of branches, so a valid model is inferred only once.
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
    """Return why a model is invalid ONNX, apart from types and undeclared ranks; empty if it is valid."""
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


def find_malformed_constants(model: onnx.ModelProto) -> Iterator[str]:
    """Yield a message for each constant with unreadable elements, except for external data, which may be missing."""
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


def read_elements(tensor: onnx.TensorProto, folder: Path | None) -> np.ndarray[Any, Any]:
    """Return the elements of a constant, possibly from a file in ``folder``; an empty array if it is malformed.

    Raises:
        TargetError: the elements are in another file, which cannot be read.
    """
    try:
        return np.asarray(onnx.numpy_helper.to_array(tensor, base_dir=str(folder or "")))
    except Exception as error:
        if tensor.data_location != TENSOR_PROTO.EXTERNAL:
            return np.zeros(0, np.float32)  # `find_malformed_constants` reports it
        reason = str(error).rstrip(".")
        raise TargetError(
            f"the elements of {tensor.name!r} cannot be read: {reason}. Put the file next to its external data."
        ) from error


def convert_elements(elements: np.ndarray[Any, Any], elem_type: int) -> np.ndarray[Any, Any] | None:
    """Return elements converted to an ONNX element type, or None if NumPy lacks it."""
    if elem_type not in onnx.helper.get_all_tensor_dtypes():
        return None
    dtype = onnx.helper.tensor_dtype_to_np_dtype(elem_type)
    with np.errstate(all="ignore"):  # a rule reports infinite results
        return None if dtype.kind in "OSU" else elements.astype(dtype)


def expand_elements(elements: np.ndarray[Any, Any], shape: Sequence[int] | None) -> np.ndarray[Any, Any] | None:
    """Return a single element expanded to a shape; elements that fill it already are returned unchanged.

    None if the shape is unknown, or several elements would be expanded.
    """
    if shape is None:
        return None
    if elements.size == 1:
        return np.resize(elements, shape)
    return elements if elements.size in (0, math.prod(shape)) else None
