"""Read an untrusted zip archive: only known names, each once, with limits on number and size."""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

from clika_ref_conformance.reproducing.errors import ReportError

MAX_UNPACKED_BYTES = 256 * 2**20
"""Limit on the unpacked size of a reproducer; the suite's cases have a few kilobytes."""

MAX_ENTRIES = 64
"""Limit on the number of files in a reproducer; there are six, and an artifact of a few."""

REQUIRED_FILES = ("repro.py", "meta.json", "graph.json", "weights.safetensors", "inputs.npz", "expected.npz")

ARTIFACT_FOLDER = "artifact/"

_ARTIFACT_FILE = re.compile(r"artifact/[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


def is_artifact_file(name: str) -> bool:
    """Return whether a name in a reproducer is allowed for a file of an artifact."""
    return _ARTIFACT_FILE.fullmatch(name) is not None


def pack(files: Mapping[str, bytes]) -> bytes:
    """Return a zip archive; equal files give equal bytes, on any system and at any time."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))  # the earliest date that the format can represent
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            entry.create_system = 3  # Unix, independent of the system
            archive.writestr(entry, files[name])
    return buffer.getvalue()


def unpack(path: Path) -> dict[str, bytes]:
    """Return the files of a reproducer; nothing is written to disk.

    Raises:
        ReportError: it is no such archive, lacks a file, holds others, or unpacks to more than the limit.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            _check_entries(path, entries)
            return {entry.filename: archive.read(entry) for entry in entries}
    except (OSError, EOFError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise ReportError(f"cannot read the reproducer {str(path)!r}: {error}. Give a CASE.zip of a report.") from error


def _check_entries(path: Path, entries: list[zipfile.ZipInfo]) -> None:
    names = [entry.filename for entry in entries]
    problems = [f"has {len(names)} files, more than {MAX_ENTRIES}"] if len(names) > MAX_ENTRIES else []
    unknown = [n for n in names if n not in REQUIRED_FILES and not is_artifact_file(n)]
    if unknown:
        problems.append(f"contains {unknown[:5]}, which no reproducer has")
    if len(set(names)) < len(names):
        problems.append("contains a name twice")
    if lacking := [n for n in REQUIRED_FILES if n not in names]:
        problems.append(f"lacks {lacking}")
    size = sum(entry.file_size for entry in entries)
    if size > MAX_UNPACKED_BYTES:
        problems.append(f"unpacks to {size:,} bytes, more than {MAX_UNPACKED_BYTES:,}")
    if problems:
        raise ReportError(
            f"cannot read the reproducer {str(path)!r}: it {', '.join(problems)}. Give a CASE.zip of a report."
        )
