"""Context of every level: the operators and passes in force, the target under test, the profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from clika_ref.compiled.lowering import lower
from clika_ref.core.arithmetic import Arithmetic
from clika_ref.core.ir import Graph
from clika_ref.core.passes import Pass
from clika_ref.core.registry import Registry
from clika_ref.core.targets import Target
from clika_ref.export.interface import name_interface
from clika_ref_conformance.cases import Check, GraphCase, Task
from clika_ref_conformance.deviations import Deviation, ExpectedFailure
from clika_ref_conformance.profiles import Profile


@dataclass(frozen=True, eq=False)  # suites are keys: compared and hashed by identity
class Suite:
    """Target under test, its declarations, the registry and the profile."""

    registry: Registry
    target: Target
    profile: Profile
    folder: Path
    """Folder of this process for artifacts, removed when it ends."""
    subjects: Sequence[str] = field(default=())
    """Words to select tasks (``-k``): a task must contain at least one. All tasks if empty."""
    deviations: Sequence[Deviation] = field(default=())
    """Deviations from eager that the target declares."""
    xfails: Sequence[ExpectedFailure] = field(default=())
    """Failures that the target declares as expected."""
    setup: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Setup that lets another process create this suite, as JSON; empty if it was created by hand."""

    @property
    def arithmetic(self) -> tuple[Arithmetic, ...]:
        """Formats that the target declares for its arithmetic, if they differ from the dtypes."""
        return tuple(self.target.arithmetic)

    @property
    def passes(self) -> dict[str, Pass]:
        """Registered passes and those that the target adds, by name."""
        return {**self.registry.passes, **{p.name: p for p in self.target.passes()}}

    def lower_graph(self, case: GraphCase) -> Graph:
        """Return the graph to compile for a case: a clone, after the export's own passes if the case requests them.

        As in an export, each output is the result of a node, and no two outputs are the same value. Otherwise, a
        runtime could return its input, or one tensor twice.
        """
        graph = case.graph.clone()
        if case.passes:
            lower(graph, self.registry, self.target)
        has_duplicates = len({id(v) for v in graph.outputs}) < len(graph.outputs)
        if has_duplicates or any(v.producer is None for v in graph.outputs):
            name_interface(graph, self.registry.operators, (), ())
        return graph


class LevelModule(Protocol):
    """Interface of a module in `clika_ref_conformance.levels`."""

    def tasks(self, suite: Suite) -> list[Task]:
        """Return the tasks of the plan. Must be cheap and give the same result in every process."""
        ...

    def checks(self, task: Task, suite: Suite) -> Sequence[Check]:
        """Return the checks of a task in a fixed order. Drawing happens here, execution in `Check.run`."""
        ...
