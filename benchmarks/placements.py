"""Brute force over placements: time whole plans with each operator between layers switched, and with other layers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from benchmarks.islands import ISLAND_CHOICES, ISLANDS, TABLES
from benchmarks.measuring import Names, format_verdict, median_ratio, run_in_turn
from benchmarks.ptq.subjects import SUBJECTS
from clika_ref import ClikaCompileOptions, QuantizationSettings, clika_compile
from clika_ref.compiled.latency import take_one_sample
from clika_ref.compiled.lowering import quantize_for_target
from clika_ref.compiled.runners import compile_temporarily
from clika_ref.compiled.state import bind_graph
from clika_ref.compress.calibration_pass import prepare_calibration
from clika_ref.compress.graph_quantization import calibrate_graph, decide_quantization
from clika_ref.core.artifacts import Runner
from clika_ref.core.ir import Graph
from clika_ref.core.registry import Registry, load_registry
from clika_ref.core.targets import Target
from clika_ref.export.speed import use_threads
from clika_ref.quantization.decision import ratio_in_decibels
from clika_ref.quantization.qdq.insertion import Plan
from clika_ref.quantization.request import QuantizationRequest
from clika_ref.reporting.log import CompilationLog
from clika_ref.reporting.tables import print_table

NETWORKS = ("lite0", "o-net", "yolo-like")

DEFAULT_PLACEMENT = "as measured"
DEFAULT_LAYERS, CHOSEN = "default", "optimize_for='latency'"

LAYER_CHOICES: Mapping[str, tuple[QuantizationSettings, ClikaCompileOptions]] = {
    DEFAULT_LAYERS: (QuantizationSettings(), ClikaCompileOptions()),
    "all layers": (QuantizationSettings(automatic_skip_quantization=False), ClikaCompileOptions()),
    "no mixed precision": (QuantizationSettings(), ClikaCompileOptions(mixed_precision="off")),
}
"""Settings that choose other layers, by name."""

LATENCY_OPTIONS = ClikaCompileOptions(optimize_for="latency")

ROUNDS, SECONDS_PER_TURN = 15, 0.05

MAX_RATIO_TO_FASTEST = 1.03


@dataclass(frozen=True)
class PlacementCandidate:
    """A plan for a target with some operators between layers in INT8."""

    islands: str
    layers: str
    plan: Plan
    decibels: float
    """SQNR on held-out samples, as simulated."""
    target: Target


def run(names: Names = None, runtime: str = "") -> None:
    """Time every placement of some networks in INT8, and compare the fastest with the default and the chosen one."""
    registry = load_registry()
    for name in names or NETWORKS:
        for one in (runtime,) if runtime else TABLES:
            _compare_placements(name, one, registry)


def _compare_placements(name: str, runtime: str, registry: Registry) -> None:
    subject = SUBJECTS[name]()
    data = subject.calibration()
    examples = [{key: x[:1] for key, x in data[0].items()}, *data[:2]]
    module = clika_compile(subject.make(), tracing_inputs=examples)
    graph = bind_graph(module)
    batches = [[batch[value.name] for value in graph.inputs] for batch in data]
    targets = make_island_targets(registry.targets[runtime], graph)
    candidates = [
        PlacementCandidate(islands, layers, *_decide(graph, batches, target, layers, registry), target)
        for islands, target in targets.items()
        for layers in (*LAYER_CHOICES, *([CHOSEN] if islands == DEFAULT_PLACEMENT else []))
    ]
    ratios = _time_candidates(graph, take_one_sample(graph, batches[0]), candidates, registry)
    found = sorted(zip(ratios, candidates, strict=True), key=lambda pair: pair[0])
    print_table(
        ("operators between layers", "layers", "INT8 / float", "SQNR"),
        [(each.islands, each.layers, f"{ratio:.2f}x", f"{each.decibels:.1f} dB") for ratio, each in found],
        title=f"{name} in {runtime}, one sample, one thread, in turn",
    )
    for layers in (DEFAULT_LAYERS, CHOSEN):
        own = next(r for r, c in found if (c.islands, c.layers) == (DEFAULT_PLACEMENT, layers))
        verdict = format_verdict(own / min(ratios), MAX_RATIO_TO_FASTEST)
        print(f"{name} in {runtime}: {layers} to the fastest placement: {verdict}")


def make_island_targets(target: Target, graph: Graph) -> dict[str, Target]:
    """Return a target as measured, and with each operator of a graph switched, by what was switched."""
    choose = ISLAND_CHOICES[target.name]
    full, present = choose(target, frozenset()), {node.op_type for node in graph.nodes}
    names = dict.fromkeys(name.partition(",")[0] for name in ISLANDS)
    operators = [op for op in names if op in present and choose(target, frozenset({op})).scheme != full.scheme]
    assert target.scheme is not None
    slow = frozenset(op for op in operators if op not in target.scheme.elementwise | target.scheme.data_movement)
    switched = {
        f"{op} in {'INT8' if op in slow else 'float'}": choose(target, slow ^ frozenset({op})) for op in operators
    }
    return {DEFAULT_PLACEMENT: target, **switched, "all in float": choose(target, frozenset(operators))}


def _decide(
    graph: Graph, batches: Sequence[Sequence[Tensor]], target: Target, layers: str, registry: Registry
) -> tuple[Plan, float]:
    """Calibrate a graph for a target, and decide which layers to quantize; return the plan and its SQNR in dB."""
    settings, options = LAYER_CHOICES.get(layers, (QuantizationSettings(), LATENCY_OPTIONS))
    request = QuantizationRequest(target, settings, {}, options)
    with CompilationLog.open(None) as log:
        calibration = prepare_calibration(graph, request, registry)
        stages = calibrate_graph(calibration, batches, request, registry, log, model=graph)
        plan = decide_quantization(stages, graph, request, registry, log).plan
    return plan, ratio_in_decibels(1.0, stages.evaluation.error(plan))


def _time_candidates(
    graph: Graph, inputs: Sequence[Tensor], candidates: Sequence[PlacementCandidate], registry: Registry
) -> list[float]:
    """Return the median ratio of the time of each candidate to float, on one thread."""
    with ExitStack() as stack:
        stack.enter_context(use_threads(1))

        def load(plan: Plan | None, target: Target) -> Runner:
            written = quantize_for_target(graph, plan, target, registry)
            return target.load(stack.enter_context(compile_temporarily(written, target)))

        runners = [load(None, candidates[0].target), *(load(each.plan, each.target) for each in candidates)]
        turns = {str(number): partial(_time_turn, runner, inputs) for number, runner in enumerate(runners)}
        run_in_turn(turns, 1)  # warm up
        in_float, *others = run_in_turn(turns, ROUNDS).values()
    return [median_ratio(times, in_float) for times in others]


def _time_turn(runner: Runner, inputs: Sequence[Tensor]) -> float:
    """Return the seconds of a call, from as many as fill a turn."""
    calls, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < SECONDS_PER_TURN:
        runner(inputs)
        calls += 1
    return spent / max(calls, 1)
