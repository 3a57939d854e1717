"""Capture a model and its tracing inputs as a graph: compare, trace, import, and check against eager on every input."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from clika_ref.capture.callables import Callee
from clika_ref.capture.catching import CaughtError, Raised, eager_errors, traced_errors
from clika_ref.capture.dimensions import element_count, tracing_choices
from clika_ref.capture.eager import run_eager, unchanged
from clika_ref.capture.examples import TracedCalls, take_apart
from clika_ref.capture.gradients import asked_for_gradients, custom_gradients, lost_hooks
from clika_ref.capture.importer import Fallback
from clika_ref.capture.inputs import ModelCall
from clika_ref.capture.messages import MismatchError, PathError, explain_failures
from clika_ref.capture.ownership import strangers
from clika_ref.capture.program import ProgramImporter
from clika_ref.capture.state import assignments_as_writes
from clika_ref.capture.symbols import drop_derived
from clika_ref.capture.tracers import Tracer, applicable, trace
from clika_ref.capture.validation import Validation
from clika_ref.capture.watching import costly_line, watched
from clika_ref.core.ir import Graph
from clika_ref.core.registry import Registry
from clika_ref.signature import Signature


@dataclass
class Captured:
    """The result of a capture: the graph, its signature, the tracer that succeeded, and notes and warnings."""

    graph: Graph
    signature: Signature
    """How a call of the model maps to inputs of the graph."""
    tracer: str
    calls: list[list[Any]]
    """The leaves of every tracing call."""
    notes: list[str] = field(default_factory=list)
    """Lines for the full log."""
    warnings: list[str] = field(default_factory=list)
    """Properties of the model that the graph does not keep."""
    slow_line: str | None = None
    """The slowest line of the model in a long trace."""


_LOCK = threading.RLock()
"""Serializes captures. Reentrant, as a model may call code that compiles another model."""


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hold the capture lock: a trace patches functions of PyTorch that all threads call."""
    with _LOCK:
        yield


@_alone()
def capture(
    callee: Callee,
    calls: Sequence[ModelCall],
    registry: Registry,
    *,
    fallback: Fallback = lambda _: None,
    dynamic: bool = True,
    name: str | None = None,
    detail: Callable[[str], None] = lambda _: None,
    progress: Callable[[str], None] = lambda _: None,
) -> Captured:
    """Trace a model into a graph that serves all the given calls.

    Args:
        callee: the model to trace.
        calls: the tracing inputs; dims that differ among them become dynamic.
        registry: the declared operators.
        fallback: finds operators for undeclared ATen calls.
        dynamic: whether to allow dynamic dims.
        name: the name of the graph.
        detail: receives each line of the full log.
        progress: receives the current step, for a progress display.

    Raises:
        ModelError: no tracer served all calls; the message contains the reason of every tracer.
    """
    traced, warnings, asked = _run_eager(callee, calls, dynamic=dynamic, detail=detail)
    failures: list[tuple[str, Exception]] = []
    for leaves, tracer, recording in _ways(traced):
        progress(f"tracing with {tracer.name}")
        try:
            with watched(f"tracing with {tracer.name}", progress) as lines:
                program = _trace(traced, tracer, leaves, recording=recording)
        except Exception as error:  # noqa: BLE001 - a tracer may raise anything; all reasons are reported
            failures.append((tracer.name, error))
            continue
        progress("importing the traced calls")
        try:
            result = ProgramImporter(
                program, traced, registry, name=name or callee.name, fallback=fallback, detail=detail
            ).imported()
            notes = Validation(traced, result, leaves).run()
        except MismatchError as error:
            failures.append((tracer.name, error))
            if isinstance(error, PathError):
                raise explain_failures(callee, traced.comparison, failures, asked) from error
            continue
        detail(f"Traced by {tracer.name}")
        drop_derived(result.graph)
        slow = costly_line(lines)
        notes += [f"Tracing took long, most of it at {slow}"] if slow else []
        calls_made = traced.comparison.calls
        return Captured(result.graph, result.signature, tracer.name, calls_made, notes, warnings, slow)
    raise explain_failures(callee, traced.comparison, failures, asked)


def _ways(traced: TracedCalls) -> Iterator[tuple[list[Any], Tracer, bool]]:
    """Yield the attempts to trace: the leaves of a call, a tracer, and whether to record gradients.

    Attempts that record gradients come first in any mode, because a trace under no_grad hides the model's own no_grad
    regions. If the model is compiled under no_grad, attempts without gradients follow: the model may branch on the
    mode, or write to tensors that require gradients.
    """
    for recording in (True,) if torch.is_grad_enabled() else (True, False):
        for leaves in tracing_choices(traced.comparison):
            for tracer in applicable(bool(traced.comparison.lengths)):
                yield leaves, tracer, recording


def _run_eager(
    callee: Callee, calls: Sequence[ModelCall], *, dynamic: bool, detail: Callable[[str], None]
) -> tuple[TracedCalls, list[str], list[str]]:
    """Flatten the calls and run eager on them; collect warnings about lost behavior, and reads of gradient state."""
    with strangers(callee.module, callee.name) as strange, asked_for_gradients() as asked:
        traced = take_apart(callee, calls, dynamic=dynamic)
    if any(run.is_second for run in traced.expected):
        detail("Ran forward twice on inputs: once for what it writes to, and once for what autocast computes")
    least = min(calls, key=lambda call: element_count(pytree.tree_leaves((call.args, call.kwargs))))
    lost = [*custom_gradients(callee, least), *lost_hooks(callee), *asked.questions, *asked.hooks]
    put_by = {run.unfit: None for run in traced.expected if run.unfit}
    unkept = [
        f"forward binds {unfit}, which the compiled module does not keep: each call makes it anew" for unfit in put_by
    ]
    return traced, [*callee.warnings, *strange, *lost, *unkept], list(asked.questions)


def _trace(traced: TracedCalls, tracer: Tracer, leaves: list[Any], *, recording: bool) -> torch.export.ExportedProgram:
    call = traced.rebuild(leaves)
    assigned = assignments_as_writes(traced.callee.module, traced.written)
    kept = unchanged(traced.callee, outside=True)  # a tracer may run the real model
    mode = torch.set_grad_enabled(recording)
    with kept, traced.traceable.as_module() as module, assigned, traced_errors() as raised, mode:
        program = trace(tracer, module, call.copy(), traced.dynamic_shapes())
    _require_none_caught(raised, traced.callee, call)
    return program


def _require_none_caught(raised: Raised, callee: Callee, call: ModelCall) -> None:
    """Reject a trace if the model caught an error that it does not catch in eager: it took another branch."""
    caught = raised.caught()
    if caught:
        with eager_errors() as usual:
            run_eager(callee, call)
        unusual = [text for key, text in caught.items() if key not in usual.caught()]
        if unusual:
            raise CaughtError(unusual[0])
