"""Normalize texts: temporary folders, addresses, times, and the folder of this repository."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from releasing.distributions import ROOT

TEMPORARY = re.escape(str(Path(tempfile.gettempdir()).resolve() / tempfile.gettempprefix()))

VOLATILE_PATTERNS = (
    (re.compile(rf"{TEMPORARY}\w+"), "<folder>"),
    (re.compile(rf"{re.escape(str(ROOT))}(/\S+\.py):\d+"), r"<root>\1"),  # lines of our own files move
    (re.compile(re.escape(str(ROOT))), "<root>"),
    (re.compile(r"\b0x[0-9a-f]{6,}"), "<address>"),
    (re.compile(r"\d[\d.]* m?s\b"), "<time>"),
)


def normalize_text(text: str) -> str:
    """Replace the parts of a text that differ from run to run.

    >>> normalize_text("<object at 0x7f11c8a04c10>, 2.4 s")
    '<object at <address>>, <time>'
    """
    for pattern, replacement in VOLATILE_PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def describe_error(error: BaseException) -> str:
    """Return the class and the message of an error, with its notes."""
    notes = getattr(error, "__notes__", ())
    return normalize_text("\n".join([f"{type(error).__name__}: {error}", *notes]))
