"""Check whether a target's result or error is exactly a deviation that it declares.

A deviation belongs to a node, but the judge compares outputs of a graph. So the graph is changed: the nodes that a
declaration concerns compute the declared result, and the outputs are judged again.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from clika_ref.core.execution import interpret
from clika_ref.core.ir import Graph, Node
from clika_ref.core.operators import Operator
from clika_ref_conformance.cases import CaseRun
from clika_ref_conformance.deviations import ELEMENT_KINDS, Deviation, import_replica
from clika_ref_conformance.eager_calls import as_list
from clika_ref_conformance.judging.judge import CaseReference
from clika_ref_conformance.verdicts import Comparison, Verdict

Tensors = Sequence[torch.Tensor]
NodeAlteration = Callable[[Node, tuple[Any, ...], dict[str, Any], tuple[torch.Tensor, ...]], Tensors]
"""Function that returns the node's new results, given the node, its arguments and eager's results."""

FREE_ELEMENT_FILLS = (1.0, 3.5)
"""Two values for free elements, to find the results that depend on them."""

UNUSUAL_FILLS = (-2.5, math.nan)
"""Two more fill values, invalid in some graphs.

The first is below usual comparison thresholds. NaN propagates even through a softmax over one element.
"""


@dataclass(frozen=True)
class Judgement:
    """Result of judging one run, with the identifiers of the deviations in it."""

    comparison: Comparison
    occurred: tuple[str, ...] = ()
    applicable: tuple[str, ...] = ()
    """Deviations that could have occurred: they change the outputs of the graph."""


def judge_run(reference: CaseReference, run: CaseRun, actual: Tensors, deviations: Sequence[Deviation]) -> Judgement:
    """Judge the results of a target for a run; if they fail, judge them again with the declared deviations.

    Each deviation is tried alone, and then all of them together. The first that makes the results correct is the
    verdict.
    """
    graph, found = reference.graph, reference.judge(actual)
    concerned = [d for d in deviations if d.concerns_run(run.name) and any(map(d.concerns, graph.nodes))]
    concerned = [d for d in concerned if not d.error]
    if not concerned:
        return Judgement(found)
    applicable = tuple(d.id for d in concerned if _changes_outputs(graph, run, d))
    if not found.verdict.is_failure:
        return Judgement(found, (), applicable)
    for group in [[d] for d in concerned] + [concerned] * (len(concerned) > 1):
        with contextlib.suppress(_RejectedValueError):  # by a later node of the graph
            again = _judge_deviating_graph(reference, run, actual, group)
            if not again.verdict.is_failure:
                occurred = tuple(d.id for d in group if d.id in applicable)
                message = "; ".join(f"{d.id}: {d.reason}" for d in group)
                return Judgement(replace(again, verdict=Verdict.DEVIATION, message=message), occurred, applicable)
    return Judgement(found, (), applicable)


def find_expected_error(
    graph: Graph, run: CaseRun | None, error: BaseException, deviations: Sequence[Deviation]
) -> Deviation | None:
    """Return the deviation that declares an error of a graph, raised while compiling or in a run."""
    concerned = find_error_deviations(graph, run, deviations)
    return next((d for d in concerned if d.matches(error)), None)


def find_error_deviations(graph: Graph, run: CaseRun | None, deviations: Sequence[Deviation]) -> list[Deviation]:
    """Return the deviations that allow a graph, or a run of it, to raise an error."""
    return [
        d
        for d in deviations
        if d.error and (run is None or d.concerns_run(run.name)) and any(map(d.concerns, graph.nodes))
    ]


def _judge_deviating_graph(
    reference: CaseReference, run: CaseRun, actual: Tensors, group: Sequence[Deviation]
) -> Comparison:
    """Judge as if eager deviated.

    Raises:
        _RejectedValueError: a later node of the graph rejects the changed values.
    """
    fixed = [d for d in group if not d.free]
    changed = _make_deviating_graph(reference.graph, [(d, _make_alteration(d)) for d in fixed])
    _run_graph(changed, run)
    other = CaseReference(changed, run.inputs, seed=reference.seed, arithmetic=reference.arithmetic)
    free = [d for d in group if d.free]
    if free:
        actual = _replace_free_elements(changed, run, actual, other.eager, free)
    return other.judge(actual)


def _replace_free_elements(
    graph: Graph, run: CaseRun, actual: Tensors, eager: Tensors, free: Sequence[Deviation]
) -> Tensors:
    """Replace elements of the output that depend on free elements by eager's.

    If all of them do, and the size of the output depends on the data, the output may also have another size.
    """

    def fill_outputs(fill: float) -> Tensors:
        return _run_graph(_make_deviating_graph(graph, [(d, _make_filling(d, fill)) for d in free]), run)

    variants = [fill_outputs(fill) for fill in FREE_ELEMENT_FILLS]
    for fill in UNUSUAL_FILLS:
        with contextlib.suppress(_RejectedValueError):  # indices may be computed from free elements
            variants.append(fill_outputs(fill))
    result = list(actual)
    for index, (a, e) in enumerate(zip(actual, eager, strict=True)):
        others = [v[index] for v in variants]
        if a.dtype != e.dtype or any(o.shape != e.shape for o in others):
            continue
        depends = functools.reduce(torch.logical_or, (_find_differing_elements(o, e) for o in others))
        if a.shape == e.shape:
            result[index] = torch.where(depends, e, a)
        elif a.ndim == e.ndim and not graph.outputs[index].type.is_static and bool(depends.all()):
            result[index] = e
    return result


def _changes_outputs(graph: Graph, run: CaseRun, deviation: Deviation) -> bool:
    """Return whether a deviation changes the outputs of a graph."""
    alter = _make_filling(deviation, FREE_ELEMENT_FILLS[0]) if deviation.free else _make_alteration(deviation)
    try:
        others = _run_graph(_make_deviating_graph(graph, [(deviation, alter)]), run)
    except _RejectedValueError:
        return False
    pairs = zip(_run_graph(graph, run), others, strict=True)
    return any(a.shape != b.shape or a.dtype != b.dtype or bool(_find_differing_elements(a, b).any()) for a, b in pairs)


def _run_graph(graph: Graph, run: CaseRun) -> Tensors:
    try:
        with torch.no_grad():
            return interpret(graph, [t.clone() for t in run.inputs])[0]
    except Exception as error:
        raise _RejectedValueError from error


class _RejectedValueError(Exception):
    pass


def _find_differing_elements(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compare element by element: NaN equals NaN, and zeros differ by their sign."""
    both_nan = a.isnan() & b.isnan()
    return ((a != b) | (a.signbit() != b.signbit())) & ~both_nan


def _make_deviating_graph(graph: Graph, changes: Sequence[tuple[Deviation, NodeAlteration]]) -> Graph:
    """Return a clone with changed computations in the nodes that deviations concern."""
    clone = graph.clone()
    for node in clone.nodes:
        for deviation, alter in changes:
            if deviation.concerns(node):
                node.op = _alter_operator(node, alter)
    return clone


def _alter_operator(node: Node, alter: NodeAlteration) -> Operator:
    original = node.op
    op = object.__new__(type(original))  # `copy.copy` returns the operator itself, as operators are singletons
    op.__dict__.update(original.__dict__)

    @functools.wraps(original.reference)
    def reference(*operands: Any, **attrs: Any) -> Any:
        result = original(*operands, **attrs)
        changed = tuple(alter(node, operands, attrs, tuple(as_list(result))))
        return changed[0] if isinstance(result, torch.Tensor) else changed

    op.reference = reference
    return op


def _make_alteration(deviation: Deviation) -> NodeAlteration:
    if deviation.replica:
        replica = import_replica(deviation)

        def replicate(_: Node, operands: tuple[Any, ...], attrs: dict[str, Any], __: Tensors) -> Tensors:
            return as_list(replica(*operands, **attrs))

        return replicate

    def substitute(node: Node, _: tuple[Any, ...], __: dict[str, Any], results: Tensors) -> Tensors:
        changed: list[torch.Tensor] = []
        for value, tensor in zip(node.outputs, results, strict=True):
            new = tensor
            for kind, name in deviation.replace.items() if value.type.dtype.is_floating_point else ():
                new = torch.where(_make_mask(kind, tensor), _parse_substitute(name, value.type.dtype), new).to(
                    tensor.dtype
                )
            changed.append(new)
        return changed

    return substitute


def _make_filling(deviation: Deviation, fill: float) -> NodeAlteration:
    def put(_: Node, operands: tuple[Any, ...], __: dict[str, Any], results: Tensors) -> Tensors:
        operand_kinds = [kind.removeprefix("operand-") for kind in deviation.free if kind.startswith("operand-")]
        tensors = [t for t in operands if isinstance(t, torch.Tensor)]
        if any(bool(_make_mask(kind, t).any()) for kind in operand_kinds for t in tensors):
            return [torch.full_like(t, _make_valid_fill(fill, t)) for t in results]
        found = [
            functools.reduce(torch.logical_or, (_make_mask(k, t) for k in kinds), _make_empty_mask(t)) for t in results
        ]
        # Masks of outputs with the same shape are joined: if a maximum is NaN, its index is free, too.
        joined = [functools.reduce(torch.logical_or, (m for m in found if m.shape == t.shape)) for t in results]
        return [t.masked_fill(m, _make_valid_fill(fill, t)) for t, m in zip(results, joined, strict=True)]

    kinds = [kind for kind in deviation.free if kind in ELEMENT_KINDS]
    return put


def _make_valid_fill(fill: float, tensor: torch.Tensor) -> float:
    return FREE_ELEMENT_FILLS[0] if math.isnan(fill) and not tensor.is_floating_point() else fill


def _make_empty_mask(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor, dtype=torch.bool)


def _make_mask(kind: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return _make_empty_mask(tensor)
    is_zero = tensor == 0
    match kind:
        case "nan":
            return tensor.isnan()
        case "0":
            return is_zero & ~tensor.signbit()
        case "-0":
            return is_zero & tensor.signbit()
        case "subnormal":
            return ~is_zero & (tensor.abs() < torch.finfo(tensor.dtype).tiny)
        case _:
            return tensor == float(kind)


def _parse_substitute(name: str, dtype: torch.dtype) -> float:
    """Return a replacement element. The largest number is that of the declared dtype, also in a run in float64."""
    if name.endswith("max"):
        largest = torch.finfo(dtype).max
        return -largest if name.startswith("-") else largest
    return float(name)
