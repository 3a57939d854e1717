"""`Target`, the interface to a runtime; its `Artifact`, and the `Runner` that a loaded artifact becomes."""

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
    """Metadata such as the size in ``bytes``, and ``warnings`` for the export to log."""


class Runner(Protocol):
    """A loaded artifact."""

    def __call__(self, inputs: Sequence[torch.Tensor], /) -> list[torch.Tensor]:
        """Run the artifact on one CPU tensor per input, in order; return one tensor per output."""
        ...


@runtime_checkable
class Target(Protocol):
    """A runtime that models are compiled for. Algorithms and targets do not know each other.

    A target may also define these attributes and methods:

    - ``arithmetic``: a sequence of `clika_ref.targets.arithmetic.Arithmetic`, if it computes in other formats than the
      dtypes of its tensors. Without it, results are compared at the precision of their dtypes.
    - ``scheme``: its quantization scheme, a `clika_ref.targets.quantization_scheme.QuantizationScheme`, if it runs
      quantized models.
    - ``configured``: a method that takes deployment settings with fields and returns a target that follows them.
    - ``emulated_by``: the runtime that runs its files if its own runtime cannot be installed here.
    - ``check``: a method from a path to a list of `clika_ref.core.violations.Violation`, if its files must follow
      rules.
    - ``profile``: a method from an artifact and inputs to the seconds that each node takes in a call, by node name as
      in `explain`. Nodes fused into others have no entry; time that belongs to no node is under ``""``.
    - ``opened``: a method from a path and a folder for a copy to a `clika_ref.targets.opened_files.OpenedFile`, if its
      files have their own format.
    - ``runtime``: the distribution of its runtime, for tables and commands.
    - ``suffixes``: the suffixes of its files, for tables and commands.
    """

    @property
    def name(self) -> str:
        """The name that deployment settings use for it."""
        ...

    def missing(self) -> str | None:
        """Return why the runtime is unavailable and what to install, or None if it is available."""
        ...

    def refusal(self, node: Node, /) -> str | None:
        """Return why the target cannot run a node, or None if it can."""
        ...

    def passes(self) -> Sequence[Pass]:
        """Return the passes of this target, run after the standard ones."""
        ...

    def compile(self, graph: Graph, path: Path, /, **options: Any) -> Artifact:
        """Write the artifact of a graph to a path. ``options`` are export options, such as ``external_data``."""
        ...

    def load(self, artifact: Artifact, /) -> Runner:
        """Load an artifact into the runtime."""
        ...

    def explain(self, artifact: Artifact, /) -> Mapping[str, str]:
        """Return the precision in which the runtime runs each node, read from its own optimized graph.

        Keys are node names in the graph passed to `compile`. Values are ``int8`` for nodes that compute on or move INT8
        tensors, ``int4 weights`` for float nodes with an INT4 weight, ``float``, ``float: <reason>`` if float is
        unexpected, or ``fused`` for a part of another node.
        """
        ...
