"""Files in a target's own format, by any author: their suffixes, and the result of the optional method ``opened``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from clika_ref.core.targets import Artifact, Target


@dataclass(frozen=True, slots=True)
class OpenedFile:
    """An existing file, as the target reads it."""

    artifact: Artifact
    """Artifact of an equivalent file with a unique name for each node, which the target's explanations refer to."""
    inputs: Mapping[str, tuple[torch.dtype | None, Sequence[int | None]]]
    """Dtype and shape of each input; the dtype is None if torch has none, and dynamic dims are None."""
    nodes: Mapping[str, tuple[str, str]]
    """Name in the file and operator of each node, by the name in the target's explanations."""


def opener_of(target: Target) -> Callable[[Path, Path], OpenedFile] | None:
    """Return the target's function that opens files of its own format, given a folder for a copy, or None."""
    return getattr(target, "open_file", None)


def suffixes_of(target: Target | None) -> tuple[str, ...]:
    """Return the suffixes of the target's files; empty if it declares none, or there is no target."""
    return tuple(getattr(target, "suffixes", ()))


def suffix_error(place: Path, name: str, targets: Mapping[str, Target], choose: str) -> str | None:
    """Return the reason to reject a path for an artifact with the suffix of another kind of file, such as a program.

    Args:
        place: path of the artifact; without a suffix it is valid for any target.
        name: of the target, which may declare its suffixes.
        targets: all available ones, to suggest those with this suffix.
        choose: how the user selects one of these, in words before its name.
    """
    taken, suffix = suffixes_of(targets.get(name)), place.suffix.lower()
    if not taken or not suffix or suffix in taken:
        return None
    others = [other for other, target in targets.items() if suffix in suffixes_of(target)]
    hint = f", and those of {' and '.join(others)} in {place.suffix}: {choose} {others[0]}" if others else ""
    return f"files of {name} end in {' or '.join(taken)}{hint}"
