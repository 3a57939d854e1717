"""``Target``: what a place that runs models must offer; its ``Artifact`` and the ``Runner`` that loads one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from clika_ref.core.ir import Graph, Node
    from clika_ref.core.passes import Pass


@dataclass(frozen=True, slots=True)
class Artifact:
    """A compiled model on disk and what is known of it."""

    path: Path
    """Of the file."""
    target: str
    """The name of the target that wrote it."""
    input_names: tuple[str, ...]
    """Of the inputs in the file, in order."""
    output_names: tuple[str, ...]
    """Of the outputs in the file, in order."""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Such as its ``bytes``, and ``warnings``, which an export logs."""


class Runner(Protocol):
    """A loaded artifact."""

    def __call__(self, inputs: Sequence[torch.Tensor], /) -> list[torch.Tensor]:
        """Run it on one tensor of the CPU per input, in order; return one per output."""
        ...


@runtime_checkable
class Target(Protocol):
    """A place that runs models. No algorithm knows a target, and no target knows an algorithm.

    One that computes in other formats than its tensors are declared in says so in an attribute ``arithmetic``, a
    sequence of `clika_ref.arithmetic.Arithmetic`; without it, results are held to the precision of their dtypes. One
    that runs integers says which in an attribute ``scheme``, a `clika_ref.quantization_scheme.QuantizationScheme`. One
    whose deployment settings have fields offers a method ``configured``, from settings to a target that obeys them.
    One whose runtime cannot be had here names in an attribute ``emulated_by`` what runs its files instead. One whose
    files must keep rules offers a method ``check``, from a path to a list of `clika_ref.violations.Violation`. One
    whose runtime tells how long single nodes take offers a method ``profile``, from an artifact and inputs to the
    seconds of nodes in a call, by their names as `explain` has them; parts of other nodes have none, and what the
    runtime does for none of them is under ``""``. One whose files have a form of their own offers a method ``opened``,
    from a path and a folder for a copy to a `clika_ref.opened_files.OpenedFile`. One may say in ``runtime`` which
    distribution its runtime is, and in ``suffixes`` how its files end, for tables and commands.
    """

    @property
    def name(self) -> str:
        """The name by which deployment settings ask for it."""
        ...

    def missing(self) -> str | None:
        """Say why the runtime cannot be used here and what to install, or return None."""
        ...

    def refusal(self, node: Node, /) -> str | None:
        """Say why the target cannot run a node, or return None."""
        ...

    def passes(self) -> Sequence[Pass]:
        """Return passes that only this target wants, run after the standard ones."""
        ...

    def compile(self, graph: Graph, path: Path, /, **options: Any) -> Artifact:
        """Write the artifact of a graph to a path; ``options`` are those of the export, as ``external_data``."""
        ...

    def load(self, artifact: Artifact, /) -> Runner:
        """Load an artifact in the runtime."""
        ...

    def explain(self, artifact: Artifact, /) -> Mapping[str, str]:
        """Return the precision in which the runtime really runs each node, read from its own optimized graph.

        By the name of the node in the graph that `compile` was given: ``int8`` where it computes in integers or moves
        them, ``int4 weights`` where it computes in float with a weight of so few bits, ``float``, ``float: <reason>``
        where the user may wonder why, or ``fused`` where it is part of another.
        """
        ...
