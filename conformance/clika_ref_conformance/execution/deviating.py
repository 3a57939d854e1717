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
from clika_ref_conformance.cases import Run
from clika_ref_conformance.deviations import KINDS, Deviation, replica_of
from clika_ref_conformance.judging.judge import Reference
from clika_ref_conformance.verdicts import Comparison, Verdict

Tensors = Sequence[torch.Tensor]
Alter = Callable[[Node, tuple[Any, ...], dict[str, Any], tuple[torch.Tensor, ...]], Tensors]
"""Function that returns the node's new results, given the node, its arguments and eager's results."""

FILLS = (1.0, 3.5)
"""Two values for free elements, to find the results that depend on them."""

UNLIKELY_FILLS = (-2.5, math.nan)
"""Two more fill values, invalid in some graphs.

The first is below usual comparison thresholds. NaN propagates even through a softmax over one element.
"""


@dataclass(frozen=True)
class Judgement:
    """Result of judging one run, with the identifiers of the deviations in it."""

    comparison: Comparison
    seen: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()
    """Deviations that could have been seen: they change the outputs of the graph."""


def judge_run(reference: Reference, run: Run, actual: Tensors, deviations: Sequence[Deviation]) -> Judgement:
    """Judge the results of a target for a run; if they fail, judge them again with the declared deviations.

    Each deviation is tried alone, and then all of them together. The first that makes the results correct is the
    verdict.
    """
    graph, found = reference.graph, reference.judge(actual)
    concerned = [d for d in deviations if d.concerns_run(run.name) and any(map(d.concerns, graph.nodes))]
    concerned = [d for d in concerned if not d.error]
    if not concerned:
        return Judgement(found)
    watched = tuple(d.id for d in concerned if _shows(graph, run, d))
    if not found.verdict.is_failure:
        return Judgement(found, (), watched)
    for group in [[d] for d in concerned] + [concerned] * (len(concerned) > 1):
        again = _judge_deviating(reference, run, actual, group)
        if again is not None and not again.verdict.is_failure:
            seen = tuple(d.id for d in group if d.id in watched)
            message = "; ".join(f"{d.id}: {d.reason}" for d in group)
            return Judgement(replace(again, verdict=Verdict.DEVIATION, message=message), seen, watched)
    return Judgement(found, (), watched)


def expected_error(
    graph: Graph, run: Run | None, error: BaseException, deviations: Sequence[Deviation]
) -> Deviation | None:
    """Return the deviation that declares an error of a graph, raised while compiling or in a run."""
    concerned = errors_expected(graph, run, deviations)
    return next((d for d in concerned if d.matches(error)), None)


def errors_expected(graph: Graph, run: Run | None, deviations: Sequence[Deviation]) -> list[Deviation]:
    """Return the deviations that allow a graph, or a run of it, to raise an error."""
    return [
        d
        for d in deviations
        if d.error and (run is None or d.concerns_run(run.name)) and any(map(d.concerns, graph.nodes))
    ]


def _judge_deviating(reference: Reference, run: Run, actual: Tensors, group: Sequence[Deviation]) -> Comparison | None:
    """Judge as if eager deviated; None if a later node of the graph rejects the changed values."""
    try:
        return _judged_by(reference, run, actual, group)
    except _Refused:
        return None


def _judged_by(reference: Reference, run: Run, actual: Tensors, group: Sequence[Deviation]) -> Comparison:
    fixed = [d for d in group if not d.free]
    changed = _deviating(reference.graph, [(d, _alteration(d)) for d in fixed])
    _outputs(changed, run)
    other = Reference(changed, run.inputs, seed=reference.seed, arithmetic=reference.arithmetic)
    free = [d for d in group if d.free]
    if free:
        actual = _with_free_elements_right(changed, run, actual, other.eager, free)
    return other.judge(actual)


def _with_free_elements_right(
    graph: Graph, run: Run, actual: Tensors, eager: Tensors, free: Sequence[Deviation]
) -> Tensors:
    """Replace elements of the output that depend on free elements by eager's.

    If all of them do, and the size of the output depends on the data, the output may also have another size.
    """

    def filled(fill: float) -> Tensors:
        return _outputs(_deviating(graph, [(d, _filling(d, fill)) for d in free]), run)

    variants = [filled(fill) for fill in FILLS]
    for fill in UNLIKELY_FILLS:
        with contextlib.suppress(_Refused):  # indices may be computed from free elements
            variants.append(filled(fill))
    result = list(actual)
    for index, (a, e) in enumerate(zip(actual, eager, strict=True)):
        others = [v[index] for v in variants]
        if a.dtype != e.dtype or any(o.shape != e.shape for o in others):
            continue
        depends = functools.reduce(torch.logical_or, (_differs(o, e) for o in others))
        if a.shape == e.shape:
            result[index] = torch.where(depends, e, a)
        elif a.ndim == e.ndim and not graph.outputs[index].type.is_static and bool(depends.all()):
            result[index] = e
    return result


def _shows(graph: Graph, run: Run, deviation: Deviation) -> bool:
    """Return whether a deviation changes the outputs of a graph."""
    alter = _filling(deviation, FILLS[0]) if deviation.free else _alteration(deviation)
    try:
        others = _outputs(_deviating(graph, [(deviation, alter)]), run)
    except _Refused:
        return False
    pairs = zip(_outputs(graph, run), others, strict=True)
    return any(a.shape != b.shape or a.dtype != b.dtype or bool(_differs(a, b).any()) for a, b in pairs)


def _outputs(graph: Graph, run: Run) -> Tensors:
    try:
        with torch.no_grad():
            return interpret(graph, [t.clone() for t in run.inputs])[0]
    except Exception as error:
        raise _Refused from error


class _Refused(Exception):  # noqa: N818 - control flow, not an error: a free index may be out of range
    pass


def _differs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compare element by element: NaN equals NaN, and zeros differ by their sign."""
    both_nan = a.isnan() & b.isnan()
    return ((a != b) | (a.signbit() != b.signbit())) & ~both_nan


def _deviating(graph: Graph, changes: Sequence[tuple[Deviation, Alter]]) -> Graph:
    """Return a clone with changed computations in the nodes that deviations concern."""
    clone = graph.clone()
    for node in clone.nodes:
        for deviation, alter in changes:
            if deviation.concerns(node):
                node.op = _altered(node, alter)
    return clone


def _altered(node: Node, alter: Alter) -> Operator:
    original = node.op
    op = object.__new__(type(original))  # `copy.copy` returns the operator itself, as operators are singletons
    op.__dict__.update(original.__dict__)

    @functools.wraps(original.reference)
    def reference(*operands: Any, **attrs: Any) -> Any:
        result = original(*operands, **attrs)
        results = (result,) if isinstance(result, torch.Tensor) else tuple(result)
        changed = tuple(alter(node, operands, attrs, results))
        return changed[0] if isinstance(result, torch.Tensor) else changed

    op.reference = reference
    return op


def _alteration(deviation: Deviation) -> Alter:
    if deviation.replica:
        replica = replica_of(deviation)

        def replicate(_: Node, operands: tuple[Any, ...], attrs: dict[str, Any], __: Tensors) -> Tensors:
            result = replica(*operands, **attrs)
            return (result,) if isinstance(result, torch.Tensor) else tuple(result)

        return replicate

    def substitute(node: Node, _: tuple[Any, ...], __: dict[str, Any], results: Tensors) -> Tensors:
        changed: list[torch.Tensor] = []
        for value, tensor in zip(node.outputs, results, strict=True):
            new = tensor
            for kind, name in deviation.replace.items() if value.type.dtype.is_floating_point else ():
                new = torch.where(_is_of(kind, tensor), _number(name, value.type.dtype), new).to(tensor.dtype)
            changed.append(new)
        return changed

    return substitute


def _filling(deviation: Deviation, fill: float) -> Alter:
    def put(_: Node, operands: tuple[Any, ...], __: dict[str, Any], results: Tensors) -> Tensors:
        operand_kinds = [kind.removeprefix("operand-") for kind in deviation.free if kind.startswith("operand-")]
        tensors = [t for t in operands if isinstance(t, torch.Tensor)]
        if any(bool(_is_of(kind, t).any()) for kind in operand_kinds for t in tensors):
            return [torch.full_like(t, _fitting(fill, t)) for t in results]
        found = [functools.reduce(torch.logical_or, (_is_of(k, t) for k in kinds), _nowhere(t)) for t in results]
        return [t.masked_fill(_of_shape(found, t), _fitting(fill, t)) for t in results]

    kinds = [kind for kind in deviation.free if kind in KINDS]
    return put


def _fitting(fill: float, tensor: torch.Tensor) -> float:
    return FILLS[0] if math.isnan(fill) and not tensor.is_floating_point() else fill


def _nowhere(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor, dtype=torch.bool)


def _of_shape(masks: Sequence[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Join the masks of outputs with the same shape: if a maximum is NaN, its index is free, too."""
    return functools.reduce(torch.logical_or, (m for m in masks if m.shape == tensor.shape))


def _is_of(kind: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return _nowhere(tensor)
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


def _number(name: str, dtype: torch.dtype) -> float:
    """Return a replacement element. The largest number is that of the declared dtype, also in a run in float64."""
    if name.endswith("max"):
        largest = torch.finfo(dtype).max
        return -largest if name.startswith("-") else largest
    return float(name)
