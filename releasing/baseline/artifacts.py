"""Digests of files, of ONNX files also without the metadata that names our own code."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import onnx

DIGEST_LENGTH = 24
"""Hexadecimal digits kept of a SHA-256: 96 bits distinguish the few thousand files of a record."""

METADATA_FIELDS = frozenset({"doc_string", "metadata_props", "producer_name", "producer_version"})
"""Fields of ONNX messages with the producer of a file and source lines. They do not affect its results."""


COUNTED_NAME = re.compile(rb'(name="[A-Z][A-Za-z]*)_[0-9]+"')
"""A name that OpenVINO gives to a node without one, with a number that counts through the whole process."""


def describe_files(folder: Path) -> dict[str, str]:
    """Return the digest of each file in a folder; of an ONNX file two, of its bytes and of its graph."""
    return {
        path.relative_to(folder).as_posix(): describe_file(path) for path in sorted(folder.rglob("*")) if path.is_file()
    }


def describe_file(path: Path) -> str:
    """Return the digest of the bytes of a file and, after a space, of an ONNX file that of its graph.

    Numbers in OpenVINO's own names are left out: they depend on earlier conversions in the same process.
    """
    content = path.read_bytes()
    if path.suffix == ".xml":
        content = COUNTED_NAME.sub(rb'\1"', content)
    digest = shorten_digest(hashlib.sha256(content))
    return f"{digest} {digest_graph(content)}" if path.suffix == ".onnx" else digest


def digest_graph(content: bytes) -> str:
    """Return the digest of an ONNX model without `METADATA_FIELDS`."""
    model = onnx.ModelProto.FromString(content)
    clear_metadata(model)
    return shorten_digest(hashlib.sha256(model.SerializeToString(deterministic=True)))


def clear_metadata(message: Any) -> None:
    """Clear `METADATA_FIELDS` of a protobuf message and of all messages in it."""
    for field, value in message.ListFields():
        if field.name in METADATA_FIELDS:
            message.ClearField(field.name)
        elif field.message_type is not None:
            for part in [value] if hasattr(value, "ListFields") else value:
                clear_metadata(part)


def shorten_digest(digest: Any) -> str:
    """Return the first `DIGEST_LENGTH` digits of a digest."""
    return digest.hexdigest()[:DIGEST_LENGTH]
