"""Every view: an overwritten view changes its base as an eager write through the view does."""

from __future__ import annotations

import pytest
import torch
from clika_ref_aten.plugin import clika_ref_operators
from one_operator import Case, draw_case, run_onnx

from clika_ref.core.errors import ModelError
from clika_ref.core.execution import interpret
from clika_ref.core.inference import Builder
from clika_ref.core.invariants import verify
from clika_ref.core.ir import Graph
from clika_ref.core.types import TensorType

OPERATORS = {op.name: op for op in clika_ref_operators()}
VIEWS = sorted(name for name, op in OPERATORS.items() if op.write_back_rule is not None)
DRAWS = 40

IS_NO_VIEW = "shares no memory"
SHARES_WITH_ITSELF = "more than one element of the written-to tensor refers to a single memory location"


def write_view_in_eager(case: Case, index: int, new: torch.Tensor) -> torch.Tensor:
    """Return the base after an eager write of ``new`` into one of its views.

    Raises:
        RuntimeError: eager returns no view here, or rejects a write to it.
    """
    base, *others = case.operands
    base = base.clone()
    views = case.op(base, *others, **case.attrs)
    view = views[index] if isinstance(views, tuple) else views
    if view.untyped_storage().data_ptr() != base.untyped_storage().data_ptr():
        raise RuntimeError(IS_NO_VIEW)
    view.copy_(new)
    return base


def build_write_graph(case: Case, index: int, count: int, new: torch.Tensor) -> Graph:
    graph = Graph(case.op.name)
    base, written = (
        graph.add_input(TensorType(t.dtype, tuple(t.shape)), name)
        for t, name in ((case.operands[0], "base"), (new, "new"))
    )
    which = {"index": index} if count > 1 else {}
    graph.add_output(case.op.write_back_rule(Builder(graph, OPERATORS), base, written, **case.attrs, **which))
    verify(graph)
    return graph


def make_writes(name: str):
    """Yield for each result of each drawn call the effects of a write to it, in eager and in the graph."""
    for seed in range(DRAWS):
        case = draw_case(OPERATORS[name], seed)
        results = case.eager()
        for index, result in enumerate(results):
            new = (torch.arange(result.numel()).reshape(result.shape) % 11 - 5).to(result.dtype)
            try:
                expected = write_view_in_eager(case, index, new)
            except RuntimeError as refusal:
                if str(refusal) != IS_NO_VIEW and SHARES_WITH_ITSELF not in str(refusal):
                    raise
                continue
            try:
                graph = build_write_graph(case, index, len(results), new)
            except ModelError:
                if not has_overlapping_elements(case):
                    raise
                continue
            yield case, expected, graph, [case.operands[0], new]


def has_overlapping_elements(case: Case) -> bool:
    """Whether a view contains an element of its base twice, so that a write through it is ambiguous."""
    shown = case.op(torch.arange(case.operands[0].numel()).reshape(case.operands[0].shape), **case.attrs)
    return shown.numel() > shown.unique().numel()


@pytest.mark.parametrize("name", VIEWS)
def test_write_back_rule_equals_eager_write(name):
    """The graph of a write leaves the same base as an eager write."""
    tried = 0
    for case, expected, graph, inputs in make_writes(name):
        (found,), _ = interpret(graph, inputs)
        assert graph.outputs[0].type == TensorType(expected.dtype, tuple(expected.shape)), str(case)
        assert torch.equal(found, expected), f"{case}: {found} instead of {expected}\n{graph}"
        tried += 1
    if not tried:
        pytest.skip(f"the reference of {name} returns a copy: there is no eager write through it to compare with")
    assert tried >= DRAWS // 8, f"{name}: eager rejected nearly every write. Let its samples draw more real views"


@pytest.mark.parametrize("name", VIEWS)
def test_write_back_rule_in_onnx_equals_eager_write(name):
    """The graph of a write returns the same in ONNX Runtime."""
    for (case, expected, graph, inputs), _ in zip(make_writes(name), range(6), strict=False):
        (found,) = run_onnx(graph, inputs)
        assert torch.equal(found, expected), f"{case}: {found} instead of {expected}\n{graph}"
