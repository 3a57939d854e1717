"""A YAML file as a tree of entries with line numbers. Reading executes no code and guesses no types.

Scalars follow YAML 1.2: ``1e-3`` is a number, ``2:4`` is not, and ``on`` is a string, unlike in YAML 1.1.

Source: YAML Ain't Markup Language, version 1.2.2, section 10.3 (core schema).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from clika_ref.core.errors import ModelError

NULL_WORDS = {"", "~", "null", "Null", "NULL"}
BOOLEAN_WORDS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
INTEGER_PATTERN = re.compile(r"[-+]?[0-9]{1,20}")  # 20 digits cover 64-bit integers; Python rejects thousands of digits
FLOAT_PATTERN = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
INFINITY_PATTERN = re.compile(r"([-+]?)\.(inf|Inf|INF)")

MERGE_KEY = "<<"
"""The merge key of YAML 1.1, which inserts its value into the mapping."""

PLAIN_TAGS = {"tag:yaml.org,2002:str", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"}
"""Tags of nodes without an explicit tag, if scalars are not resolved."""


@dataclass(frozen=True)
class Entry:
    """A node of the file: a scalar, a list of entries, or a mapping from names to entries."""

    value: Any
    line: int
    """Starts at 1."""
    text: str = ""
    """Source text of a scalar."""
    is_quoted: bool = False


@dataclass
class Problems:
    """All errors of a file, raised together."""

    path: Path
    found: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])

    def add(self, line: int, text: str) -> None:
        """Record an error in a line."""
        self.found.append((line, text))

    def raise_if_any(self) -> None:
        """Raise all recorded errors, in the order of lines.

        Raises:
            ModelError: there are errors.
        """
        if len(self.found) == 1:
            ((line, text),) = self.found
            raise ModelError(f"{self.path}, line {line}: {text}")
        if self.found:
            shown = "\n".join(f"  line {line}: {text}" for line, text in sorted(self.found))
            raise ModelError(f"{self.path} holds {len(self.found)} things that are no settings:\n{shown}")


def read_tree(path: Path, problems: Problems) -> Entry:
    """Return the root of a YAML file with a single document.

    Raises:
        ModelError: the file cannot be read, is empty, or is not valid YAML.
    """
    try:
        root = yaml.compose(path.read_bytes(), Loader=yaml.BaseLoader)
        if root is None:
            msg = f"{path} is empty; Settings().save_to_path({str(path)!r}) writes all settings, with their defaults"
            raise ModelError(msg)
        return _TreeBuilder(problems).entry(root)
    except OSError as error:
        msg = f"cannot read the settings in {path}: {error.strerror or error}"
        raise ModelError(msg) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}" if mark is not None else ""
        told = ", ".join(part for part in (error.context, error.problem) if part)
        raise ModelError(f"{path}{where}: this is no YAML: {told}") from error
    except yaml.YAMLError as error:
        raise ModelError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ModelError(f"{path} nests deeper than any settings do") from error


@dataclass
class _TreeBuilder:
    problems: Problems
    known: dict[int, Entry] = field(default_factory=dict[int, Entry])
    """Entries by the id of their node, which aliases share."""
    open: set[int] = field(default_factory=set[int])
    """Nodes being read: an alias for one of them would recurse forever."""

    def entry(self, node: yaml.Node) -> Entry:
        if id(node) not in self.known:
            if id(node) in self.open:
                self.problems.add(_line(node), "an alias stands within what it stands for")
                return Entry(None, _line(node))
            self.open.add(id(node))
            self.known[id(node)] = self._read(node)
            self.open.discard(id(node))
        return self.known[id(node)]

    def _read(self, node: yaml.Node) -> Entry:
        line = _line(node)
        if node.tag not in PLAIN_TAGS:
            self.problems.add(line, f"the tag {node.tag!r} is not read; write the value as it is, without a tag")
            return Entry(None, line)
        if isinstance(node, yaml.SequenceNode):
            return Entry([self.entry(item) for item in node.value], line)
        if isinstance(node, yaml.MappingNode):
            return Entry(self._mapping(node), line)
        is_quoted = isinstance(node, yaml.ScalarNode) and node.style is not None
        return Entry(node.value if is_quoted else parse_scalar(node.value), line, node.value, is_quoted)

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.problems.add(_line(key), "a key is a list or a mapping; keys are names")
            elif key.value == MERGE_KEY and key.style is None:
                self.problems.add(
                    _line(key), f"{MERGE_KEY!r} merges nothing in YAML 1.2; write the names and values out"
                )
            elif key.value in found:
                before = found[key.value].line
                self.problems.add(_line(key), f"{key.value!r} is given twice, first in line {before}; keep one of them")
            else:
                entry = self.entry(value)
                found[key.value] = Entry(entry.value, _line(key), entry.text, entry.is_quoted)
        return found


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def parse_scalar(text: str) -> Any:
    """Return the value of an unquoted scalar in YAML 1.2.

    >>> [parse_scalar(text) for text in ("1e-3", "8", "2:4", "off", "True", "~")]
    [0.001, 8, '2:4', 'off', True, None]
    """
    if text in NULL_WORDS:
        return None
    if text in BOOLEAN_WORDS:
        return BOOLEAN_WORDS[text]
    if INTEGER_PATTERN.fullmatch(text):
        return int(text)
    if FLOAT_PATTERN.fullmatch(text):
        return float(text)
    infinite = INFINITY_PATTERN.fullmatch(text)
    if infinite:
        return -math.inf if infinite[1] == "-" else math.inf
    return math.nan if text in (".nan", ".NaN", ".NAN") else text
