"""Files of a target's own form, ours or anybody's: how they end, and what its optional method ``opened`` returns."""

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
    """What is known of a file that lies there already."""

    artifact: Artifact
    """Of a file that computes the same, in which nodes have names of their own by which the target explains them."""
    inputs: Mapping[str, tuple[torch.dtype | None, Sequence[int | None]]]
    """Of each input, its dtype, None where torch has none, and its sides, None where they are dynamic."""
    nodes: Mapping[str, tuple[str, str]]
    """By the name that the target explains: what it is called in the file, and its operator."""


def opener_of(target: Target) -> Callable[[Path, Path], OpenedFile] | None:
    """Return what opens files of a target's own form, given a folder for a copy; None where it has no such form."""
    return getattr(target, "opened", None)


def suffixes_of(target: Target | None) -> tuple[str, ...]:
    """Return how the files of a target end; nothing where it does not say, or there is no target."""
    return tuple(getattr(target, "suffixes", ()))


def refusal_of_suffix(place: Path, name: str, targets: Mapping[str, Target], choose: str) -> str | None:
    """Say why the artifact of a target does not go into a file that ends like something else, such as a program.

    Args:
        place: of the artifact; without a suffix it is any target's.
        name: of the target, which may say how its files end.
        targets: all that there are, some of which may write such files.
        choose: how the user asks for one of these, in words that its name follows.
    """
    taken, suffix = suffixes_of(targets.get(name)), place.suffix.lower()
    if not taken or not suffix or suffix in taken:
        return None
    others = [other for other, target in targets.items() if suffix in suffixes_of(target)]
    hint = f", and those of {' and '.join(others)} in {place.suffix}: {choose} {others[0]}" if others else ""
    return f"files of {name} end in {' or '.join(taken)}{hint}"
