"""Read the comments of Python files and the text of configuration files; each word keeps its line."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from fnmatch import fnmatchcase

CONFIGURATION_FILES = ("Makefile", ".ci/run", ".gitignore", "*.toml", "*.txt", "*.yaml", "*.yml")
"""Their comments, messages and descriptions are read by people, and their keys and values are few."""


def is_configuration(path: str) -> bool:
    """Return whether a file is read as a whole: a Makefile, a settings file, a list of requirements."""
    return any(fnmatchcase(path, pattern) for pattern in CONFIGURATION_FILES)


def read_comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the comments of a Python file with their first lines; comments on adjacent lines are one text."""
    first, lines = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if lines and token.start[0] != first + len(lines):
            yield first, strip_code("\n".join(lines))
            lines.clear()
        first = first if lines else token.start[0]
        lines.append(token.string)
    if lines:
        yield first, strip_code("\n".join(lines))


def strip_code(text: str) -> str:
    """Return a text without comment signs and code in backticks; lines keep their numbers."""
    without_code = re.sub(r"`+[^`]*`+", lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    return without_code.replace("#", " ")
