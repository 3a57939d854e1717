"""What every level is given: the operators and passes in force, the target under test, the profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from clika_ref.arithmetic import Arithmetic, arithmetic_of
from clika_ref.core.ir import Graph
from clika_ref.core.registry import Registry
from clika_ref.core.targets import Target
from clika_ref.exporting.export import lower
from clika_ref.exporting.interface import name_interface
from clika_ref_conformance.cases import Case, Check, Task
from clika_ref_conformance.deviations import Deviation, ExpectedFailure
from clika_ref_conformance.profiles import Profile


@dataclass(frozen=True, eq=False)  # two suites are never asked whether they are equal, and other things belong to one
class Suite:
    """What is tested, against what, and how thoroughly."""

    registry: Registry
    target: Target
    profile: Profile
    folder: Path
    """A folder of this process for artifacts, removed when it ends."""
    subjects: Sequence[str] = field(default=())
    """Words of which a task must contain one (``-k``); all tasks where empty."""
    deviations: Sequence[Deviation] = field(default=())
    """What the target declares to do otherwise than eager."""
    xfails: Sequence[ExpectedFailure] = field(default=())
    """What it declares to fail."""
    setup: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What another process makes this suite from, as JSON; empty where it was made by hand."""

    @property
    def arithmetic(self) -> tuple[Arithmetic, ...]:
        """The formats in which the target declares to compute, where they are not those of the dtypes."""
        return arithmetic_of(self.target)

    def lowered(self, case: Case) -> Graph:
        """Return what is compiled for a case: a clone, after the export's own passes where the case asks for them.

        Outputs are results of nodes, each another one, as in an export: else a runtime returns its input, and twice
        the same.
        """
        graph = case.graph.clone()
        if case.passes:
            lower(graph, self.registry, self.target)
        twice = len({id(v) for v in graph.outputs}) < len(graph.outputs)
        if twice or any(v.producer is None for v in graph.outputs):
            name_interface(graph, self.registry.operators, (), ())
        return graph


class Level(Protocol):
    """A module of `clika_ref_conformance.levels`."""

    def tasks(self, suite: Suite) -> list[Task]:
        """Return the tasks of the plan; cheap, and the same in every process."""
        ...

    def checks(self, task: Task, suite: Suite) -> Sequence[Check]:
        """Return the checks of a task in a fixed order; drawing happens here, running in `Check.run`."""
        ...


Levels = Mapping[str, Level]
