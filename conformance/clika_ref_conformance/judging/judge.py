"""Judge a target's results by eager on the same inputs, exact arithmetic, and a bound between the two."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch

from clika_ref.core.arithmetic import Arithmetic
from clika_ref.core.execution import read_sizes
from clika_ref.core.ir import Graph, Node, Value
from clika_ref_conformance.judging import exact_arithmetic, jitter, statistics, ties
from clika_ref_conformance.judging.expected_output import ExpectedOutput, find_equal_elements
from clika_ref_conformance.judging.jitter_runs import ExactRun, Values, repeat_run, run_exactly
from clika_ref_conformance.judging.random_nodes import is_random_call
from clika_ref_conformance.judging.rounding import ConcreteCall, is_float
from clika_ref_conformance.judging.unrolled_loops import unroll_loops
from clika_ref_conformance.verdicts import Comparison, Reason, Verdict, sum_counts

CASTING_OPERATORS = frozenset({"to", "sum", "nansum", "prod", "cumsum", "cumprod"})
"""Operators with a ``dtype`` that is a plain cast and does not saturate."""


MIN_JITTER_RUNS = 3
"""Number of jittered runs that can prove a result correct: without steps, further runs can only widen a bound."""

MAX_AMBIGUOUS_SHARE = 0.05
"""Share of ambiguous elements above which a correct result is inconclusive."""


class CaseReference:
    """Expected results of a graph for one set of inputs, computed once and compared with any number of targets.

    Eager runs in the declared dtypes, and the graph in float64. A graph of one node is judged by the bound of its
    operator's error class. In a larger graph, the bound of every node becomes the size of a random error, and eight
    such runs show its effect on the results. Results declared in float64 have no wider reference: their bound, in units
    of float64, is around the same run, and is doubled. Loops are unrolled first.

    Args:
        graph: graph that was compiled.
        inputs: one tensor for each input of the graph, in order; they are copied.
        seed: seed of the random errors.
        trusts_eager: whether a result equal to eager's passes, whatever its distance from the exact result. Then exact
            arithmetic is needed only if a target returns another result.
        arithmetic: formats of the target's arithmetic, if it declares others than the dtypes.
    """

    def __init__(
        self,
        graph: Graph,
        inputs: Sequence[torch.Tensor],
        *,
        seed: int = 0,
        trusts_eager: bool = False,
        arithmetic: Sequence[Arithmetic] = (),
    ) -> None:
        self.graph = graph = unroll_loops(graph)
        self.inputs = [t.clone() for t in inputs]
        self.seed = seed
        self.trusts_eager = trusts_eager
        self.arithmetic = tuple(arithmetic)
        with torch.no_grad():
            self._eager = exact_arithmetic.evaluate_graph(
                graph, self.inputs, exact_arithmetic.compute_eagerly, wide=False
            )

    @property
    def eager(self) -> list[torch.Tensor]:
        """Results of eager."""
        return [self._eager[v] for v in self.graph.outputs]

    @cached_property
    def expected(self) -> list[ExpectedOutput]:
        """Expected values of each output."""
        return self._compute_expected(self.graph.outputs)

    def _compute_expected(
        self, outputs: Sequence[Value], actual: Mapping[Value, torch.Tensor] | None = None
    ) -> list[ExpectedOutput]:
        """Return the expected values of outputs, from few runs if these already prove ``actual`` correct."""
        if actual is not None:
            found = self._expect_from_runs(outputs, MIN_JITTER_RUNS)
            if all(e.is_clearly_right(actual[v]) for e, v in zip(found, outputs, strict=True)):
                return found
        return self._expect_from_runs(outputs, jitter.JITTER_RUNS)

    def _expect_from_runs(self, outputs: Sequence[Value], count: int) -> list[ExpectedOutput]:
        """Return the expected values of outputs, from so many jittered runs."""
        with torch.no_grad(), exact_arithmetic.use_float64_by_default():
            noise = jitter.JitterNoise(torch.Generator().manual_seed(self.seed), count)
            same, drawn = self._classify_values()
            needed = [v for v in outputs if v not in same and v not in drawn]
            exact, runs = ExactRun(), list[Values]()
            if needed:
                nodes = exact_arithmetic.find_dependencies(self.graph, needed)
                exact = run_exactly(
                    self.graph, self.inputs, self._eager, noise, nodes=nodes, arithmetic=self.arithmetic
                )
            if needed and len(self.graph) > 1:
                runs = list(repeat_run(self.graph, self.inputs, exact, self._eager, noise))
            return [self._expect(v, exact, runs, same=v in same, random=v in drawn) for v in outputs]

    def judge(self, actual: Sequence[torch.Tensor]) -> Comparison:
        """Compare the outputs of a target with eager and with exact arithmetic, within the bound."""
        problem = self._describe_structure_mismatch(actual)
        if problem:
            return Comparison(Verdict.STRUCTURE, problem)
        with torch.no_grad():
            if not self.trusts_eager:
                return combine_comparisons([self._judge_output(i, actual, e) for i, e in enumerate(self.expected)])
            pairs = zip(actual, self.eager, strict=True)
            others = [i for i, (a, e) in enumerate(pairs) if not bool(find_equal_elements(a, e).all())]
            if not others:
                return Comparison(Verdict.PASS, quality=1.0, elements=sum(t.numel() for t in actual))
            outputs = [self.graph.outputs[i] for i in others]
            expected = self._compute_expected(outputs, {v: actual[i] for v, i in zip(outputs, others, strict=True)})
            found = [self._judge_output(i, actual, e) for i, e in zip(others, expected, strict=True)]
            alike = sum(t.numel() for i, t in enumerate(actual) if i not in others)
            return combine_comparisons([*found, Comparison(Verdict.PASS, quality=1.0, elements=alike)])

    def _describe_structure_mismatch(self, actual: Sequence[torch.Tensor]) -> str:
        eager = self.eager
        if len(actual) != len(eager):
            return f"{len(actual)} outputs instead of {len(eager)}"
        for index, (e, a) in enumerate(zip(eager, actual, strict=True)):
            if not isinstance(a, torch.Tensor):
                return f"output {index} is a {type(a).__name__}, not a tensor"
            if e.dtype != a.dtype or e.shape != a.shape:
                return f"output {index} is {_format_type(a)} instead of {_format_type(e)}"
        return ""

    def _classify_values(self) -> tuple[set[Value], set[Value]]:
        """Return the values without any rounding, and the values that are random or undefined."""
        same = {*self.graph.inputs, *self.graph.constants.values()}
        drawn: set[Value] = set()
        sizes = read_sizes(self.graph, self.inputs)
        for node in self.graph.nodes:
            operands = [v for v in node.inputs if isinstance(v, Value)]
            fixed = node.op.error.kind == "exact" and same.issuperset(operands)
            if node.is_random and fixed and not is_random_call(node, self._eager, sizes):
                same.update(node.outputs)
            elif node.is_random or not drawn.isdisjoint(operands) or self._is_undefined(node, operands):
                drawn.update(node.outputs)
            elif fixed and not (ties.has_open_ties(node) and len(self.graph) > 1):
                same.update(node.outputs)
        return same, drawn

    def _is_undefined(self, node: Node, operands: Sequence[Value]) -> bool:
        """Return whether a node casts values outside the range of an integer dtype: the result is undefined in C++.

        A saturating operator (`quantize`) defines the result for every value except NaN.
        """
        dtype = node.attrs.get("dtype")
        if not isinstance(dtype, torch.dtype) or dtype.is_floating_point or dtype in (torch.bool, torch.complex64):
            return False
        floats = [self._eager[v].double() for v in operands if is_float(self._eager[v])]
        if node.op.name not in CASTING_OPERATORS:
            return any(bool(t.isnan().any()) for t in floats)
        limits = torch.iinfo(dtype)
        return not all(bool(((t > float(limits.min) - 1) & (t < float(limits.max) + 1)).all()) for t in floats)

    def _expect(self, value: Value, exact: ExactRun, runs: list[Values], *, same: bool, random: bool) -> ExpectedOutput:
        eager = self._eager[value]
        if same or random:
            bound = torch.zeros(eager.shape, dtype=torch.float64) if is_float(eager) else None
            return ExpectedOutput(eager, eager, bound, same=True, random=random, label="exact")
        node, centre = value.producer, exact.values[value]
        assert node is not None, "an input is exact"
        if centre.shape != eager.shape:  # a size depends on an ambiguous element
            return ExpectedOutput(eager, eager, None, same=True, random=True)
        if runs:
            varied = [run[value] for run in runs if run[value].shape == eager.shape]
            bound, alone = None, exact.local[node].bounds[value.index]
            if alone is not None:  # an infinite bound of the node stays infinite in a graph
                bound = jitter.bound_from_runs(centre, varied, eager.dtype).where(~alone.isposinf(), math.inf)
            found = ExpectedOutput(eager, centre, bound, varied, label="jitter")
        else:
            local = exact.local[node]
            varied = [run[value.index] for run in local.runs]
            bound, one = local.bounds[value.index], local.dot_statistics[value.index] if local.dot_statistics else None
            found = ExpectedOutput(eager, centre, bound, varied, dot_statistics=one, label=str(node.op.error))
        if found.bound is not None:
            found.bound, found.jumps = jitter.detect_jumps(centre, varied, found.bound, eager.dtype)
            found.bound = 2 * found.bound if eager.dtype is torch.float64 else found.bound
        return found

    def _judge_output(self, index: int, actual: Sequence[torch.Tensor], expected: ExpectedOutput) -> Comparison:
        tensor = actual[index].detach()
        if expected.random:
            if self._has_unexpected_nan(expected.eager, tensor):
                message = f"output {index} contains NaN, which eager never draws from finite inputs"
                return Comparison(Verdict.SPECIAL, message, elements=tensor.numel())
            return Comparison(Verdict.PASS, elements=tensor.numel())
        right = expected.accepts(tensor)
        if not bool(right.all()):
            right |= self._accept_tied_indices(index, actual)
        return _compare_output(index, expected, tensor, right, self.inputs)

    def _has_unexpected_nan(self, eager: torch.Tensor, actual: torch.Tensor) -> bool:
        """Return whether a single random call returned NaN for finite inputs.

        In a larger graph, NaN may occur by chance, as in ``0 / 0``.
        """
        if len(self.graph) > 1 or not actual.is_floating_point() or not bool(actual.isnan().any()):
            return False
        return not bool(eager.isnan().any()) and all(bool(t.isfinite().all()) for t in self.inputs)

    def _accept_tied_indices(self, index: int, actual: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a mask of indices as correct as eager's, if the operator may choose any of several equal elements.

        Within a graph, this requires exact operands: jitter distinguishes equal elements of other operands.
        """
        value, eager = self.graph.outputs[index], self.eager
        node = value.producer
        nothing = torch.zeros(eager[index].shape, dtype=torch.bool)
        if node is None or not ties.has_open_ties(node) or value is not node.outputs[-1] or is_float(eager[index]):
            return nothing
        read = [v for v in node.inputs if isinstance(v, Value)]
        if len(self.graph) > 1 and not self._classify_values()[0].issuperset(read):
            return nothing
        operands = tuple(self._eager[v] if isinstance(v, Value) else v for v in node.inputs)
        call = ConcreteCall(node.op.name, node.op, operands, node.attrs)
        return ties.match_choices(call, eager[index], actual[index])


def combine_comparisons(found: Sequence[Comparison]) -> Comparison:
    """Combine the comparisons of all outputs: the first failure or the worst ratio, and the totals.

    If more than a twentieth of all elements are ambiguous, nothing passes; failures of other elements still count.
    """
    if not found:
        return Comparison(Verdict.PASS)
    failed = next((c for c in found if c.verdict.is_failure), None)
    worst = failed or max(found, key=lambda c: c.ratio)
    total = replace(worst, quality=max(c.quality for c in found), **sum_counts(found))
    if failed is not None:
        return total
    if total.ambiguous > MAX_AMBIGUOUS_SHARE * total.elements:
        message = f"rounding decides {total.ambiguous} of {total.elements} elements: both results are correct"
        return replace(total, verdict=Verdict.NOT_RUN, message=message, reason=Reason.AMBIGUOUS)
    is_unstable = total.unstable and total.unstable == total.elements
    return replace(total, verdict=Verdict.UNSTABLE if is_unstable else Verdict.PASS, message="")


def _compare_output(
    index: int, expected: ExpectedOutput, actual: torch.Tensor, right: torch.Tensor, inputs: Sequence[torch.Tensor]
) -> Comparison:
    elements = actual.numel()
    if not elements:
        return Comparison(Verdict.PASS)
    unstable = int(expected.unstable.sum())
    unstable_finite = (
        int((expected.unstable & expected.eager.isfinite() & expected.exact.isfinite()).sum()) if unstable else 0
    )
    error, bound = expected.error(actual).flatten(), expected.element_bounds().flatten()
    error = torch.where(right.flatten() & error.isinf(), 0.0, error)  # overflow, or an allowed special value
    ratio = torch.where(error == 0, 0.0, error / bound)
    rank = ratio.nan_to_num(0.0)  # wrong elements may have NaN, for an infinite or missing bound
    at = int((rank if bool(right.all()) else torch.where(right.flatten(), -1.0, rank)).argmax())
    worst = float(ratio[at])
    grade = statistics.measure_quality(expected, actual)
    verdict, message = Verdict.PASS, ""
    if unstable == elements:
        verdict = Verdict.UNSTABLE
    elif not bool(right.all()):
        verdict, message = _describe_worst_element(index, expected, actual, at, int((~right).sum()))
        message += _quote_inputs(at, actual.shape, inputs)
    else:
        message = statistics.describe_coarseness(expected, actual, grade)
        verdict = Verdict.PRECISION if message else Verdict.PASS
        message = message and f"output {index}: {message}"
    counts = (elements, int(expected.ambiguous.sum()), unstable, unstable_finite)
    return Comparison(verdict, message, float(error[at]), float(bound[at]), worst, grade, *counts)


def _describe_worst_element(
    index: int, expected: ExpectedOutput, actual: torch.Tensor, at: int, wrong: int
) -> tuple[Verdict, str]:
    """Return the verdict on the worst element, with its position, its value and its expected value."""
    position = [int(i) for i in torch.unravel_index(torch.tensor(at), actual.shape)] if actual.ndim else []
    got, eager, exact = (t.flatten()[at].item() for t in (actual, expected.eager, expected.exact))
    special = actual.is_floating_point() and not bool(torch.isfinite(torch.tensor([float(got), float(eager)])).all())
    message = f"output {index}{position} is {got!r} instead of {eager!r}"
    if not expected.same:
        allowed = float(expected.element_bounds().flatten()[at])
        message += f" (exact {exact!r}, bound {allowed:.3g} of {expected.label})"
    message += f"; {wrong} of {actual.numel()} elements are wrong"
    return Verdict.SPECIAL if special else Verdict.VALUE, message


def _quote_inputs(at: int, shape: torch.Size, inputs: Sequence[torch.Tensor]) -> str:
    """Quote the elements at a position of inputs that broadcast to the output, as it usually depends on them."""
    found: list[float] = []
    for tensor in inputs:
        with contextlib.suppress(RuntimeError):  # does not broadcast to the output
            found.append(tensor.expand(shape).flatten()[at].item())
    return f"; the inputs are {', '.join(map(repr, found))} there" if found else ""


def _format_type(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
