"""Time every stage of clika-ref on one traced graph, in its own process: ``python -m benchmarks.stages 10000``."""

from __future__ import annotations

import gc
import json
import sys
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
from clika_ref.core.execution import interpret, to_fx
from clika_ref.core.fx_execution import compile_with_fx
from clika_ref.core.invariants import verify
from clika_ref.core.ir import Graph
from clika_ref.core.operators import Operator
from clika_ref.core.passes import Pass, Phase, Pipeline
from clika_ref.core.registry import Registry, load_registry
from clika_ref.onnx_export.emission import emit
from clika_ref.onnx_export.writing import write_model
from clika_ref.serialization.graph_format import graph_from_json, graph_to_json


class Stopwatch:
    """Processor seconds by the name of a stage, so that other programs do not count."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, call: Callable[[], Any]) -> Any:
        """Time a call and return its result."""
        gc.collect()
        gc.disable()  # its searches through all that other stages left would count for whichever stage they fall into
        start = time.process_time()
        result = call()
        self.seconds[name] = time.process_time() - start
        gc.enable()
        return result


def main(size: int) -> dict[str, float]:
    """Run one graph of that size through the pipeline."""
    warnings.simplefilter("ignore")
    registry = load_registry()
    _stages(registry, 100, Stopwatch())  # what is imported or cached on first use belongs to no size
    watch = Stopwatch()
    _stages(registry, size, watch)
    return watch.seconds


def _stages(registry: Registry, size: int, watch: Stopwatch) -> None:
    program, calls = trace_graph(size)
    traced = watch("import", lambda: _import_graph(program, calls, registry))
    graph: Graph = traced.graph
    watch("verify", lambda: verify(graph))
    _passes(graph, registry, Phase.CLEAN, watch)
    _forms(graph, registry, watch)
    lowered = watch("clone", graph.clone)
    _passes(lowered, registry, Phase.FUSE, watch)
    lowered.drop_unused_constants()
    model = watch("emit", lambda: emit(lowered))
    with TemporaryDirectory() as folder:
        watch("write", lambda: write_model(model, Path(folder) / "model.onnx"))


def _import_graph(program: Any, calls: TracedCalls, registry: Registry) -> TracedGraph:
    log: list[str] = []
    return ProgramImporter(
        program, calls, registry, name="model", fallback=lambda _: None, detail=log.append
    ).import_graph()


def _passes(graph: Graph, registry: Registry, phase: Phase, watch: Stopwatch) -> None:
    parts: dict[str, float] = {}
    timed = {name: cast("Pass", _Timed(p, parts)) for name, p in registry.passes.items()}
    watch(f"all passes, {phase.name}", lambda: Pipeline.of(timed, registry.operators, phase).run(graph))
    watch.seconds.update({f"  {name}, {phase.name}": seconds for name, seconds in parts.items()})


class _Timed:
    """A pass that adds its processor seconds to a table."""

    def __init__(self, timed: Pass, seconds: dict[str, float]) -> None:
        self._timed = timed
        self._seconds = seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._timed, name)

    def __call__(self, graph: Graph, operators: Mapping[str, Operator]) -> None:
        start = time.process_time()
        self._timed(graph, operators)
        self._seconds[self._timed.name] = self._seconds.get(self._timed.name, 0.0) + time.process_time() - start


def _forms(graph: Graph, registry: Registry, watch: Stopwatch) -> None:
    watch("print", lambda: str(graph))
    watch("to FX", lambda: to_fx(graph))
    watch("to FX and compiled", lambda: compile_with_fx(graph))
    document = watch("to JSON", lambda: json.loads(json.dumps(graph_to_json(graph))))
    tensors = {name: value.data for name, value in graph.constants.items() if value.data is not None}
    watch("from JSON", lambda: graph_from_json(document, registry.operators.get, tensors))
    with torch.no_grad():
        watch("interpret", lambda: interpret(graph, [torch.ones(3, 4, 4, 4)]))


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
