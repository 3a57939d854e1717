"""What ONNX itself says of a file, its types and its faults, without the weights: nothing of that follows from them."""

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
from clika_ref_tensorrt.own_operators import ONNX_DOMAINS, graphs_of, stated_types

SMALL = 1024
"""Most elements of a constant that shapes may follow from."""

TENSORS = onnx.TensorProto


def inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a file in which the nodes of local functions stand where these are called, where its opset has them."""
    if not model.functions:
        return model
    try:
        return onnx.inliner.inline_local_functions(_of_one_opset(model))
    except Exception:  # noqa: BLE001 - such as functions that call themselves, of which `complaint` tells
        return model


def _of_one_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a file whose functions have its opset where their operators are the same; ONNX refuses others."""
    versions = {opset.domain: opset.version for opset in model.opset_import if opset.domain in ONNX_DOMAINS}
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    for function in whole.functions:
        graphs = graphs_of(onnx.GraphProto(node=function.node))
        kinds = {node.op_type for graph in graphs for node in graph.node if node.domain in ONNX_DOMAINS}
        for opset in function.opset_import:
            own, wanted = opset.version, versions.get(opset.domain, 0)
            if wanted and all(_declared(kind, own) == _declared(kind, wanted) for kind in kinds):
                opset.version = wanted
    return whole


def _declared(operator: str, opset: int) -> int | None:
    """Return since when an operator is as an opset has it; None where that has none."""
    return onnx.defs.get_schema(operator, opset).since_version if onnx.defs.has(operator, opset) else None


def elements(tensor: onnx.TensorProto, folder: Path | None) -> np.ndarray[Any, Any]:
    """Return the elements of a constant, which may lie in a file in a folder; none where it is malformed.

    Raises:
        TargetError: they lie in another file, which cannot be read.
    """
    try:
        return np.asarray(onnx.numpy_helper.to_array(tensor, base_dir=str(folder or "")))
    except Exception as error:
        if tensor.data_location != TENSORS.EXTERNAL:
            return np.zeros(0, np.float32)  # of which `malformed` tells
        reason = str(error).rstrip(".")
        msg = f"the elements of {tensor.name!r} cannot be read: {reason}; put the file beside what it refers to"
        raise TargetError(msg) from error


def converted(found: np.ndarray[Any, Any], kind: int) -> np.ndarray[Any, Any] | None:
    """Return elements as numbers of another type; None where that has none."""
    if kind not in onnx.helper.get_all_tensor_dtypes():
        return None
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind)
    with np.errstate(all="ignore"):  # what is infinite then, a rule tells
        return None if dtype.kind in "OSU" else found.astype(dtype)


def repeated(found: np.ndarray[Any, Any], shape: Sequence[int] | None) -> np.ndarray[Any, Any] | None:
    """Return one element as often as a shape has it; None where there are several, or nothing tells the shape."""
    if shape is None:
        return None
    if found.size == 1:
        return np.resize(found, shape)
    return found if found.size in (0, math.prod(shape)) else None


def malformed(model: onnx.ModelProto) -> Iterator[str]:
    """Say of each constant in a file whose elements cannot be read why; those in other files may be missing."""
    for graph in graphs_of(model.graph):
        for name, tensor in _constants(graph):
            if reason := _fault(tensor):
                yield f"the elements of {name!r} cannot be read: {reason}; export it anew"


def _fault(tensor: onnx.TensorProto) -> str:
    """Say why the elements of a constant cannot be read; nothing where they can, or lie in another file."""
    if tensor.data_location == TENSORS.EXTERNAL:
        return ""
    try:
        onnx.numpy_helper.to_array(tensor)
    except Exception as error:  # noqa: BLE001 - what it raises is its answer
        is_known = tensor.data_type in onnx.helper.get_all_tensor_dtypes()
        return str(error) if is_known else f"there is no type {tensor.data_type}"
    return ""


def _constants(graph: onnx.GraphProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """Yield the constants of a graph by their names."""
    yield from ((tensor.name, tensor) for tensor in graph.initializer)
    for node in graph.node:
        if node.op_type == "Constant":
            yield from ((node.output[0], a.t) for a in node.attribute if a.HasField("t"))


def outline(model: onnx.ModelProto, folder: Path | None) -> onnx.ModelProto:
    """Return a copy of a file whose large constants, and those that cannot be read in it, are inputs.

    Of the types that it states of computed values, only those are kept that nothing else tells: others may be of a
    model that has been changed since, and TensorRT infers them anew.
    """
    whole = model.graph
    graph = onnx.GraphProto(
        name=whole.name, node=whole.node, input=whole.input, output=whole.output, value_info=whole.value_info,
        initializer=map(_head, whole.initializer), sparse_initializer=whole.sparse_initializer,
    )  # fmt: skip
    known = {value.name for value in graph.input}
    for number, inner in enumerate(graphs_of(graph)):
        _keep_untold(inner)
        names = dict[str, str]()
        for tensor in _lying_apart(inner):
            if (sizes := _sizes(tensor, folder)) is not None:
                inner.initializer.append(onnx.numpy_helper.from_array(sizes, tensor.name))
                continue
            # Another branch may have another constant of that name.
            names[tensor.name] = f"{tensor.name}/{number}" if number else tensor.name
            if (name := names[tensor.name]) not in known:
                known.add(name)
                graph.input.append(onnx.helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
        if number and names:
            _rename(inner, names)
    return onnx.ModelProto(
        ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions, graph=graph
    )


def _keep_untold(graph: onnx.GraphProto) -> None:
    """Drop what a graph states of the types of values but for those that operators make which ONNX does not know."""
    foreign = [node for node in graph.node if node.domain not in ONNX_DOMAINS]
    types = {name: kind for node in foreign for name, kind in stated_types(node).items()}
    made = {name for node in foreign for name in node.output} - types.keys()
    kept = [value for value in graph.value_info if value.name in made]
    del graph.value_info[:]
    graph.value_info.extend(kept)
    graph.value_info.extend(onnx.helper.make_tensor_value_info(name, kind, None) for name, kind in types.items())


def _rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Let a branch, and what is within, read values under other names; what it returns of them keeps its name."""
    for node in graph.node:
        for position, name in enumerate(node.input):
            node.input[position] = names.get(name, name)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _rename(attribute.g, names)
    returned = [value.name for value in graph.output if value.name in names]
    graph.node.extend(onnx.helper.make_node("Identity", [names[name]], [name]) for name in returned)


def _sizes(tensor: onnx.TensorProto, folder: Path | None) -> np.ndarray[Any, Any] | None:
    """Return the elements of a constant that may be sizes, as far as they can be read."""
    if tensor.data_type not in (TENSORS.INT64, TENSORS.INT32) or math.prod(tensor.dims) > SMALL or _fault(tensor):
        return None
    try:
        return elements(tensor, folder)
    except TargetError:
        return None  # which may be a bias; what a rule needs, it asks for itself


def _head(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """Return a constant, without its elements where these are many."""
    if tensor.data_location == TENSORS.EXTERNAL or math.prod(tensor.dims) <= SMALL:
        return tensor
    return TENSORS(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, data_location=TENSORS.EXTERNAL)


def _lying_apart(graph: onnx.GraphProto) -> list[onnx.TensorProto]:
    """Take the constants out of a graph that are large, or whose elements cannot be read in it, and return them."""
    held = graph.initializer
    places = [place for place, tensor in enumerate(held) if _is_apart(tensor)]
    found = [held.pop(place) for place in reversed(places)]
    for place in reversed(range(len(graph.node))):
        node = graph.node[place]
        if node.op_type == "Constant" and any(a.HasField("t") and _is_apart(a.t) for a in node.attribute):
            found.append(node.attribute[0].t)
            found[-1].name = node.output[0]
            graph.node.pop(place)
    return found


def _is_apart(tensor: onnx.TensorProto) -> bool:
    """Whether the elements of a constant are many, are not in a file, or not as its type has them."""
    is_elsewhere = tensor.data_location == TENSORS.EXTERNAL
    return is_elsewhere or math.prod(tensor.dims) > SMALL or bool(_fault(tensor))


def inferred(model: onnx.ModelProto) -> tuple[onnx.GraphProto, str]:
    """Return a graph with the types that ONNX infers, and why it refuses these; nothing where it does not.

    Inference takes time that grows with the square of the branches, so that what is valid is inferred once.
    """
    try:
        return onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True).graph, ""
    except Exception as error:  # noqa: BLE001 - what it raises is its answer
        refusal = _one_line(error)
    try:
        typed = onnx.shape_inference.infer_shapes(model).graph
    except Exception:  # noqa: BLE001 - as above
        return model.graph, refusal
    # ONNX's own operators take bfloat16 from opset 22 on, those of TensorRT before that, too.
    if computes_in_bfloat16(onnx.ModelProto(graph=typed)):
        try:
            onnx.shape_inference.infer_shapes(model, strict_mode=True)
        except Exception as error:  # noqa: BLE001 - as above
            return typed, _one_line(error)
        return typed, ""
    return typed, refusal


def complaint(model: onnx.ModelProto) -> str:
    """Say what but its types makes an outline no valid ONNX, except ranks that it does not state."""
    ranked = onnx.ModelProto()
    ranked.CopyFrom(model)
    del ranked.graph.value_info[:]  # whose ranks need not be stated
    for value in (*ranked.graph.input, *ranked.graph.output):
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.shape.SetInParent()  # as a rank must be stated; types are inferred without
    try:
        onnx.checker.check_model(ranked)
    except Exception as error:  # noqa: BLE001 - what it raises is its answer
        return _one_line(error)
    return ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
