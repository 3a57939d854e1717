"""An ONNX model to disk: checked, deterministic, weights streamed from where they lie, so that none is copied."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
import onnx_ir as ir
import torch

from clika_ref.core.errors import TargetError
from clika_ref.storage import AtomicFiles

LIMIT_BYTES = 2**31 - 2**20
"""Largest model in one file: protobuf parsers stop at 2 GB; the rest is room for the graph itself."""

ALIGNMENT = 4096
"""Offsets in the data file are multiples of a page, so that runtimes can map weights instead of reading them."""

SMALL = 1024
"""Weights up to this many bytes stay in the model file: shape inference reads them there."""

# Field numbers of onnx.proto; each is written with wire type 2 (length, then bytes).
MODEL_GRAPH, GRAPH_INITIALIZER, TENSOR_RAW_DATA = 7, 5, 9


def write_model(model: ir.Model, path: Path, *, external_data: bool = False) -> int:
    """Write a model, with its weights beside it where asked for or where one file cannot hold them.

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
    tensors = {name: _raw(value) for name, value in weights.items()}
    total = sum(data.nbytes for data in tensors.values())
    _check(proto, weights, path)
    data_path = path.with_name(f"{path.name}.data")
    apart = external_data or total > LIMIT_BYTES
    headers: list[tuple[onnx.TensorProto, np.ndarray | None]]
    with AtomicFiles(path) as files:
        main = files.open(path)
        if apart:
            headers = list(_external(weights, tensors, files.open(data_path), data_path.name))
        else:
            headers = [(_header(value), tensors[name]) for name, value in weights.items()]
        _write(proto, headers, main)
    return sum(p.stat().st_size for p in ([path, data_path] if apart else [path]))


def _raw(value: ir.Value) -> np.ndarray:
    """Return the bytes of a weight without copying them."""
    tensor = value.const_value.raw  # type: ignore[union-attr]
    assert isinstance(tensor, torch.Tensor)
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


def _header(value: ir.Value) -> onnx.TensorProto:
    tensor = value.const_value
    assert tensor is not None
    return onnx.TensorProto(name=value.name, data_type=int(tensor.dtype), dims=list(tensor.shape.numpy()))


def _external(
    weights: dict[str, ir.Value], tensors: dict[str, np.ndarray], file: BinaryIO, location: str
) -> Iterator[tuple[onnx.TensorProto, np.ndarray | None]]:
    for name, value in weights.items():
        header, data = _header(value), tensors[name]
        if data.nbytes <= SMALL:
            yield header, data
            continue
        padding = -file.tell() % ALIGNMENT
        file.write(b"\0" * padding)
        header.data_location = onnx.TensorProto.EXTERNAL
        for key, entry in (("location", location), ("offset", file.tell()), ("length", data.nbytes)):
            header.external_data.add(key=key, value=str(entry))
        file.write(data.data)
        yield header, None


def _write(proto: onnx.ModelProto, headers: list[tuple[onnx.TensorProto, np.ndarray | None]], file: BinaryIO) -> None:
    """Write the message field by field: a serialized message is the concatenation of its fields, in any order."""
    graph = proto.graph.SerializeToString(deterministic=True)
    proto.ClearField("graph")
    fields: list[tuple[bytes, np.ndarray | None]] = []
    for header, data in headers:
        body = header.SerializeToString(deterministic=True)
        if data is not None:
            body += _tag(TENSOR_RAW_DATA) + _varint(data.nbytes)
        length = len(body) + (data.nbytes if data is not None else 0)
        fields.append((_tag(GRAPH_INITIALIZER) + _varint(length) + body, data))
    size = len(graph) + sum(len(head) + (data.nbytes if data is not None else 0) for head, data in fields)
    file.write(proto.SerializeToString(deterministic=True))
    file.write(_tag(MODEL_GRAPH) + _varint(size) + graph)
    for head, data in fields:
        file.write(head)
        if data is not None and data.nbytes:
            file.write(data.data)


def _tag(field: int) -> bytes:
    return _varint(field << 3 | 2)


def _varint(number: int) -> bytes:
    result = bytearray()
    while number > 0x7F:
        result.append(number & 0x7F | 0x80)
        number >>= 7
    result.append(number)
    return bytes(result)


def _check(proto: onnx.ModelProto, weights: dict[str, ir.Value], path: Path) -> None:
    """Run the ONNX checker on the model with its weights declared as inputs: it need not read them."""
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
        msg = f"the ONNX checker rejects the model for {path.name}: {str(error).strip().splitlines()[0]}"
        raise TargetError(msg) from error
