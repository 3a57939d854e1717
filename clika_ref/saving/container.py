"""A document and tensors as the bytes of one safetensors file, with a digest by which damage is seen."""

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
"""Of files. Raised whenever what is written can no longer be read by the code before; that of before is read."""

HEAD, DIGEST = "clika", "clika_digest"
"""Entries of the metadata: JSON that says the format, and the digest of that and of all tensors."""

CHECKED_BY_CRC = 3
"""The first format whose digest is a CRC-32, as zip and PNG files have: it finds accidents in a quarter of the time."""

DOCUMENT = "clika/document"
"""The name of a tensor: JSON that says everything but tensors, deflated. Before format 2, it was in the metadata."""

LARGEST = 2**30
"""Bytes of a document, more of which are not unpacked, whatever a forged file says."""

LENGTH = ALIGNMENT = 8
"""Bytes that say how long the header is, and of which its length is a multiple.

Source: safetensors, README, "Format".
"""

ZIP = b"PK\x03\x04"

Table = dict[str, Any]
"""Dtype, shape and place of each tensor, by its name."""


def packed(document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> list[bytes | memoryview]:
    """Return the bytes of a file in parts; the same document and tensors give the same ones.

    The digest tells accidents, and no forger: who alters a file can alter that as well.
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
    """Return the document and the tensors of a file; nothing of it is executed.

    What has neither a format nor a digest is older than these.

    Raises:
        ModelError: the bytes are no such file, are cut off, altered, or of a newer format; the message begins with
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
    """Return tensors on the CPU as safetensors takes them: dense, and no two of one memory."""
    found: dict[str, torch.Tensor] = {}
    seen = set[int]()
    for name, tensor in tensors.items():
        dense = tensor.detach().cpu().contiguous()
        place = dense.untyped_storage().data_ptr()
        found[name] = dense.clone() if place in seen else dense
        seen.add(place)
    return found


def _split(blob: memoryview) -> tuple[Table, memoryview]:
    """Return the header of a safetensors file, and its data."""
    start = LENGTH + int.from_bytes(blob[:LENGTH], "little")
    return json.loads(bytes(blob[LENGTH:start])), blob[start:]


def _digest(form: int, text: str, table: Table, data: memoryview) -> str:
    """Return the hexadecimal digits of the CRC-32 of all, or of BLAKE2 in formats before `CHECKED_BY_CRC`."""
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
