"""Check of random calls: repeated results of the target must have the same distribution as eager's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from clika_ref.core.execution import read_sizes
from clika_ref.core.ir import Value
from clika_ref_conformance.cases import GraphCase, Outcome
from clika_ref_conformance.eager_calls import call_eagerly
from clika_ref_conformance.execution.case_checks import find_unsupported, has_same_type
from clika_ref_conformance.execution.error_attribution import exceptions_to_catch
from clika_ref_conformance.judging.distributions import describe_difference
from clika_ref_conformance.judging.random_nodes import is_random_call
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.verdicts import Comparison, Reason, Verdict, make_not_run

DRAWS_PER_CALL = 700
"""Number of runs per call. Finds a mean that is off by half its deviation, or one over 32 elements off by a tenth."""

MAX_CALLS = 3
"""Maximum number of calls per check: calls with equal attributes, apart from sizes, have the same distribution."""

MAX_ELEMENTS = 32
"""Number of elements of each result that are compared: the first ones."""


def check_distributions(name: str, cases: Sequence[GraphCase], suite: Suite) -> Outcome:
    """Compare the distributions of random calls with eager's; the first that differs decides."""
    found = [_compare_distribution(case, suite) for case in select_random_calls(cases)]
    if not found:
        return Outcome(name, make_not_run(Reason.NO_SUITABLE_CALL, "no drawn call is random"))
    failed = [c for c in found if c.verdict.is_failure]
    passed = [c for c in found if c.verdict is Verdict.PASS]
    return Outcome(name, (*failed, *passed, *found)[0])


def select_random_calls(cases: Sequence[GraphCase]) -> list[GraphCase]:
    """Return the calls to run: the one with most elements among those with equal attributes, apart from sizes."""
    largest: dict[str, tuple[int, GraphCase]] = {}
    for case in cases:
        (node,) = case.graph.nodes
        size = max((v.numel() for v in (case.tensors[v] for v in case.graph.outputs)), default=0)
        sizes = read_sizes(case.graph, case.runs[0].inputs)
        if size and node.is_random and is_random_call(node, case.tensors, sizes):
            kinds = [v if isinstance(v, bool | int | float | None) else type(v) for v in node.inputs]
            key = repr((kinds, {k: v for k, v in node.attrs.items() if not isinstance(v, tuple)}))
            largest[key] = max(largest.get(key, (0, case)), (size, case), key=lambda item: item[0])
    ranked = sorted(largest.values(), key=lambda item: -item[0])
    return [case for _, case in ranked[:MAX_CALLS]]


def _compare_distribution(case: GraphCase, suite: Suite) -> Comparison:
    graph, inputs = suite.lower_graph(case), case.runs[0].inputs
    rejection = find_unsupported(graph, suite)
    if rejection is not None:
        return rejection
    with TemporaryDirectory(dir=suite.folder) as folder:
        try:
            runner = suite.target.load(suite.target.compile(graph, Path(folder) / "model.onnx"))
            target = _draw_samples(lambda: runner([t.clone() for t in inputs]))
        except exceptions_to_catch() as error:
            message = f"the target fails on it, as other checks report: {type(error).__name__}: {error}"
            return make_not_run(Reason.FAILS_ELSEWHERE, message)
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(suite.profile.seed)
        (node,) = case.graph.nodes
        operands = [case.tensors[v] if isinstance(v, Value) else v for v in node.inputs]
        eager = _draw_samples(lambda: call_eagerly(node.op, operands, node.attrs))  # the interpreter takes longer
    if not all(map(has_same_type, target, eager)):
        return Comparison(Verdict.STRUCTURE, f"{case.facts['call']}: the results have another dtype or shape")
    text = describe_difference(target, eager)
    elements = sum(t.numel() for t in target)
    if text:
        return Comparison(Verdict.VALUE, f"{case.facts['call']}: {text}", elements=elements)
    return Comparison(Verdict.PASS, elements=elements)


def _draw_samples(draw: Callable[[], Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the first elements of each output for many runs: ``[draw, element]``."""
    runs = [[t.flatten()[:MAX_ELEMENTS].clone() for t in draw()] for _ in range(DRAWS_PER_CALL)]
    return [torch.stack(each) for each in zip(*runs, strict=True)]
