"""Capture a model and its tracing inputs as a graph: compare, trace, import, and check against eager on every input."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from clika_ref.capture.attribute_snapshot import unset_attributes
from clika_ref.capture.branch_conversion.conversion import BranchConversion, find_conversion_error
from clika_ref.capture.callables import TracedCallable
from clika_ref.capture.caught_errors import CaughtError, ErrorRecorder, record_eager_errors, record_trace_errors
from clika_ref.capture.derivatives import CompositeRecordedError
from clika_ref.capture.dimensions import InputDim, choose_tracing_inputs, count_elements
from clika_ref.capture.eager import find_fast_path_difference, preserve_module, run_eager
from clika_ref.capture.gradients import find_custom_gradients, find_lost_hooks, record_gradient_queries
from clika_ref.capture.hit_rows import RowAssumptions, watch_hit_rows
from clika_ref.capture.importer import OperatorFallback
from clika_ref.capture.inputs import ModelCall
from clika_ref.capture.line_times import LineTimes
from clika_ref.capture.loops.branch_merging import (
    find_untraced_branch,
    merge_branch,
    merge_branches,
    only_moves_more,
)
from clika_ref.capture.loops.loop_capture import capture_loops, find_fixed_lengths, find_unrolled_line
from clika_ref.capture.messages import (
    LOOP_STRUCTURE_ADVICE,
    SKIPPED_ROWS_ADVICE,
    ControlFlowError,
    FixedSizeError,
    MismatchError,
    explain_failures,
)
from clika_ref.capture.program import TracedGraph, import_program
from clika_ref.capture.random_inputs import UNSAFE_ON_OTHER_INPUTS
from clika_ref.capture.reachable_modules import record_unowned_modules
from clika_ref.capture.signature import Signature
from clika_ref.capture.size_tensors import trace_size_tensors
from clika_ref.capture.state import WrittenAttributesError, hold_as_buffers, trace_assignments_as_writes
from clika_ref.capture.symbols import drop_derived_symbols
from clika_ref.capture.traced_calls import TracedCalls, flatten_calls
from clika_ref.capture.tracers import Tracer, select_tracers, trace
from clika_ref.capture.validation import Validation, select_reusable_results
from clika_ref.core.ir import Graph, walk
from clika_ref.core.registry import Registry
from clika_ref.torch_internals.trees import pytree


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
    convert_branches: bool = False,
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
        convert_branches: whether to convert branches on the values of tensors.
        detail: receives each line of the full log.
        progress: receives the current step, for a progress display.

    Raises:
        ModelError: no tracer served all calls; the message contains the reason of every tracer.
    """
    conversion = BranchConversion(callee) if convert_branches else None
    importing = _Importing(registry, name or callee.name, fallback, detail, progress)
    with contextlib.ExitStack() as buffers:
        with contextlib.nullcontext() if conversion is None else conversion.record_branches():
            traced, warnings, asked = _run_eager(callee, calls, buffers, dynamic=dynamic, detail=detail)
        while True:
            failures: list[tuple[str, Exception]] = []
            if conversion is not None:
                conversion.check(traced)
            result = _try_tracers(traced, importing, conversion, failures, asked)
            if result is not None:
                result.warnings = [*warnings, *result.warnings]
                return result
            errors = [error for _, error in failures]
            if conversion is None or not conversion.add_failing_functions(errors):
                unconverted = None if conversion is None else conversion.explain_failures(errors)
                raise explain_failures(callee, traced.comparison, failures, asked, unconverted)


@dataclass(frozen=True)
class _Importing:
    """How to import traced programs, and where to report."""

    registry: Registry
    name: str
    fallback: OperatorFallback
    detail: Callable[[str], None]
    progress: Callable[[str], None]

    def run(self, program: torch.export.ExportedProgram, traced: TracedCalls) -> TracedGraph:
        """Return a traced program as a graph."""
        return import_program(
            program, traced, self.registry, name=self.name, fallback=self.fallback, detail=self.detail
        )


def _try_tracers(
    traced: TracedCalls,
    importing: _Importing,
    conversion: BranchConversion | None,
    failures: list[tuple[str, Exception]],
    asked: list[str],
) -> CaptureResult | None:
    """Return the capture of the first tracer that serves all calls; None if none does, with the error of each."""
    progress, detail, registry = importing.progress, importing.detail, importing.registry
    fixed: set[tuple[int, bool]] = set()
    for leaves, tracer, recording in _iterate_attempts(traced, conversion):
        if tracer.runs_code and (id(leaves), recording) in fixed:
            continue  # it runs the same code, which fixes the same size
        task = f"tracing with {tracer.name}"
        attempt = _Attempt(traced, tracer, recording, conversion, importing, LineTimes(task, progress))
        progress(task)
        try:
            with registry.enter_tracing():
                program = attempt.trace(leaves)
        except Exception as error:  # a tracer may raise anything; all reasons are reported
            rejection = find_conversion_error(error)
            if rejection is not None:
                raise rejection from error
            failures.append((tracer.name, error))
            continue
        progress("importing the traced calls")
        try:
            result, notes = attempt.serve_all_calls(importing.run(program, traced), leaves)
            attempt.require_skipped_rows(result, leaves)
        except MismatchError as error:
            failures.append((tracer.name, attempt.name_skipped_rows(error)))
            if isinstance(error, FixedSizeError):
                fixed.add((id(leaves), recording))
            if isinstance(error, ControlFlowError):
                raise explain_failures(traced.callee, traced.comparison, failures, asked) from error
            continue
        detail(f"Traced by {tracer.name}")
        drop_derived_symbols(result.graph)
        slow = attempt.times.find_slow_line()
        notes += [f"Tracing was slow, mostly at {slow}"] if slow else []
        warnings = [] if conversion is None else conversion.list_unreached()
        notes += [] if conversion is None else conversion.describe()
        calls_made, kept = traced.comparison.calls, select_reusable_results(traced.expected, result)
        return CaptureResult(result.graph, result.signature, tracer.name, calls_made, notes, warnings, slow, kept)
    return None


@dataclass(frozen=True)
class _Attempt:
    """One way to trace the model."""

    traced: TracedCalls
    tracer: Tracer
    recording: bool
    conversion: BranchConversion | None
    importing: _Importing
    times: LineTimes
    rows: RowAssumptions = field(default_factory=RowAssumptions)

    def trace(self, leaves: list[Any], static: Collection[InputDim] = ()) -> torch.export.ExportedProgram:
        """Trace the model with the leaves of a call, and with some dims static."""
        traced = self.traced.with_static_dims(static)
        try:
            return self._run_tracer(traced, leaves)
        except CompositeRecordedError:
            return self._run_tracer(traced, leaves, decompose_composites=True)

    def _run_tracer(
        self, traced: TracedCalls, leaves: list[Any], *, decompose_composites: bool = False
    ) -> torch.export.ExportedProgram:
        call = traced.rebuild(leaves)
        assigned = trace_assignments_as_writes(traced.callee.module, traced.written)
        snapshot = preserve_module(traced.callee, outside=True)  # a tracer may run the real model
        mode = torch.set_grad_enabled(self.recording)
        with snapshot, traced.traceable_callee.as_module() as module, assigned, record_trace_errors() as raised, mode:
            unset_attributes(traced.callee.module, traced.cache_names)  # an earlier call may have filled a cache
            with contextlib.ExitStack() as stack:
                if self.tracer.runs_code:
                    stack.enter_context(trace_size_tensors(traced.callee.module, traced.written))
                    stack.enter_context(self.rows.record(with_conditions=self.conversion is None))
                if self.conversion is not None:
                    stack.enter_context(self.conversion.install())
                    stack.enter_context(self.conversion.watch_rejections(raised))
                program = trace(
                    self.tracer,
                    module,
                    call.copy(),
                    traced.dynamic_shapes(),
                    reach=self.times.reach,
                    decompose_composites=decompose_composites,
                )
        _reject_caught_errors(raised, traced.callee, call)
        return program

    def serve_all_calls(self, result: TracedGraph, leaves: list[Any]) -> tuple[TracedGraph, list[str]]:
        """Return a graph that serves all tracing inputs, and notes for the log.

        Loops over positions are rolled, and branches that compute the same are merged.

        Raises:
            MismatchError: there is none.
        """
        comparison, registry, progress = self.traced.comparison, self.importing.registry, self.importing.progress
        lengths = find_fixed_lengths(comparison, result.graph, leaves)
        if lengths:
            progress("rolling loops")
            rolled = capture_loops(comparison, leaves, lengths, self._trace_again, registry.operators)
            if rolled is not None:
                notes = Validation(self.traced, rolled.result, rolled.leaves).run()
                rolled.require_other_length()
                traced_at = [f"{pair.first} and {pair.second}" for pair in lengths]
                return rolled.result, [*notes, f"Rolled loops over positions, traced at lengths {', '.join(traced_at)}"]
        try:
            notes = Validation(self.traced, result, leaves).run()
            return self._include_untraced_branches(result, leaves, notes)
        except ControlFlowError as error:
            progress("comparing branches")
            try:
                merged = merge_branches(comparison, result, leaves, self._trace_again, registry)
            except MismatchError:
                merged = None
            if merged is None:
                raise error from None
            return merged[0], Validation(self.traced, *merged).run()
        except MismatchError as error:
            line = find_unrolled_line(result.graph, lengths, leaves)
            if not line:
                raise
            raise type(error)(f"{error}. {LOOP_STRUCTURE_ADVICE.format(line=line)}") from error

    def _include_untraced_branches(
        self, result: TracedGraph, leaves: list[Any], notes: list[str]
    ) -> tuple[TracedGraph, list[str]]:
        """Return a validated graph that also serves branches that no tracing input takes, if they compute the same."""
        if any(node.op_type in UNSAFE_ON_OTHER_INPUTS for node in walk(result.graph)):
            return result, notes
        for group in self.traced.comparison.groups:
            other = find_untraced_branch(self.traced.comparison, group, result, leaves)
            if other is None or not self._may_compute_the_same(result, leaves, other):
                continue
            self.importing.progress("comparing branches")
            with contextlib.suppress(MismatchError):
                merged = merge_branch(result, leaves, other, self._trace_again, self.importing.registry)
                if merged is not None:
                    notes = Validation(self.traced, *merged).run()
                    result, leaves = merged
        return result, notes

    def require_skipped_rows(self, result: TracedGraph, leaves: list[Any]) -> None:
        """Check that code that the model skips for experts without rows changes nothing for them.

        Raises:
            MismatchError: it does, or no run of eager skips it.
        """
        rows, traced = self.rows, self.traced
        if not rows.lines:
            return
        validation = Validation(traced, result, leaves)
        with watch_hit_rows(rows):
            for call, expected in zip(traced.comparison.calls, traced.expected, strict=True):
                if rows.conditions:
                    validation.find_disagreement(call, expected)
                if rows.lengths:
                    run_eager(traced.callee, traced.rebuild(call))
            agrees = not rows.list_unproven(validation.empty_lines) or validation.agrees_at_size_one()
        unproven = rows.list_unproven(validation.empty_lines)
        if not agrees or unproven:
            raise MismatchError(SKIPPED_ROWS_ADVICE.format(line=", ".join(unproven or rows.lines)))

    def name_skipped_rows(self, error: MismatchError) -> MismatchError:
        """Return an error about a graph that disagrees with eager, with the lines that the model skips."""
        shown = SKIPPED_ROWS_ADVICE.format(line=", ".join(self.rows.lines))
        return error if not self.rows.lines or shown in str(error) else type(error)(f"{error}. Perhaps {shown}")

    def _may_compute_the_same(self, result: TracedGraph, leaves: list[Any], other: list[Any]) -> bool:
        """Whether the branch of other inputs may be merged, before it is traced, which takes as long as the first."""

        def run(given: list[Any]) -> None:
            run_eager(self.traced.callee, self.traced.rebuild(given))

        return Validation(self.traced, result, leaves).agrees_on(other) or only_moves_more(run, leaves, other)

    def _trace_again(self, leaves: list[Any], static: Collection[InputDim] = ()) -> TracedGraph:
        """Trace and import the model at other sizes, and with some dims static.

        Raises:
            MismatchError: the tracer failed.
        """
        try:
            with self.importing.registry.enter_tracing():
                program = self.trace(leaves, static)
        except Exception as error:
            raise MismatchError(f"tracing at other sizes failed: {error}") from error
        return self.importing.run(program, self.traced)


def _iterate_attempts(
    traced: TracedCalls, conversion: BranchConversion | None
) -> Iterator[tuple[list[Any], Tracer, bool]]:
    """Yield the attempts to trace: the leaves of a call, a tracer, and whether to record gradients.

    Attempts that record gradients come first in any mode, because a trace under no_grad hides the model's own no_grad
    regions. If the model is compiled under no_grad, attempts without gradients follow: the model may branch on the
    mode, or write to tensors that require gradients.
    """
    is_rewritten = conversion is not None and not conversion.is_empty
    for recording in (True,) if torch.is_grad_enabled() else (True, False):
        for leaves in choose_tracing_inputs(traced.comparison):
            for tracer in select_tracers(bool(traced.comparison.sizes)):
                if tracer.runs_code or not is_rewritten:
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
    sizes = [count_elements(pytree.tree_leaves((call.args, call.kwargs))) for call in calls]
    smallest, run = calls[sizes.index(min(sizes))], traced.expected[sizes.index(min(sizes))]
    lost = [*find_custom_gradients(callee, smallest), *find_lost_hooks(callee), *asked.queries, *asked.hooks]
    lost += find_fast_path_difference(callee, smallest, run)
    put_by = {run.unfit: None for run in traced.expected if run.unfit}
    unkept = [
        (f"forward assigns {unfit}, which the compiled module does not keep: each call computes it again.")
        for unfit in put_by
    ]
    return traced, [*callee.warnings, *strange, *lost, *unkept], list(asked.queries)


def _reject_caught_errors(raised: ErrorRecorder, callee: TracedCallable, call: ModelCall) -> None:
    """Reject a trace if the model caught an error that it does not catch in eager: it took another branch."""
    caught = raised.describe_caught()
    if caught:
        with record_eager_errors() as usual:
            run_eager(callee, call)
        unusual = [text for key, text in caught.items() if key not in usual.describe_caught()]
        if unusual:
            raise CaughtError(unusual[0])
