"""The differences between two records, grouped so that one change of many files is one entry."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_PATHS_SHOWN = 6
"""Paths listed for one difference; ``--all`` lists each."""

TEXT_LENGTH = 300
"""A longer value is cut where it is shown."""

PATH_DEPTHS = {"networks": 2, "commands": 1, "signatures": 1}
"""Number of leading words of a path that a difference is listed under."""

Flat = dict[tuple[str, ...], str]
"""Values by their path in a part."""


@dataclass(frozen=True)
class Difference:
    """One difference and its path."""

    section: str
    """``networks``, ``commands`` or ``signatures``."""
    kind: str
    """``added``, ``removed`` or ``changed``."""
    text: str
    path: str


def compare_records(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """Return the differences in the parts of the first record. A part that the second lacks is one difference."""
    found: list[Difference] = []
    for part, content in before["parts"].items():
        if part not in after["parts"]:
            found.append(Difference(part.partition("/")[0], "removed", "not in the other record", part))
            continue
        found += _differences(part, flatten_part(part, content), flatten_part(part, after["parts"][part]))
    return found


def environment_warnings(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the differences in processor and libraries, which may change files without a change of code."""
    old, new = before["header"], after["header"]
    names = [name for name in old if name != "commit" and old[name] != new.get(name)]
    return [f"{name}: recorded with {old[name]}, now {new.get(name)}" for name in names]


def flatten_part(part: str, content: Mapping[str, Any]) -> Flat:
    """Return the values of a part by their paths, with the tensors of state dicts in place of their indices."""
    if not part.startswith("networks/"):
        return dict(_flatten(content))
    tensors, found = content["tensors"], dict[str, Any]()
    for variant, targets in content["variants"].items():
        found[variant] = {target: dict(entry) for target, entry in targets.items()}
        for entry in found[variant].values():
            if "state_dict" in entry:
                entry["state_dict"] = dict(tensors[index].split(": ", 1) for index in entry["state_dict"])
    return dict(_flatten(found))


def _flatten(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, dict | list) and value:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flatten(item, (*path, f"{key}"))
    else:
        yield path, value if isinstance(value, str) else json.dumps(value)


def _differences(part: str, old: Flat, new: Flat) -> Iterator[Difference]:
    section, _, name = part.partition("/")
    depth = PATH_DEPTHS[section]
    for kind, path, text in _changes(old, new):
        location = "/".join([*([name] if name else []), *path[:depth]])
        shown = " / ".join("[]" if word.isdecimal() else word for word in path[depth:])
        yield Difference(section, kind, f"{shown}: {text}".strip(": "), location)


def _changes(old: Flat, new: Flat) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yield the kind, path and text of each change. A missing subtree, such as a command, is one change."""
    for path in old:
        if path in new and old[path] != new[path]:
            is_file = path[2:3] in (("files",), ("outputs",)) and "error" not in path
            yield "changed", path, _compare_digests(old[path], new[path]) if is_file else _arrow(old[path], new[path])
    for kind, those, others in (("removed", old, new), ("added", new, old)):
        known = {path[:length] for path in others for length in range(len(path) + 1)}
        tops: dict[tuple[str, ...], list[str]] = {}
        for path, value in those.items():
            if path not in others:
                length = next((n for n in range(1, len(path)) if path[:n] not in known), len(path))
                tops.setdefault(path[:length], []).append(value)
        for path, values in tops.items():
            yield kind, path, _cut(values[0]) if len(values) == 1 else f"{len(values)} values"


def _arrow(old: str, new: str) -> str:
    return f"{_cut(old)} -> {_cut(new)}"


def _compare_digests(old: str, new: str) -> str:
    """Describe the difference of two files; each text has one digest, or those of its bytes and its ONNX graph."""
    if " " not in old or " " not in new:
        return "bytes differ"
    return "bytes differ, graph is equal" if old.split()[1] == new.split()[1] else "graph differs"


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_LENGTH else f"{text[:TEXT_LENGTH]}..."


def show_differences(found: list[Difference], *, shows_all: bool = False) -> Iterator[str]:
    """Yield the lines of a report by section and type; equal differences are one line with their paths."""
    groups: dict[tuple[str, str], dict[str, list[str]]] = {}
    for one in found:
        groups.setdefault((one.section, one.kind), {}).setdefault(one.text, []).append(one.path)
    for (section, kind), differences in sorted(groups.items()):
        yield f"{section}, {kind}: {sum(map(len, differences.values()))}"
        for text, locations in differences.items():
            yield f"  {text}"
            yield f"      in {_show_paths(locations, shows_all=shows_all)}"


def _show_paths(locations: list[str], *, shows_all: bool) -> str:
    if shows_all or len(locations) <= MAX_PATHS_SHOWN:
        return ", ".join(locations)
    return f"{', '.join(locations[:MAX_PATHS_SHOWN])} and {len(locations) - MAX_PATHS_SHOWN} more"


def read_renames(path: Path) -> dict[str, str]:
    """Read a TOML file with a table ``renames``: old names and new ones, dotted or not."""
    return tomllib.loads(path.read_text(encoding="utf-8"))["renames"]


def rename(record: Mapping[str, Any], names: Mapping[str, str]) -> Any:
    """Return a record with each whole word of ``names`` replaced, the longest first."""
    if not names:
        return record
    words = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    pattern = re.compile(rf"(?<!\w)(?:{words})(?!\w)")
    return json.loads(pattern.sub(lambda found: names[found[0]], json.dumps(record)))
