"""What the suite runs: tasks, the checks that they consist of, cases (a graph and inputs), and outcomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from clika_ref.core.errors import ClikaError
from clika_ref.core.execution import interpret
from clika_ref.core.ir import Graph, Value
from clika_ref.core.targets import Artifact
from clika_ref_conformance.verdicts import Comparison, Verdict


@dataclass(frozen=True)
class Task:
    """A piece of the plan that one worker does at a time: one row of a level, such as one operator in one dtype."""

    level: str
    subject: str
    """The row of the matrix: an operator, a pass, a pair ``a+b``, a block."""
    dtype: str = ""
    """The column: the dtype of the drawn tensors, without ``torch.``."""
    dynamic: bool = False

    def __str__(self) -> str:
        return "/".join(part for part in (self.level, self.subject, self.dtype, "dynamic" * self.dynamic) if part)


@dataclass(frozen=True)
class Run:
    """One set of inputs for a compiled graph; ``name`` says what is special about them (``typical``, ``nan-first``)."""

    name: str
    inputs: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A graph that is compiled once, and the inputs that it is run on."""

    name: str
    graph: Graph
    runs: Sequence[Run]
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What a deviation may be matched by and a report shows: attributes, shapes."""
    passes: bool = False
    """Whether the passes of the standard pipeline and of the target come before compiling, as in an export."""

    @cached_property
    def tensors(self) -> Mapping[Value, torch.Tensor]:
        """What each value holds on the first inputs; leaves alone where eager refuses these."""
        constants = {v: v.data for v in self.graph.constants.values() if v.data is not None}
        found = {**dict(zip(self.graph.inputs, self.runs[0].inputs, strict=True)), **constants}
        with suppress(ClikaError), torch.no_grad():
            interpret(self.graph, self.runs[0].inputs, lambda n, made: found.update(zip(n.outputs, made, strict=True)))
        return {value: tensor.detach() if tensor.requires_grad else tensor for value, tensor in found.items()}


@dataclass(frozen=True)
class Compiled:
    """An artifact with its files, as their folder goes with the check that has compiled it."""

    artifact: Artifact
    files: Mapping[str, bytes]
    """The content of all files of its folder, by their names."""


@dataclass(frozen=True)
class Outcome:
    """What became of one check."""

    name: str
    comparison: Comparison
    run: str = ""
    """The inputs that decided: the first that failed, or the worst that passed."""
    case: Case | None = None
    """What failed, made as small as possible, for the reproducer; None where only the check itself shows it."""
    deviations: Sequence[str] = ()
    """Identifiers of the declared deviations that were seen in it."""
    watched: Sequence[str] = ()
    """Identifiers of the declared deviations that could have been seen in it."""
    seconds: float = 0.0
    compiled: Compiled | None = None
    """The artifact that failed; None where nothing was compiled, or not as files of one folder."""

    @property
    def verdict(self) -> Verdict:
        """What became of it."""
        return self.comparison.verdict


@dataclass(frozen=True)
class Check:
    """One item of the plan: its name, unique within its task, and what to do. A check raises nothing on purpose."""

    name: str
    run: Callable[[], Outcome]
