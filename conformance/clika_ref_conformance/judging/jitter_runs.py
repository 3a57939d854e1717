"""Runs of a whole graph: one in float64 with every call and its bounds, and repetitions of it with errors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from clika_ref.core.arithmetic import Arithmetic
from clika_ref.core.execution import read_sizes
from clika_ref.core.ir import Graph, Node, Value
from clika_ref_conformance.eager_calls import as_list
from clika_ref_conformance.judging import exact_arithmetic, jitter, ties
from clika_ref_conformance.judging.expected_output import classify_special
from clika_ref_conformance.judging.formats import formats_of
from clika_ref_conformance.judging.jitter import JitterNoise, LocalBounds
from clika_ref_conformance.judging.rounding import ConcreteCall, is_float

Values = dict[Value, torch.Tensor]


@dataclass(slots=True)
class ExactRun:
    """Run in float64: every value and, for every node, its original call, its call in float64, and its bounds."""

    values: Values = field(default_factory=Values)
    given: dict[Node, ConcreteCall] = field(default_factory=dict[Node, ConcreteCall])
    wide: dict[Node, ConcreteCall] = field(default_factory=dict[Node, ConcreteCall])
    local: dict[Node, LocalBounds] = field(default_factory=dict[Node, LocalBounds])


def run_exactly(
    graph: Graph,
    inputs: Sequence[torch.Tensor],
    eager: Mapping[Value, torch.Tensor],
    noise: JitterNoise,
    *,
    nodes: Collection[Node] | None = None,
    arithmetic: Sequence[Arithmetic] = (),
) -> ExactRun:
    """Run a graph, or some of its nodes, in float64 and bound every node, for the declared arithmetic."""
    run = ExactRun()

    def compute(node: Node, call: ConcreteCall) -> list[torch.Tensor]:
        run.given[node] = call
        run.wide[node], results = exact_arithmetic.compute_exactly(node, call, eager)
        formats = formats_of(exact_arithmetic.coarsest_dtype_of(node), node.op.error.kind, arithmetic)
        run.local[node] = jitter.bound_call(run.wide[node], node.op.error, results, formats, noise)
        return results

    run.values = exact_arithmetic.evaluate_graph(graph, inputs, compute, wide=True, nodes=nodes)
    return run


def repeat_run(
    graph: Graph,
    inputs: Sequence[torch.Tensor],
    exact: ExactRun,
    eager: Mapping[Value, torch.Tensor],
    noise: JitterNoise,
) -> Iterator[Values]:
    """Yield repetitions of a run with a random error after every node that rounds, and with ties broken at random.

    ``noise`` is the one of the run.
    """
    generator = noise.generator
    if all(s.name in read_sizes(graph, inputs) for s in graph.symbols.values()):
        steps = _plan_steps(exact, noise)
        for run in range(noise.runs):
            yield exact.values | _repeat_once(steps, run, exact, eager, generator)
        return

    def compute(node: Node, call: ConcreteCall) -> list[torch.Tensor]:
        """Compute a node of a graph with sizes that depend on elements, and therefore on errors."""
        call = ties.break_ties(call, generator) if ties.has_open_ties(node) else call
        _, results = exact_arithmetic.compute_exactly(node, call, eager)
        pairs = zip(results, node.outputs, exact.local[node].bounds, strict=True)
        return [jitter.add_noise(r, b, generator) if r.shape == exact.values[v].shape else r for r, v, b in pairs]

    nodes = exact.local.keys()
    for _ in range(noise.runs):
        yield exact_arithmetic.evaluate_graph(graph, inputs, compute, wide=True, nodes=nodes)


@dataclass(frozen=True, slots=True)
class _RepeatedNode:
    """Node to repeat: operands that differ between runs, and the errors of each output in each run."""

    node: Node
    moved: tuple[int, ...]
    errors: tuple[torch.Tensor | None, ...]
    """Each of shape ``[runs, ...]``."""
    parts: tuple[tuple[torch.Tensor, torch.Tensor] | None, ...]
    """Per output: elements that another computation order makes special, ``bool[runs, ...]``, and their values."""
    casts: bool


def _plan_steps(exact: ExactRun, noise: JitterNoise) -> list[_RepeatedNode]:
    """Return the nodes that errors reach; the nodes before them are the same in every run."""
    reached: set[Value] = set()
    steps: list[_RepeatedNode] = []
    for node in exact.local:
        fixed = node.is_random or not any(isinstance(o, torch.Tensor) for o in exact.given[node].operands)
        moved = () if fixed else tuple(i for i, v in enumerate(node.inputs) if isinstance(v, Value) and v in reached)
        exactly = fixed or node.op.error.kind == "exact"
        errors = tuple(None if exactly else _draw_errors(b, noise) for b in exact.local[node].bounds)
        parts = tuple(_find_special_parts(exact.local[node], i, exact.values[v]) for i, v in enumerate(node.outputs))
        if moved or ties.has_open_ties(node) or any(n is not None for n in (*errors, *parts)):
            reached.update(node.outputs)
            casts = any(isinstance(a, torch.dtype) and a.is_floating_point for a in node.attrs.values())
            steps.append(_RepeatedNode(node, moved, errors, parts, casts))
    return steps


def _draw_errors(bound: torch.Tensor | None, noise: JitterNoise) -> torch.Tensor | None:
    if bound is None or not bound.numel():
        return None
    return jitter.draw_noise(bound.expand(noise.runs, *bound.shape), noise.generator)


def _find_special_parts(
    local: LocalBounds, index: int, result: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the elements where the parts of a node are special and the whole is not, or reversed, with their values.

    Both are correct: ``-inf * (x - mean)`` is an infinity, and NaN if computed as ``-inf * x + inf * mean``.
    """
    if not local.runs or not is_float(result):
        return None
    runs = torch.stack([run[index] for run in local.runs])
    apart = classify_special(runs) != classify_special(result)
    return (apart, runs) if bool(apart.any()) else None


def _repeat_once(
    steps: Sequence[_RepeatedNode],
    index: int,
    exact: ExactRun,
    eager: Mapping[Value, torch.Tensor],
    generator: torch.Generator,
) -> Values:
    values = Values()
    for step in steps:
        if step.moved or ties.has_open_ties(step.node):
            results = _recompute(step, values, exact, eager, generator)
        else:
            results = [exact.values[v] for v in step.node.outputs]
        for value, result, errors, parts in zip(step.node.outputs, results, step.errors, step.parts, strict=True):
            fits = errors is not None and result.shape == errors.shape[1:]
            values[value] = result + errors[index] if fits and errors is not None else result
            if parts is not None and result.shape == parts[0].shape[1:]:
                apart, special = parts
                values[value] = torch.where(apart[index], special[index], values[value])
    return values


def _recompute(
    step: _RepeatedNode,
    values: Values,
    exact: ExactRun,
    eager: Mapping[Value, torch.Tensor],
    generator: torch.Generator,
) -> list[torch.Tensor]:
    node = step.node
    call = exact.given[node] if step.casts else exact.wide[node]
    operands = list(call.operands)
    for position in step.moved:
        operands[position] = values[node.inputs[position]]
    call = ConcreteCall(call.name, call.function, tuple(operands), call.attrs)
    call = ties.break_ties(call, generator) if ties.has_open_ties(node) else call
    if not step.casts:
        try:
            return [r.double() if is_float(r) else r for r in as_list(call.function(*call.operands, **call.attrs))]
        except (RuntimeError, TypeError, ValueError):
            pass  # the reference does not support float64
    return exact_arithmetic.compute_exactly(node, call, eager)[1]
