"""Time every stage on one traced graph, in its own process."""

from __future__ import annotations

import gc
import json
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch

from benchmarks.traces import trace_graph
from clika_ref.capture.program import ProgramImporter, TracedGraph
from clika_ref.capture.traced_calls import TracedCalls
from clika_ref.core.execution import interpret
from clika_ref.core.fx_execution import compile_with_fx, to_fx
from clika_ref.core.invariants import verify
from clika_ref.core.ir import Graph
from clika_ref.core.operators import Operator
from clika_ref.core.passes import Pass, Phase, Pipeline
from clika_ref.core.registry import Registry, load_registry
from clika_ref.onnx_export.emission import emit
from clika_ref.onnx_export.writing import write_model
from clika_ref.serialization.graph_format import graph_from_json, graph_to_json


class Stopwatch:
    """Processor seconds by the name of a stage, so that other programs on the machine do not count."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, call: Callable[[], Any]) -> Any:
        """Time a call and return its result."""
        gc.collect()
        gc.disable()  # otherwise one stage pays for the garbage of the others
        start = time.process_time()
        result = call()
        self.seconds[name] = time.process_time() - start
        gc.enable()
        return result


def main(size: str) -> dict[str, float]:
    """Return the seconds of each stage on a graph of ``size`` calls."""
    warnings.simplefilter("ignore")
    registry = load_registry()
    _run_stages(registry, 100, Stopwatch())  # warm up imports and caches
    watch = Stopwatch()
    _run_stages(registry, int(size), watch)
    return watch.seconds


def _run_stages(registry: Registry, size: int, watch: Stopwatch) -> None:
    program, calls = trace_graph(size)
    traced = watch("import", lambda: _import_graph(program, calls, registry))
    graph: Graph = traced.graph
    watch("verify", lambda: verify(graph))
    _run_passes(graph, registry, Phase.CLEAN, watch)
    _convert(graph, registry, watch)
    lowered = watch("clone", graph.clone)
    _run_passes(lowered, registry, Phase.FUSE, watch)
    lowered.drop_unused_constants()
    model = watch("emit", lambda: emit(lowered))
    with TemporaryDirectory() as folder:
        watch("write", lambda: write_model(model, Path(folder) / "model.onnx"))


def _import_graph(program: Any, calls: TracedCalls, registry: Registry) -> TracedGraph:
    log: list[str] = []
    return ProgramImporter(
        program, calls, registry, name="model", fallback=lambda _: None, detail=log.append
    ).import_graph()


def _run_passes(graph: Graph, registry: Registry, phase: Phase, watch: Stopwatch) -> None:
    seconds_by_pass: dict[str, float] = {}
    timed = {name: cast("Pass", _TimedPass(p, seconds_by_pass)) for name, p in registry.passes.items()}
    watch(f"all passes, {phase.name}", lambda: Pipeline.of(timed, registry.operators, phase).run(graph))
    watch.seconds.update({f"  {name}, {phase.name}": seconds for name, seconds in seconds_by_pass.items()})


class _TimedPass:
    """A pass that adds its processor seconds to a table."""

    def __init__(self, wrapped: Pass, seconds: dict[str, float]) -> None:
        self._wrapped = wrapped
        self._seconds = seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def __call__(self, graph: Graph, operators: Mapping[str, Operator]) -> None:
        start = time.process_time()
        self._wrapped(graph, operators)
        seconds = time.process_time() - start
        self._seconds[self._wrapped.name] = self._seconds.get(self._wrapped.name, 0.0) + seconds


def _convert(graph: Graph, registry: Registry, watch: Stopwatch) -> None:
    watch("print", lambda: str(graph))
    watch("to FX", lambda: to_fx(graph))
    watch("to FX and compiled", lambda: compile_with_fx(graph))
    document = watch("to JSON", lambda: json.loads(json.dumps(graph_to_json(graph))))
    tensors = {name: value.data for name, value in graph.constants.items() if value.data is not None}
    watch("from JSON", lambda: graph_from_json(document, registry.operators.get, tensors))
    with torch.no_grad():
        watch("interpret", lambda: interpret(graph, [torch.ones(3, 4, 4, 4)]))
