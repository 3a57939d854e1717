"""Suffixes of files: those that a target declares, and those of files next to an artifact."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from clika_ref.core.targets import Target


def companion_path(file: Path, suffix: str) -> Path:
    """Return the path of a file that belongs to an artifact, next to it and unique for each."""
    return file.with_name(f"{file.name}{suffix}")


def suffix_error(path: Path, name: str, targets: Mapping[str, Target], choose: str) -> str | None:
    """Return the reason to reject a path for an artifact with the suffix of another kind of file, such as a program.

    Args:
        path: path of the artifact; without a suffix it is valid for any target.
        name: of the target, which may declare its suffixes.
        targets: all available ones, to suggest those with this suffix.
        choose: how the user selects one of these, in words before its name.
    """
    accepted, suffix = targets[name].suffixes if name in targets else (), path.suffix.lower()
    if not accepted or not suffix or suffix in accepted:
        return None
    others = [other for other, target in targets.items() if suffix in target.suffixes]
    shown = " or ".join(accepted)
    hint = f"For {path.suffix}, use {choose} {others[0]}." if others else f"Use {shown}."
    return f"files of {name} end in {shown}. {hint}"
