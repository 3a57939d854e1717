"""A YAML file as a tree of entries with line numbers, parsed by ruamel.yaml. Reading executes no code.

Scalars follow YAML 1.2: ``1e-3`` is a number, ``2:4`` is not, and ``on`` is a string, unlike in YAML 1.1.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from clika_ref.core.errors import ModelError

TAG_PREFIX = "tag:yaml.org,2002:"
NUMBER_TAGS = {TAG_PREFIX + name for name in ("bool", "float", "int", "null")}
TEXT_TAGS = {TAG_PREFIX + name for name in ("str", "timestamp", "value", "merge")}
"""Tags of unquoted scalars that are read as text: settings have no dates, and merge keys only merge as keys."""
COLLECTION_TAGS = {TAG_PREFIX + name for name in ("seq", "map")}


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
            raise ModelError(f"cannot read the settings in {self.path}: it has {len(self.found)} errors:\n{shown}")


def read_tree(path: Path, problems: Problems) -> Entry:
    """Return the root of a YAML file with a single document.

    Raises:
        ModelError: the file cannot be read, is empty, or is not valid YAML.
    """
    try:
        root = _yaml().compose(path)
        if root is None:
            raise ModelError(
                f"cannot read the settings in {path}: the file is empty. Settings().save_to_path({str(path)!r}) "
                "writes all settings with their defaults."
            )
        return _TreeBuilder(problems).entry(root)
    except OSError as error:
        raise ModelError(f"cannot read the settings in {path}: {error.strerror or error}") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}" if mark is not None else ""
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        raise ModelError(f"cannot read the settings in {path}{where}: it is not valid YAML: {reason}") from error
    except (YAMLError, ValueError) as error:  # ValueError: not UTF-8, or an integer of thousands of digits
        raise ModelError(
            f"cannot read the settings in {path}: it is not valid YAML: {' '.join(str(error).split())}"
        ) from error
    except RecursionError as error:
        raise ModelError(
            f"cannot read the settings in {path}: it is nested too deeply, or an alias is inside its own anchor. "
            "Flatten it."
        ) from error


def _yaml() -> YAML:
    return YAML(typ="safe", pure=True)  # the C parser follows YAML 1.1


@dataclass
class _TreeBuilder:
    problems: Problems
    yaml: YAML = field(default_factory=_yaml)
    known: dict[int, Entry] = field(default_factory=dict[int, Entry])
    """Entries by the id of their node, which aliases share."""

    def entry(self, node: Node) -> Entry:
        if id(node) not in self.known:
            self.known[id(node)] = self._read(node)
        return self.known[id(node)]

    def _read(self, node: Node) -> Entry:
        line = _line(node)
        if node.tag not in NUMBER_TAGS | TEXT_TAGS | COLLECTION_TAGS:
            self.problems.add(line, f"the tag {node.tag!r} is not supported. Write the value without a tag.")
            return Entry(None, line)
        if isinstance(node, SequenceNode):
            return Entry([self.entry(item) for item in node.value], line)
        if isinstance(node, MappingNode):
            return Entry(self._mapping(node), line)
        value = self.yaml.constructor.construct_object(node) if node.tag in NUMBER_TAGS else node.value
        return Entry(value, line, node.value, isinstance(node, ScalarNode) and node.style is not None)

    def _mapping(self, node: MappingNode) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for key, value in node.value:
            if not isinstance(key, ScalarNode):
                self.problems.add(_line(key), "a key is a list or a mapping. Give a name.")
            elif key.tag == f"{TAG_PREFIX}merge":
                self.problems.add(
                    _line(key), (f"{key.value!r} is a merge key, which YAML 1.2 lacks. Write the names and values out.")
                )
            elif key.value in found:
                before = found[key.value].line
                self.problems.add(
                    _line(key), f"{key.value!r} is given twice, first in line {before}. Keep one of them."
                )
            else:
                found[key.value] = replace(self.entry(value), line=_line(key))
        return found


def _line(node: Node) -> int:
    return node.start_mark.line + 1


def parse_scalar(text: str) -> Any:
    """Return the value of an unquoted scalar in YAML 1.2.

    >>> [parse_scalar(text) for text in ("1e-3", "8", "2:4", "off", "True", "~")]
    [0.001, 8, '2:4', 'off', True, None]
    """
    yaml = _yaml()
    tag = str(yaml.resolver.resolve(ScalarNode, text, (True, False)))
    return yaml.constructor.construct_object(ScalarNode(tag, text)) if tag in NUMBER_TAGS else text
