"""Files of targets, as values: the artifact of an export, a loaded one, an opened one, and violations of rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch


@dataclass(frozen=True, slots=True)
class Artifact:
    """A compiled model on disk, with its metadata."""

    path: Path
    """The path of the file."""
    target: str
    """The name of the target that wrote it."""
    input_names: tuple[str, ...]
    """The names of the inputs in the file, in order."""
    output_names: tuple[str, ...]
    """The names of the outputs in the file, in order."""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Metadata such as the size in ``bytes``, and ``warnings`` and ``notes`` for the export to log."""


class Runner(Protocol):
    """A loaded artifact."""

    def __call__(self, inputs: Sequence[torch.Tensor], /) -> list[torch.Tensor]:
        """Run the artifact on one CPU tensor per input, in order; return one tensor per output."""
        ...


class StatefulRunner(Protocol):
    """A loaded artifact that keeps some results, its state, for the next call."""

    def start(self, state: Sequence[torch.Tensor], /) -> None:
        """Replace the state: one CPU tensor for each input that has one, in order."""

    def __call__(self, inputs: Sequence[torch.Tensor], rows: torch.Tensor | None = None, /) -> list[torch.Tensor]:
        """Run the artifact on the other inputs; return the other outputs.

        Args:
            inputs: one CPU tensor per input, in order.
            rows: ``int64[batch]``, the sample of the last call that each sample continues; None for the same one.
        """
        ...


@dataclass(frozen=True, slots=True)
class OpenedFile:
    """An existing file by any author, as the target reads it."""

    artifact: Artifact
    """Artifact of an equivalent file with a unique name for each node, which the target's explanations refer to."""
    inputs: Mapping[str, tuple[torch.dtype | None, Sequence[int | None]]]
    """Dtype and shape of each input; the dtype is None if torch has none, and dynamic dims are None."""
    nodes: Mapping[str, tuple[str, str]]
    """Name in the file and operator of each node, by the name in the target's explanations."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A violation of one of a target's rules in a file."""

    rule: str
    """The name of the rule."""
    node: str
    """Name of the node, or of its output if it has none; empty for the file as a whole."""
    message: str
    """The problem, and how to fix it."""

    def __str__(self) -> str:
        return f"[{self.rule}] {self.node or 'the file'}: {self.message}"
