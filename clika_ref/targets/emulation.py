"""Emulated targets: their runtime is unavailable, and the one in their attribute ``emulated_by`` runs their files."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clika_ref.core.targets import Target


def emulator_of(target: Target) -> str:
    """Return the runtime that runs files of a target here in place of its own; empty if its own does."""
    return getattr(target, "emulated_by", "")


def describe_runtime(target: Target) -> str:
    """Return a description of the runtime that runs files of a target here."""
    stand_in = emulator_of(target)
    return f"{target.name}, emulated by {stand_in}" if stand_in else target.name
