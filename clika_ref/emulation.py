"""Targets whose runtime cannot be had here, and what runs their files instead: their attribute ``emulated_by``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clika_ref.core.targets import Target


def stand_in_of(target: Target) -> str:
    """Return what runs files of a target here in place of its runtime; nothing where its runtime does."""
    return getattr(target, "emulated_by", "")


def place_of(target: Target) -> str:
    """Return where files of a target are run here, in words."""
    stand_in = stand_in_of(target)
    return f"{target.name}, emulated by {stand_in}" if stand_in else target.name
