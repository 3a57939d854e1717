"""What the suite runs: tasks, the checks that they consist of, cases (a graph and inputs), and outcomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from clika_ref.core.ir import Graph
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

    @property
    def verdict(self) -> Verdict:
        """What became of it."""
        return self.comparison.verdict


@dataclass(frozen=True)
class Check:
    """One item of the plan: its name, unique within its task, and what to do. A check raises nothing on purpose."""

    name: str
    run: Callable[[], Outcome]
