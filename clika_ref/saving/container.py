"""A document and tensors as one safetensors file, with a digest to detect damage."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from typing import Any

import safetensors
import safetensors.torch
import torch

from clika_ref.core.errors import ModelError
from clika_ref.saving.deflating import deflated, inflated

FORMAT = 3
"""Version of the file format, increased whenever older code cannot read new files. Older files stay readable."""

HEAD, DIGEST = "clika", "clika_digest"
"""Metadata entries: JSON with the format, and the digest of it and of all tensors."""

CHECKED_BY_CRC = 3
"""First format with a CRC-32 digest, as in zip and PNG files: it detects accidents in a quarter of the time."""

DOCUMENT = "clika/document"
"""Name of the tensor with the document as deflated JSON. Before format 2, the document was in the metadata."""

LARGEST = 2**30
"""Maximum bytes of a document; more are not unpacked, whatever a forged file claims."""

LENGTH = ALIGNMENT = 8
"""Bytes of the header length field; the header length is a multiple of it.

Source: safetensors, README, "Format".
"""

ZIP = b"PK\x03\x04"

Table = dict[str, Any]
"""Dtype, shape and offsets of each tensor, by name."""


def packed(document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> list[bytes | memoryview]:
    """Serialize a document and tensors into the parts of a file. Equal contents give equal bytes.

    The digest detects accidents but no forgery, since anyone who alters a file can also recompute it.
    """
    text = deflated(json.dumps(document, separators=(",", ":")).encode())
    table, data = _split(memoryview(safetensors.torch.save(_apart({**tensors, DOCUMENT: text}))))
    head = json.dumps({"format": FORMAT}, separators=(",", ":"))
    header = json.dumps(
        {"__metadata__": {HEAD: head, DIGEST: _digest(FORMAT, head, table, data)}, **table}, separators=(",", ":")
    ).encode()
    header += b" " * (-len(header) % ALIGNMENT)
    return [len(header).to_bytes(LENGTH, "little"), header, data]


def unpacked(blob: bytes) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the document and the tensors of a file, without executing anything in it.

    Files without a format and a digest predate both.

    Raises:
        ModelError: the bytes are no such file, are truncated, altered, or of a newer format; the message begins with
            "it".
    """
    _refuse_others(blob)
    try:
        table, data = _split(memoryview(blob))
        metadata = table.pop("__metadata__")
        head = json.loads(metadata[HEAD])
        found = int(head.get("format", 0))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        msg = f"it holds no compiled module: {type(error).__name__}: {error}"
        raise ModelError(msg) from error
    if found > FORMAT:
        msg = f"it has format {found}, and this clika-ref reads up to {FORMAT}; update clika-ref"
        raise ModelError(msg)
    _refuse_other_length(table, data)
    if (found or DIGEST in metadata) and metadata.get(DIGEST) != _digest(found, metadata[HEAD], table, data):
        msg = "it is not as it was written: its digest is another one; it was altered, or damaged on the way"
        raise ModelError(msg)
    try:
        tensors = safetensors.torch.load(blob)
        return head if found < 2 else _read_document(tensors.pop(DOCUMENT)), tensors
    except (ValueError, KeyError, TypeError, RecursionError, zlib.error, safetensors.SafetensorError) as error:
        msg = f"its tensors are damaged: {type(error).__name__}: {error}"
        raise ModelError(msg) from error


def _read_document(text: torch.Tensor) -> dict[str, Any]:
    found = json.loads(inflated(text, LARGEST))
    if not isinstance(found, dict):
        msg = f"the document is a {type(found).__name__}"
        raise TypeError(msg)
    return found


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors as safetensors requires them: on the CPU, dense, and without shared memory."""
    found: dict[str, torch.Tensor] = {}
    seen = set[int]()
    for name, tensor in tensors.items():
        dense = tensor.detach().cpu().contiguous()
        place = dense.untyped_storage().data_ptr()
        found[name] = dense.clone() if place in seen else dense
        seen.add(place)
    return found


def _split(blob: memoryview) -> tuple[Table, memoryview]:
    """Split a safetensors file into header and data."""
    start = LENGTH + int.from_bytes(blob[:LENGTH], "little")
    return json.loads(bytes(blob[LENGTH:start])), blob[start:]


def _digest(form: int, text: str, table: Table, data: memoryview) -> str:
    """Return the CRC-32 of all parts in hexadecimal, or BLAKE2 for formats before `CHECKED_BY_CRC`."""
    parts = (text.encode(errors="surrogatepass"), json.dumps(table, sort_keys=True).encode(), data)
    pieces = [piece for part in parts for piece in (len(part).to_bytes(LENGTH, "little"), part)]
    if form < CHECKED_BY_CRC:
        return hashlib.blake2b(b"".join(pieces), digest_size=16).hexdigest()
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    return f"{crc:08x}"


def _refuse_others(blob: bytes) -> None:
    if blob.startswith(ZIP):
        msg = (
            "it is a zip file, as torch.save writes it: a pickle, which may run code, and is not read; give what "
            "clika_save wrote"
        )
        raise ModelError(msg)
    length = int.from_bytes(blob[:LENGTH], "little")
    if len(blob) > LENGTH and blob[LENGTH : LENGTH + 1] == b"{" and length > len(blob) - LENGTH:
        msg = f"it is cut off: of its header of {length:,} bytes it has {len(blob) - LENGTH:,}; copy it once more"
        raise ModelError(msg)
    if len(blob) <= LENGTH or blob[LENGTH : LENGTH + 1] != b"{":
        msg = f"it is no safetensors file ({len(blob):,} bytes); give what clika_save wrote"
        raise ModelError(msg)


def _refuse_other_length(table: Table, data: memoryview) -> None:
    try:
        needed = max((int(entry["data_offsets"][1]) for entry in table.values()), default=0)
    except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        msg = f"its header is damaged: {type(error).__name__}: {error}"
        raise ModelError(msg) from error
    if len(data) != needed:
        state = "is cut off" if len(data) < needed else "goes on behind its end"
        msg = f"it {state}: its tensors take {needed:,} bytes, and there are {len(data):,}; copy it once more"
        raise ModelError(msg)
