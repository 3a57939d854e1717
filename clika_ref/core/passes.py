"""`Pass` and its `Phase`, the `Pipeline` that runs passes to a fixed point, and the numeric check between them."""

# pyright: reportUnknownMemberType=false
# torch.random has no type annotations.

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch

from clika_ref.core.errors import PassError
from clika_ref.core.execution import interpret
from clika_ref.core.invariants import verify
from clika_ref.core.ir import Graph, walk_graphs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from clika_ref.core.accuracy import ErrorClass
    from clika_ref.core.operators import Operator


class Phase(enum.IntEnum):
    """The phase of a pass.

    CLEAN passes change the stored graph, so they keep every parameter. FUSE passes run on the lowered clone, which
    shares the weights, so they may fold them.
    """

    CLEAN = 1
    FUSE = 2


@runtime_checkable
class Pass(Protocol):
    """The interface of a pass: a frozen dataclass with its options as fields.

    ``name`` is a kebab-case verb, and ``after`` names the passes that must run first. ``error`` bounds the change of
    numbers. ``removes`` is the label of one removed node in the log, in the singular ("Dropout layer").
    """

    name: ClassVar[str]
    phase: ClassVar[Phase]
    after: ClassVar[tuple[str, ...]]
    error: ClassVar[ErrorClass]
    removes: ClassVar[str]

    def __call__(self, graph: Graph, operators: Mapping[str, Operator], /) -> None:
        """Change the graph in place. The revision of the graph shows whether anything changed.

        A pipeline calls the pass for each body of control flow as well, inner ones first, so a pass reads and changes
        the nodes of one graph only.
        """
        ...


@dataclass(slots=True)
class PassReport:
    """The result of one run of a pass."""

    name: str
    """The name of the pass."""
    removed: int
    """The number of nodes removed; negative if nodes were added."""
    removes: str
    """The label of one removed node in the log."""
    seconds: float
    """The run time."""
    changed: bool
    """Whether the revision of the graph increased."""


MAX_ROUNDS = 20
"""Maximum number of rounds before reporting passes that undo each other; real graphs settle in 2 to 4."""


@dataclass(frozen=True)
class Pipeline:
    """Passes in an order that respects ``after``, run in rounds until a round changes nothing."""

    passes: tuple[Pass, ...]
    operators: Mapping[str, Operator]
    """The operators of the registry, for passes that add nodes."""
    check_inputs: Sequence[torch.Tensor] | None = field(default=None)
    """If given, the graph runs on these inputs after each pass, and an error names the pass that changes numbers."""

    @classmethod
    def of(
        cls, passes: Mapping[str, Pass], operators: Mapping[str, Operator], phase: Phase, **options: Any
    ) -> Pipeline:
        """Return the pipeline of a phase. FUSE includes CLEAN, as passes for the stored graph also apply to its clone.

        Args:
            passes: passes by name; those of this phase and of earlier ones are used.
            operators: the operators of the registry.
            phase: the phase to run.
            options: further fields of the pipeline.

        Raises:
            PassError: the ``after`` constraints form a cycle.
        """
        return cls(sort_passes([p for p in passes.values() if p.phase <= phase]), operators, **options)

    def run(self, graph: Graph, report: Callable[[PassReport], None] | None = None) -> list[PassReport]:
        """Run all passes on a graph until none changes it; return a report of each run, and call ``report`` with each.

        Raises:
            PassError: a pass broke an invariant or changed numbers, or the passes do not settle.
        """
        reports: list[PassReport] = []
        settled: dict[str, int] = {}
        for _ in range(MAX_ROUNDS):
            before = graph.revision
            for p in self.passes:
                if settled.get(p.name) == graph.revision:
                    continue
                result = self._run_one(p, graph)
                settled[p.name] = graph.revision
                reports.append(result)
                if report is not None:
                    report(result)
            if graph.revision == before:
                return reports
        active = sorted({r.name for r in reports[-len(self.passes) :] if r.changed})
        raise PassError(
            f"the passes {active} still change the graph after {MAX_ROUNDS} rounds: each reverts changes of another. "
            "Remove one of them."
        )

    def _run_one(self, p: Pass, graph: Graph) -> PassReport:
        count, revision, start = _count_nodes(graph), graph.revision, time.perf_counter()
        expected = None if self.check_inputs is None else _run_seeded(graph, self.check_inputs)
        for part in list(walk_graphs(graph)):
            p(part, self.operators)
        seconds = time.perf_counter() - start
        changed = graph.revision != revision
        if changed:
            try:
                verify(graph)
            except PassError as error:
                error.add_note(f"after the pass {p.name}")
                raise
        if changed and expected is not None and self.check_inputs is not None:
            check_outputs(p, expected, _run_seeded(graph, self.check_inputs))
        return PassReport(p.name, count - _count_nodes(graph), p.removes, seconds, changed)


def _count_nodes(graph: Graph) -> int:
    return sum(map(len, walk_graphs(graph)))


def _run_seeded(graph: Graph, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a graph with a fixed seed and contiguous results: rounding depends on the layout, which a pass may change."""
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.default_generator.manual_seed(0)
        outputs, state = interpret(graph, inputs, lambda _, results: tuple(r.contiguous() for r in results))
    return [t.detach() for t in (*outputs, *state.values())]


MAX_REASSOCIATION_ROUNDINGS = 256
"""Maximum change by an inexact pass, in roundings of the largest element.

A reassociation changes a result by a few roundings, which later layers amplify. The worst of 254 architectures had 47
between eager and a runtime, which reassociates more than any pass.
"""


def check_outputs(p: Pass, expected: Sequence[torch.Tensor], actual: Sequence[torch.Tensor]) -> None:
    """Check that ``actual`` outputs match ``expected``, one tensor for each output, within the error class of ``p``.

    Raises:
        PassError: they differ.
    """
    for index, (e, a) in enumerate(zip(expected, actual, strict=True)):
        largest = float(e.double().nan_to_num(0.0, 0.0, 0.0).abs().max()) if e.numel() else 0.0
        rounds = p.error.kind != "exact" and e.dtype.is_floating_point
        slack = MAX_REASSOCIATION_ROUNDINGS * largest * torch.finfo(e.dtype).eps if rounds else 0.0
        try:
            torch.testing.assert_close(a, e, rtol=0.0, atol=slack, equal_nan=True)
        except AssertionError as error:
            raise PassError(
                f"pass {p.name}: it declares the error class {p.error}, but changed output {index}: {error}"
            ) from error


def sort_passes(passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """Sort passes so that each follows the passes in its ``after``; ties are sorted by name.

    Raises:
        PassError: the constraints form a cycle.
    """
    waiting = {p.name: p for p in sorted(passes, key=lambda p: p.name)}
    result: list[Pass] = []
    while waiting:
        ready = next((p for p in waiting.values() if not any(a in waiting for a in p.after)), None)
        if ready is None:
            requirements = "; ".join(f"{p.name} after {', '.join(p.after)}" for p in waiting.values())
            raise PassError(
                f"cannot order the passes {', '.join(waiting)}: they form a cycle ({requirements}). Remove one `after`."
            )
        result.append(waiting.pop(ready.name))
    return tuple(result)
