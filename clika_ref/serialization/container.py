"""A document and tensors as one safetensors file or tensor, with a digest to detect damage."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import safetensors
import safetensors.torch
import torch

from clika_ref.core.errors import ModelError
from clika_ref.serialization.vocabulary import FileKey

FILE_FORMAT = 6
"""Version of the file format. Formats 0 to 5 were those of development versions, and are rejected."""

MAX_DOCUMENT_BYTES = 2**30
"""Maximum bytes of a document; more are not unpacked, whatever a forged file claims."""

COMPRESSION_LEVEL = 9
"""Level of zlib. The highest is fast enough: documents are repetitive, and most counts are 0."""

HEADER_LENGTH_BYTES = HEADER_ALIGNMENT = 8
"""Bytes of the header length field; the header length is a multiple of it.

Source: safetensors, README, "Format".
"""

BITS_PER_BYTE = 8

ZIP_MAGIC = b"PK\x03\x04"

TensorTable = dict[str, Any]
"""Dtype, shape and offsets of each tensor, by name."""


def pack_file(document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> list[bytes | memoryview]:
    """Serialize a document and tensors into the parts of a file. Equal contents give equal bytes.

    The digest detects accidents but no forgery, since anyone who alters a file can also recompute it.
    """
    text = deflate(json.dumps(document, separators=(",", ":")).encode())
    table, data = _split(memoryview(safetensors.torch.save(_to_dense_cpu({**tensors, FileKey.DOCUMENT: text}))))
    head = json.dumps({FileKey.FORMAT: FILE_FORMAT}, separators=(",", ":"))
    header = json.dumps(
        {"__metadata__": {FileKey.HEAD: head, FileKey.DIGEST: _compute_digest(head, table, data)}, **table},
        separators=(",", ":"),
    ).encode()
    header += b" " * (-len(header) % HEADER_ALIGNMENT)
    return [len(header).to_bytes(HEADER_LENGTH_BYTES, "little"), header, data]


def unpack_file(blob: bytes) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the document and the tensors of a file, without executing anything in it.

    Raises:
        ModelError: the bytes are no such file, are truncated, altered, or of another format; the message begins with
            "it".
    """
    _check_file_type(blob)
    try:
        table, data = _split(memoryview(blob))
        metadata = table.pop("__metadata__")
        head = json.loads(metadata[FileKey.HEAD])
        found = int(head.get(FileKey.FORMAT, 0))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ModelError(f"it does not contain a compiled module: {type(error).__name__}: {error}") from error
    check_format("it", found, FILE_FORMAT)
    _check_data_length(table, data)
    if metadata.get(FileKey.DIGEST) != _compute_digest(metadata[FileKey.HEAD], table, data):
        raise ModelError("its digest does not match: it was changed or damaged after saving. Copy it again.")
    try:
        tensors = safetensors.torch.load(blob)
        return _read_document(tensors.pop(FileKey.DOCUMENT)), tensors
    except (ValueError, KeyError, TypeError, RecursionError, zlib.error, safetensors.SafetensorError) as error:
        raise ModelError(f"its tensors are damaged: {type(error).__name__}: {error}") from error


def check_format(subject: str, found: int, supported: int) -> None:
    """Reject data in another format than the supported one.

    Args:
        subject: the data, as the first words of the message.
        found: the format of the data.
        supported: the format that this version reads and writes. Older ones were those of development versions.

    Raises:
        ModelError: the format is another one.
    """
    if found > supported:
        raise ModelError(
            f"{subject} has format {found}, but this clika-ref reads formats up to {supported}. Update clika-ref."
        )
    if found < supported:
        raise ModelError(f"{subject} was saved by a development version; compile again")


def _read_document(text: torch.Tensor) -> dict[str, Any]:
    found = json.loads(inflate(text, MAX_DOCUMENT_BYTES))
    if not isinstance(found, dict):
        raise TypeError(f"the document is a {type(found).__name__}, not an object")
    return found


def _to_dense_cpu(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors as safetensors requires them: on the CPU, dense, and without shared memory."""
    found: dict[str, torch.Tensor] = {}
    seen = set[int]()
    for name, tensor in tensors.items():
        dense = tensor.detach().cpu().contiguous()
        address = dense.untyped_storage().data_ptr()
        found[name] = dense.clone() if address in seen else dense
        seen.add(address)
    return found


def _split(blob: memoryview) -> tuple[TensorTable, memoryview]:
    """Split a safetensors file into header and data."""
    start = HEADER_LENGTH_BYTES + int.from_bytes(blob[:HEADER_LENGTH_BYTES], "little")
    return json.loads(bytes(blob[HEADER_LENGTH_BYTES:start])), blob[start:]


def _compute_digest(text: str, table: TensorTable, data: memoryview) -> str:
    """Return the CRC-32 of all parts in hexadecimal: it detects accidents in a quarter of the time of BLAKE2."""
    parts = (text.encode(errors="surrogatepass"), json.dumps(table, sort_keys=True).encode(), data)
    pieces = [piece for part in parts for piece in (len(part).to_bytes(HEADER_LENGTH_BYTES, "little"), part)]
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    return f"{crc:08x}"


def _check_file_type(blob: bytes) -> None:
    if blob.startswith(ZIP_MAGIC):
        raise ModelError(
            "it is a zip file from torch.save: a pickle, which can run code and is not loaded. Give a file from "
            "clika_save."
        )
    if not blob.startswith(b"{", HEADER_LENGTH_BYTES):
        raise ModelError(f"it is not a safetensors file ({len(blob):,} bytes). Give a file from clika_save.")
    length, left = int.from_bytes(blob[:HEADER_LENGTH_BYTES], "little"), len(blob) - HEADER_LENGTH_BYTES
    if length > left:
        raise ModelError(
            f"it is truncated: its header has {length:,} bytes, but only {left:,} are there. Copy it again."
        )


def _check_data_length(table: TensorTable, data: memoryview) -> None:
    try:
        needed = max((int(entry["data_offsets"][1]) for entry in table.values()), default=0)
    except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        raise ModelError(f"its header is damaged: {type(error).__name__}: {error}") from error
    if len(data) != needed:
        state = "is truncated" if len(data) < needed else "has extra bytes at its end"
        raise ModelError(f"it {state}: its tensors take {needed:,} bytes, but {len(data):,} are there. Copy it again.")


def deflate(content: bytes) -> torch.Tensor:
    """Compress bytes with zlib into ``uint8[bytes]``.

    >>> inflate(deflate(b"graph"), 5)
    b'graph'
    """
    return torch.frombuffer(bytearray(zlib.compress(content, COMPRESSION_LEVEL)), dtype=torch.uint8)


def inflate(compressed: torch.Tensor, max_bytes: int) -> bytes:
    """Decompress the result of `deflate`.

    Args:
        compressed: the compressed bytes.
        max_bytes: maximum size of the result, because a small forged file may expand without limit.

    Raises:
        ValueError: the result is larger.
        zlib.error: the bytes are damaged.
    """
    found = zlib.decompressobj().decompress(compressed.numpy().tobytes(), max_bytes + 1)
    if len(found) > max_bytes:
        raise ValueError(f"{len(compressed):,} bytes decompress to more than {max_bytes:,}")
    return found


def write_extra_state(document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Serialize a document and tensors as ``uint8[bytes]``, such as the state of a module that is not a weight."""
    return torch.frombuffer(bytearray(b"".join(pack_file(document, tensors))), dtype=torch.uint8)


def read_extra_state(state: object) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the document and the tensors, without executing anything in them.

    Raises:
        ModelError: the state is no tensor of such a file.
    """
    is_tensor = isinstance(state, torch.Tensor)
    if not is_tensor or state.dtype != torch.uint8 or state.layout != torch.strided or state.is_meta:
        found = f"{state.dtype}, {state.layout} on {state.device}" if is_tensor else f"a {type(state).__name__}"
        raise ModelError(
            f"cannot load _extra_state (the graph): it is {found}. Give the uint8[bytes] of a saved state dict."
        )
    blob = state.cpu().numpy().tobytes()
    try:
        return unpack_file(blob)
    except ModelError as error:
        raise ModelError(f"cannot load _extra_state (the graph) of {len(blob)} bytes: {error}") from error


def pack_bits(x: torch.Tensor) -> torch.Tensor:
    """Pack ``bool[...]`` into ``uint8[ceil(n / 8)]``, lowest bit first; the last byte is padded with zeros.

    >>> pack_bits(torch.tensor([True, False, True]))
    tensor([5], dtype=torch.uint8)
    """
    flat = torch.nn.functional.pad(x.reshape(-1).to(torch.uint8), (0, -x.numel() % BITS_PER_BYTE))
    return (flat.reshape(-1, BITS_PER_BYTE) << _bit_indices(x)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Unpack the result of `pack_bits`.

    Raises:
        ValueError: the number of bytes does not match the shape.

    >>> unpack_bits(torch.tensor([5], dtype=torch.uint8), (3,))
    tensor([ True, False,  True])
    """
    count = torch.Size(shape).numel()
    if packed.ndim != 1 or len(packed) != -(-count // BITS_PER_BYTE):
        raise ValueError(f"{count} booleans take {-(-count // BITS_PER_BYTE)} bytes, not {list(packed.shape)}")
    return ((packed[:, None] >> _bit_indices(packed)) & 1).bool().reshape(-1)[:count].reshape(shape)


def _bit_indices(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(BITS_PER_BYTE, dtype=torch.uint8, device=like.device)


def strip_prefix(tensors: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the tensors with names that begin with a prefix, under their names without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
