"""Data types of a run: tasks, checks, cases (a graph and inputs) and outcomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import ClikaError
from clika_ref.core.execution import interpret
from clika_ref.core.ir import Graph, Value
from clika_ref_conformance.verdicts import Comparison, Verdict


@dataclass(frozen=True)
class Task:
    """Unit of work of one worker: one row of a level, such as one operator in one dtype."""

    level: str
    subject: str
    """Row of the matrix: an operator, a pass, a pair ``a+b``, a block."""
    dtype: str = ""
    """Column of the matrix: dtype of the drawn tensors, without ``torch.``."""
    dynamic: bool = False

    @classmethod
    def of_json(cls, entry: Mapping[str, Any]) -> Task:
        """Return the task with these fields; other fields are ignored."""
        level, subject, dtype = (str(entry[key]) for key in ("level", "subject", "dtype"))
        return cls(level, subject, dtype, bool(entry["dynamic"]))

    def __str__(self) -> str:
        return "/".join(part for part in (self.level, self.subject, self.dtype, "dynamic" * self.dynamic) if part)


@dataclass(frozen=True)
class CaseRun:
    """One set of inputs for a compiled graph. ``name`` describes them (``typical``, ``nan-first``)."""

    name: str
    inputs: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class GraphCase:
    """Graph that is compiled once, and the inputs that it is run on."""

    name: str
    graph: Graph
    runs: Sequence[CaseRun]
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Attributes and shapes, for matching deviations and for reports."""
    passes: bool = False
    """Whether to run the passes of the standard pipeline and of the target before compiling, as in an export."""

    @cached_property
    def tensors(self) -> Mapping[Value, torch.Tensor]:
        """Tensor of each value for the first inputs; only the leaves if eager rejects these inputs."""
        constants = {v: v.data for v in self.graph.constants.values() if v.data is not None}
        found = {**dict(zip(self.graph.inputs, self.runs[0].inputs, strict=True)), **constants}
        with suppress(ClikaError), torch.no_grad():
            interpret(self.graph, self.runs[0].inputs, lambda n, made: found.update(zip(n.outputs, made, strict=True)))
        return {value: tensor.detach() if tensor.requires_grad else tensor for value, tensor in found.items()}


@dataclass(frozen=True)
class Compiled:
    """Artifact and the content of its files. The folder is removed with the check that compiled it."""

    artifact: Artifact
    files: Mapping[str, bytes]
    """Content of all files of the artifact's folder, by name."""


@dataclass(frozen=True)
class Outcome:
    """Result of one check."""

    name: str
    comparison: Comparison
    run: str = ""
    """Inputs that decided: the first that failed, or the worst that passed."""
    case: GraphCase | None = None
    """Failing case, reduced as far as possible, for the reproducer; None if only the check itself shows the failure."""
    deviations: Sequence[str] = ()
    """Identifiers of the declared deviations that it shows."""
    applicable: Sequence[str] = ()
    """Identifiers of the declared deviations that it could have shown."""
    seconds: float = 0.0
    compiled: Compiled | None = None
    """Artifact that failed; None if nothing was compiled, or if its files are not all in one folder."""

    @property
    def verdict(self) -> Verdict:
        """Verdict of the comparison."""
        return self.comparison.verdict


@dataclass(frozen=True)
class Check:
    """One item of the plan: a name, unique within its task, and the function to run, which never raises on purpose."""

    name: str
    run: Callable[[], Outcome]
