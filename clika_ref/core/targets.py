"""`Target`, the base class of runtimes that models are compiled for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Self, cast

from clika_ref.core.arithmetic import Arithmetic
from clika_ref.core.errors import TargetError
from clika_ref.core.quantization_scheme import QuantizationScheme

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch

    from clika_ref.core.artifacts import Artifact, OpenedFile, Runner, StatefulRunner, Violation
    from clika_ref.core.ir import Graph, Node
    from clika_ref.core.passes import Pass

INT8_PRECISION, FLOAT_PRECISION, FUSED_PRECISION = "int8", "float", "fused"
"""Precisions of nodes, as `Target.explain` reports them."""


class Target(ABC):
    """A runtime that models are compiled for. Algorithms and targets do not know each other.

    A target sets `name` and implements `unsupported_reason`, `compile` and `load`. Everything else has a default.
    """

    name: str
    """The name that deployment settings use for it."""
    scheme: QuantizationScheme | None = None
    """Its quantization scheme. Without one, models run in float."""
    scheme_note: str = ""
    """A note on the scheme for the log of each quantization; empty if there is none."""
    arithmetic: Sequence[Arithmetic] = ()
    """The float formats that it computes in, if they differ from the dtypes of its tensors.

    Results are compared at the precision of these formats. By default, it computes in the dtypes of its tensors.
    """
    emulated_by: str = ""
    """The runtime that runs its files here if its own cannot be installed; empty if its own runs them."""
    runtime: str = ""
    """The distribution of its runtime, for tables and commands; empty if there is none to install."""
    suffixes: tuple[str, ...] = ()
    """The suffixes of its files, such as ``.onnx``. Exports reject other suffixes; by default, any is accepted."""
    deviations: str | Path | None = None
    """File with its known deviations for the conformance suite; by default ``deviations.toml`` next to its module."""

    @abstractmethod
    def unsupported_reason(self, node: Node, /) -> str | None:
        """Return why the target cannot run a node, or None if it can."""

    @abstractmethod
    def compile(self, graph: Graph, path: Path, /, **options: Any) -> Artifact:
        """Write the artifact of a graph to a path. ``options`` are export options, such as ``external_data``."""

    @abstractmethod
    def load(self, artifact: Artifact, /) -> Runner:
        """Load an artifact into the runtime."""

    def load_with_state(self, artifact: Artifact, state: Mapping[str, str], /) -> StatefulRunner | None:
        """Load an artifact into a runtime that keeps results: ``state`` names the output that an input takes next.

        By default None: each call passes them.
        """
        return None

    def unavailable_reason(self) -> str | None:
        """Return why the runtime is unavailable and what to install. By default None: it is available."""
        return None

    def passes(self) -> Sequence[Pass]:
        """Return the passes of this target, run after the standard ones. By default there are none."""
        return ()

    def explain(self, artifact: Artifact, /) -> Mapping[str, str]:
        """Return the precision in which the runtime runs each node, read from its own optimized graph.

        Keys are node names in the graph passed to `compile`. Values are ``int8`` for nodes that compute on or move INT8
        tensors, ``int4 weights`` for float nodes with an INT4 weight, ``float``, ``float: <reason>`` if float is
        unexpected, or ``fused`` for a node without a kernel of its own. By default empty: precisions are unknown.
        """
        return {}

    def configure(self, settings: Any, /) -> Self:
        """Return a target that follows deployment settings with fields. By default the target itself."""
        return self

    def with_rounded_inputs(self, block_size: int, /) -> Self:
        """Return a target that rounds the inputs of layers with low-bit weights to 8 bits at run time, on request.

        Its scheme says so, and `compile` writes files that ask the runtime for it. By default the target itself: it has
        operators for such layers (`QuantizationScheme.dynamic`), always rounds, or never does.

        Args:
            block_size: number of neighbors in a row that share a scale.
        """
        return self

    def check(self, path: Path, /) -> Sequence[Violation]:
        """Return the violations of the target's rules in a file. By default there are no rules."""
        return ()

    def has_file_rules(self) -> bool:
        """Return whether the target has rules for files: whether it overrides `check`."""
        return type(self).check is not Target.check

    def profile(self, artifact: Artifact, inputs: Sequence[torch.Tensor], /) -> Mapping[str, float]:
        """Return the seconds that each node takes in a call, by node name as in `explain`. By default empty.

        Nodes fused into others have no entry. Time that belongs to no node is under ``""``.

        Args:
            artifact: the artifact.
            inputs: one tensor for each of its inputs, of any shape that the artifact accepts.
        """
        return {}

    def has_node_times(self) -> bool:
        """Return whether the target reports times of nodes: whether it overrides `profile`."""
        return type(self).profile is not Target.profile

    def open_file(self, path: Path, folder: Path, /) -> OpenedFile:
        """Open a file in the target's own format, by any author.

        Args:
            path: the file.
            folder: a folder for a copy of it.

        Raises:
            TargetError: the target has no format of its own, as by default, or cannot read the file.
        """
        raise TargetError(f"open {path} for {self.name}: the target has no file format of its own. Give an ONNX file.")

    def has_own_format(self) -> bool:
        """Return whether the target has a file format of its own: whether it overrides `open_file`."""
        return type(self).open_file is not Target.open_file

    def describe_runtime(self) -> str:
        """Return the name of the target, with the runtime that emulates it."""
        return f"{self.name}, emulated by {self.emulated_by}" if self.emulated_by else self.name


def invalid_target_reason(target: object) -> str | None:
    """Return why an object is no valid target, or None if it is one."""
    if not isinstance(target, Target):
        return f"it is of the class {type(target).__name__}, which does not derive from clika_ref.core.targets.Target"
    declared: Any = target
    name, scheme, arithmetic = getattr(declared, "name", None), declared.scheme, declared.arithmetic
    if not isinstance(name, str):
        return f"its name is {name!r}; set the attribute `name` to a string"
    if not isinstance(scheme, QuantizationScheme | None):
        return f"its scheme is {scheme!r}; set it to a clika_ref.core.quantization_scheme.QuantizationScheme, or None"
    if not isinstance(arithmetic, list | tuple) or {*map(type, cast("Sequence[Any]", arithmetic))} - {Arithmetic}:
        return f"its arithmetic is {arithmetic!r}; set it to a sequence of clika_ref.core.arithmetic.Arithmetic"
    return None
