"""Run a model with its pieces, and record them: the graphs, the weights and the inputs of each."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from clika_ref.capture.callables import TracedCallable
from clika_ref.capture.eager import preserve_module
from clika_ref.capture.inputs import ModelCall
from clika_ref.core.errors import ModelError
from clika_ref.partial_graphs.breaks import Break
from clika_ref.partial_graphs.dynamic_sizes import DynamicSizes
from clika_ref.partial_graphs.dynamo import (
    compile_with_breaks,
    record_breaks,
    trace_library_forward,
)
from clika_ref.partial_graphs.pieces import DynamoGraph, Piece, PieceTable, run_in_eager
from clika_ref.partial_graphs.tensor_reads import list_reads

LIBRARY_PACKAGE = "torch.nn."
"""Dynamo compiles modules of this package as a part of other code, but not where Python calls them."""


class PieceRunner:
    """Runs a model with its pieces: the callable that Dynamo compiled.

    Args:
        callee: the model.
        table: its pieces.
        sizes: what is dynamic.
        library_modules: paths of the library modules that Python calls, each a piece of its own.
    """

    def __init__(
        self, callee: TracedCallable, table: PieceTable, sizes: DynamicSizes, library_modules: Iterable[str]
    ) -> None:
        self.table = table
        self.sizes = sizes
        self.library_modules = tuple(library_modules)
        self._run = compile_with_breaks(callee.module if callee.is_forward else callee.function, table.backend, sizes)
        found = {path: callee.module.get_submodule(path) for path in self.library_modules}
        self._forwards = [(module, trace_library_forward(module, path)) for path, module in found.items()]
        table.sizes, sizes.is_closed = sizes, table.is_closed
        self._lock, self._running = threading.Lock(), 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model.

        Raises:
            ModelError: a function needs too many graphs.
        """
        if not self._forwards:
            return self._run(*args, **kwargs)
        with self._compile_library_modules():
            return self._run(*args, **kwargs)

    def close(self) -> None:
        """Allow no further pieces: all tracing inputs have run."""
        self.table.is_closed = self.sizes.is_closed = True

    @contextlib.contextmanager
    def _compile_library_modules(self) -> Iterator[None]:
        """Have Dynamo compile the library modules that Python calls, until the last of concurrent calls ends."""
        with self._lock:
            self._running += 1
            if self._running == 1:
                for module, forward in self._forwards:
                    module.__dict__["forward"] = forward
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    for module, _ in self._forwards:
                        del module.__dict__["forward"]


@dataclass
class Recording:
    """The recorded pieces of a model."""

    runner: PieceRunner
    graphs: dict[Piece, tuple[DynamoGraph, Sequence[Any]]] = field(
        default_factory=dict[Piece, tuple[DynamoGraph, Sequence[Any]]]
    )
    """The graph of each piece, and the values of its first call."""
    breaks: list[Break] = field(default_factory=list[Break])


def record_pieces(callee: TracedCallable, calls: Sequence[ModelCall], *, dynamic: bool = True) -> Recording:
    """Run a model on its tracing inputs, first to find what differs between them, then to record its pieces.

    Args:
        callee: the model.
        calls: the tracing inputs.
        dynamic: whether sizes may be dynamic.

    Raises:
        ModelError: a function needs too many graphs.
        Exception: the model raises it in eager.
    """
    try:
        return _record_with(callee, calls, is_one_special=False, dynamic=dynamic)
    except ModelError:
        raise
    except Exception:  # noqa: BLE001 - if the model itself fails, it does so again
        return _record_with(callee, calls, is_one_special=True, dynamic=dynamic)


def _record_with(
    callee: TracedCallable, calls: Sequence[ModelCall], *, is_one_special: bool, dynamic: bool
) -> Recording:
    first = _find_sizes(callee, calls, (), is_one_special=is_one_special)
    library = find_uncovered_library_modules(callee.module, first.pieces)
    if library:
        first = _find_sizes(callee, calls, library, is_one_special=is_one_special)
    sizes = DynamicSizes(first.found.sources if dynamic else {}, is_one_special)
    recording = Recording(PieceRunner(callee, PieceTable(callee.module), sizes, library))

    def record(piece: Piece, graph: DynamoGraph, values: Sequence[Any]) -> Any:
        recording.graphs.setdefault(piece, (graph, values))
        piece.record(graph.inputs_of(values), graph.dynamic_dims)
        return run_in_eager(piece, graph, values)

    recording.runner.table.run = record
    with preserve_module(callee), record_breaks() as recording.breaks:
        _run_calls(recording.runner, calls)
    recording.runner.close()
    _add_reads(recording, callee, calls)
    return recording


def _add_reads(recording: Recording, callee: TracedCallable, calls: Sequence[ModelCall]) -> None:
    """Add the breaks in functions that run in Python, which Dynamo does not reach."""
    skipped = [found for found in recording.breaks if found.is_skipped]
    if skipped:
        with preserve_module(callee):
            reads = list_reads(lambda: _run_calls(callee.function, calls), skipped)
        known = {(found.file, found.line) for found in recording.breaks}
        recording.breaks += [found for found in reads if (found.file, found.line) not in known]


def _find_sizes(
    callee: TracedCallable, calls: Sequence[ModelCall], library: Sequence[str], *, is_one_special: bool
) -> PieceTable:
    """Return a table with the dynamic sizes and numbers of all graphs: what Dynamo found to differ between calls."""
    sizes = DynamicSizes(is_one_special=is_one_special, is_complete=False)
    runner = PieceRunner(callee, PieceTable(callee.module), sizes, library)

    def observe(piece: Piece, graph: DynamoGraph, values: Sequence[Any]) -> Any:
        for name, value in graph.numbers_of(values).items():
            sizes.observe_number(graph.position, name, value)
        return run_in_eager(piece, graph, values)

    runner.table.run = observe
    with preserve_module(callee):
        for index, call in enumerate(calls):
            sizes.is_first_call = index == 0
            _run_calls(runner, [call])
    for position, names in sizes.list_sources().items():
        runner.table.found.add(position, names)
    return runner.table


def _run_calls(run: Callable[..., Any], calls: Iterable[ModelCall]) -> None:
    for call in calls:
        own = call.copy()
        run(*own.args, **own.kwargs)


def find_uncovered_library_modules(model: torch.nn.Module, pieces: Iterable[Piece]) -> list[str]:
    """Return the paths of library modules with weights that no piece uses: Python calls them, if anything does.

    Outer modules are returned in place of their parts.
    """
    used = {name for piece in pieces for name in piece.key.weights}
    found: list[str] = []
    for path, module in model.named_modules():
        own = {f"{path}.{name}" for name, _ in [*module.named_parameters(), *module.named_buffers()]}
        is_library = type(module).__module__.startswith(LIBRARY_PACKAGE) and not isinstance(
            module, torch.nn.ModuleList | torch.nn.ModuleDict
        )
        is_inside = any(path.startswith(f"{outer}.") for outer in found)
        is_wrapped = "forward" in module.__dict__  # as by accelerate
        if path and is_library and not is_wrapped and own and own.isdisjoint(used) and not is_inside:
            found.append(path)
    return found
