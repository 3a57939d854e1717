"""Write an ONNX model to disk: checked, deterministic, with weights streamed from their storage without copies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
import onnx_ir as ir

from clika_ref.core.errors import TargetError
from clika_ref.onnx_export.dtypes import bytes_of
from clika_ref.serialization.atomic_files import stage_file

MAX_FILE_BYTES = 2**31 - 2**20
"""Maximum size of a model in one file: protobuf parsers stop at 2 GB; the rest leaves room for the graph itself."""

DATA_ALIGNMENT = 4096
"""Offsets in the data file are multiples of the page size, so that runtimes can memory-map the weights."""

MAX_INLINE_BYTES = 1024
"""Weights up to this many bytes stay in the model file, because shape inference reads them there."""

# Field numbers of onnx.proto; each is written with wire type 2 (length, then bytes).
MODEL_GRAPH, GRAPH_INITIALIZER, TENSOR_RAW_DATA = 7, 5, 9


def write_model(model: ir.Model, path: Path, *, external_data: bool = False) -> int:
    """Write a model, with its weights in a separate file on request or if one file cannot hold them.

    Returns:
        The number of bytes on disk.

    Raises:
        TargetError: the ONNX checker rejects the model.
        ModelError: the path cannot be written.
    """
    weights = dict(model.graph.initializers)
    model.graph.initializers.clear()
    try:
        proto = ir.to_proto(model)
    finally:
        model.graph.initializers.update(weights)
    total = sum(map(_nbytes, weights.values()))
    _check(proto, weights, path)
    apart = external_data or total > MAX_FILE_BYTES
    headers: list[tuple[onnx.TensorProto, ir.Value | None]]
    with stage_file(path) as staged:
        if apart:
            data_path = staged.with_name(f"{staged.name}.data")
            with data_path.open("xb") as data:
                headers = list(_write_external(weights, data, data_path.name))
        else:
            headers = [(_make_header(value), value) for value in weights.values()]
        with staged.open("xb") as main:
            _write(proto, headers, main)
        return sum(file.stat().st_size for file in staged.parent.iterdir())


def _nbytes(value: ir.Value) -> int:
    assert value.const_value is not None
    return value.const_value.nbytes


def _raw_bytes(value: ir.Value) -> np.ndarray:
    """Return the bytes of a weight without copying them; a lazy tensor is computed now."""
    tensor: Any = value.const_value
    tensor = tensor.raw() if isinstance(tensor, ir.LazyTensor) else tensor
    return bytes_of(tensor.raw)


def _make_header(value: ir.Value) -> onnx.TensorProto:
    tensor = value.const_value
    assert tensor is not None
    return onnx.TensorProto(name=value.name, data_type=int(tensor.dtype), dims=list(tensor.shape.numpy()))


def _write_external(
    weights: dict[str, ir.Value], file: BinaryIO, location: str
) -> Iterator[tuple[onnx.TensorProto, ir.Value | None]]:
    for value in weights.values():
        header, nbytes = _make_header(value), _nbytes(value)
        if nbytes <= MAX_INLINE_BYTES:
            yield header, value
            continue
        padding = -file.tell() % DATA_ALIGNMENT
        file.write(b"\0" * padding)
        header.data_location = onnx.TensorProto.EXTERNAL
        for key, entry in (("location", location), ("offset", file.tell()), ("length", nbytes)):
            header.external_data.add(key=key, value=str(entry))
        file.write(_raw_bytes(value).data)
        yield header, None


def _write(proto: onnx.ModelProto, headers: list[tuple[onnx.TensorProto, ir.Value | None]], file: BinaryIO) -> None:
    """Write the message field by field; serialized fields may be concatenated in any order."""
    graph = proto.graph.SerializeToString(deterministic=True)
    proto.ClearField("graph")
    fields: list[tuple[bytes, ir.Value | None]] = []
    size = len(graph)
    for header, weight in headers:
        body = header.SerializeToString(deterministic=True)
        nbytes = 0 if weight is None else _nbytes(weight)
        if weight is not None:
            body += _encode_tag(TENSOR_RAW_DATA) + _encode_varint(nbytes)
        head = _encode_tag(GRAPH_INITIALIZER) + _encode_varint(len(body) + nbytes) + body
        fields.append((head, weight))
        size += len(head) + nbytes
    file.write(proto.SerializeToString(deterministic=True))
    file.write(_encode_tag(MODEL_GRAPH) + _encode_varint(size) + graph)
    for head, weight in fields:
        file.write(head)
        if weight is not None and _nbytes(weight):
            file.write(_raw_bytes(weight).data)


def _encode_tag(field: int) -> bytes:
    return _encode_varint(field << 3 | 2)


def _encode_varint(number: int) -> bytes:
    result = bytearray()
    while number > 0x7F:
        result.append(number & 0x7F | 0x80)
        number >>= 7
    result.append(number)
    return bytes(result)


def _check(proto: onnx.ModelProto, weights: dict[str, ir.Value], path: Path) -> None:
    """Run the ONNX checker on the model with its weights declared as inputs, so that it does not read them."""
    light = onnx.ModelProto()
    light.CopyFrom(proto)
    for name, value in weights.items():
        tensor = value.const_value
        assert tensor is not None
        light.graph.input.append(
            onnx.helper.make_tensor_value_info(name, int(tensor.dtype), list(tensor.shape.numpy()))
        )
    try:
        onnx.checker.check_model(light)
    except onnx.checker.ValidationError as error:
        raise TargetError(
            f"the ONNX checker rejects the model for {path.name}: {str(error).strip().splitlines()[0]}"
        ) from error
