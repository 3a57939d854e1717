"""Capture a model and its tracing inputs as a graph: compare, trace, import, and check against eager on every input."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from clika_ref.capture.attribute_snapshot import unset_attributes
from clika_ref.capture.callables import TracedCallable
from clika_ref.capture.caught_errors import CaughtError, ErrorRecorder, record_eager_errors, record_trace_errors
from clika_ref.capture.dimensions import choose_tracing_inputs, count_elements
from clika_ref.capture.eager import preserve_module, run_eager
from clika_ref.capture.gradients import find_custom_gradients, find_lost_hooks, record_gradient_queries
from clika_ref.capture.importer import OperatorFallback
from clika_ref.capture.inputs import ModelCall
from clika_ref.capture.line_sampling import find_slow_line, sample_lines
from clika_ref.capture.messages import ControlFlowError, MismatchError, explain_failures
from clika_ref.capture.program import import_program
from clika_ref.capture.reachable_modules import record_unowned_modules
from clika_ref.capture.signature import Signature
from clika_ref.capture.state import WrittenAttributesError, hold_as_buffers, trace_assignments_as_writes
from clika_ref.capture.symbols import drop_derived_symbols
from clika_ref.capture.traced_calls import TracedCalls, flatten_calls
from clika_ref.capture.tracers import Tracer, select_tracers, trace
from clika_ref.capture.validation import Validation, select_reusable_results
from clika_ref.core.ir import Graph
from clika_ref.core.registry import Registry


@dataclass
class CaptureResult:
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
    results: list[list[torch.Tensor]] = field(default_factory=list)
    """The outputs of the graph for each tracing call, as eager computed them; empty if they cannot be reused."""


_CAPTURE_LOCK = threading.RLock()
"""Serializes captures. Reentrant, as a model may call code that compiles another model."""


@contextlib.contextmanager
def _hold_capture_lock() -> Iterator[None]:
    """Hold the capture lock: a trace patches functions of PyTorch that all threads call."""
    with _CAPTURE_LOCK:
        yield


@_hold_capture_lock()
def capture(
    callee: TracedCallable,
    calls: Sequence[ModelCall],
    registry: Registry,
    *,
    fallback: OperatorFallback = lambda _: None,
    dynamic: bool = True,
    name: str | None = None,
    detail: Callable[[str], None] = lambda _: None,
    progress: Callable[[str], None] = lambda _: None,
) -> CaptureResult:
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
    with contextlib.ExitStack() as buffers:
        traced, warnings, asked = _run_eager(callee, calls, buffers, dynamic=dynamic, detail=detail)
        failures: list[tuple[str, Exception]] = []
        for leaves, tracer, recording in _iterate_attempts(traced):
            progress(f"tracing with {tracer.name}")
            try:
                with sample_lines(f"tracing with {tracer.name}", progress) as lines, registry.enter_tracing():
                    program = _trace(traced, tracer, leaves, recording=recording)
            except Exception as error:  # noqa: BLE001 - a tracer may raise anything; all reasons are reported
                failures.append((tracer.name, error))
                continue
            progress("importing the traced calls")
            try:
                result = import_program(
                    program, traced, registry, name=name or callee.name, fallback=fallback, detail=detail
                )
                notes = Validation(traced, result, leaves).run()
            except MismatchError as error:
                failures.append((tracer.name, error))
                if isinstance(error, ControlFlowError):
                    raise explain_failures(callee, traced.comparison, failures, asked) from error
                continue
            detail(f"Traced by {tracer.name}")
            drop_derived_symbols(result.graph)
            slow = find_slow_line(lines)
            notes += [f"Tracing was slow, mostly at {slow}"] if slow else []
            calls_made, kept = traced.comparison.calls, select_reusable_results(traced.expected, result)
            return CaptureResult(result.graph, result.signature, tracer.name, calls_made, notes, warnings, slow, kept)
        raise explain_failures(callee, traced.comparison, failures, asked)


def _iterate_attempts(traced: TracedCalls) -> Iterator[tuple[list[Any], Tracer, bool]]:
    """Yield the attempts to trace: the leaves of a call, a tracer, and whether to record gradients.

    Attempts that record gradients come first in any mode, because a trace under no_grad hides the model's own no_grad
    regions. If the model is compiled under no_grad, attempts without gradients follow: the model may branch on the
    mode, or write to tensors that require gradients.
    """
    for recording in (True,) if torch.is_grad_enabled() else (True, False):
        for leaves in choose_tracing_inputs(traced.comparison):
            for tracer in select_tracers(bool(traced.comparison.sizes)):
                yield leaves, tracer, recording


def _run_eager(
    callee: TracedCallable,
    calls: Sequence[ModelCall],
    buffers: contextlib.ExitStack,
    *,
    dynamic: bool,
    detail: Callable[[str], None],
) -> tuple[TracedCalls, list[str], list[str]]:
    """Flatten the calls and run eager on them; collect warnings about lost behavior, and reads of gradient state.

    Tensors in plain attributes that forward writes to become buffers until ``buffers`` is closed.
    """
    try:
        with record_unowned_modules(callee.module, callee.name) as strange, record_gradient_queries() as asked:
            traced = flatten_calls(callee, calls, dynamic=dynamic)
    except WrittenAttributesError as error:
        detail(f"Handling as buffers, as forward writes to them: {', '.join(error.names)}")
        buffers.enter_context(hold_as_buffers(callee.module, error.names))
        return _run_eager(callee, calls, buffers, dynamic=dynamic, detail=detail)
    if any(run.is_rerun for run in traced.expected):
        detail("Ran forward twice on inputs: once to find its writes, and once for the results under autocast")
    smallest = min(calls, key=lambda call: count_elements(pytree.tree_leaves((call.args, call.kwargs))))
    lost = [*find_custom_gradients(callee, smallest), *find_lost_hooks(callee), *asked.queries, *asked.hooks]
    put_by = {run.unfit: None for run in traced.expected if run.unfit}
    unkept = [
        (f"forward assigns {unfit}, which the compiled module does not keep: each call computes it again.")
        for unfit in put_by
    ]
    return traced, [*callee.warnings, *strange, *lost, *unkept], list(asked.queries)


def _trace(traced: TracedCalls, tracer: Tracer, leaves: list[Any], *, recording: bool) -> torch.export.ExportedProgram:
    call = traced.rebuild(leaves)
    assigned = trace_assignments_as_writes(traced.callee.module, traced.written)
    snapshot = preserve_module(traced.callee, outside=True)  # a tracer may run the real model
    mode = torch.set_grad_enabled(recording)
    with snapshot, traced.traceable_callee.as_module() as module, assigned, record_trace_errors() as raised, mode:
        unset_attributes(traced.callee.module, traced.cache_names)  # an earlier call may have filled a cache
        program = trace(tracer, module, call.copy(), traced.dynamic_shapes())
    _reject_caught_errors(raised, traced.callee, call)
    return program


def _reject_caught_errors(raised: ErrorRecorder, callee: TracedCallable, call: ModelCall) -> None:
    """Reject a trace if the model caught an error that it does not catch in eager: it took another branch."""
    caught = raised.describe_caught()
    if caught:
        with record_eager_errors() as usual:
            run_eager(callee, call)
        unusual = [text for key, text in caught.items() if key not in usual.describe_caught()]
        if unusual:
            raise CaughtError(unusual[0])
