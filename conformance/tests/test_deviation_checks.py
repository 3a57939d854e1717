"""The checks of a deviating graph leave everything else unchanged."""

import math

import torch
from clika_ref_conformance.cases import CaseRun
from clika_ref_conformance.deviations import Deviation
from clika_ref_conformance.drawing.calls.call_graphs import build_call_graph
from clika_ref_conformance.execution.deviation_checks import judge_run
from clika_ref_conformance.judging.judge import CaseReference
from clika_ref_conformance.verdicts import Verdict

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph
from clika_ref.core.registry import load_registry
from clika_ref.core.types import TensorType


def test_judge_run_deviation_leaves_operator_unchanged():
    """A deviation is seen, and the operator stays unchanged."""
    relu = load_registry().operators["relu"]
    reference = relu.reference
    x = torch.tensor([1.0, math.inf])
    entry = Deviation("clip", ("relu",), "Inf is cut off", "none", "2099-01-01", replace={"inf": "max"})
    wrong = [torch.tensor([1.0, torch.finfo(torch.float32).max])]
    for _ in range(2):
        found = judge_run(CaseReference(build_call_graph(relu, [x], {}), [x]), CaseRun("inf", (x,)), wrong, [entry])
        assert (found.comparison.verdict, found.occurred, found.applicable) == (Verdict.DEVIATION, ("clip",), ("clip",))
    assert relu.reference is reference
    assert relu(x)[1] == math.inf


def test_judge_run_deviation_invalid_downstream_ignored():
    """A deviation excuses nothing if a later node rejects its operands."""
    graph = Graph("index")
    x, table = (graph.add_input(TensorType(torch.float32, shape), name) for name, shape in (("x", (2,)), ("t", (1, 1))))
    build = Builder(graph, load_registry().operators)
    graph.add_output(build("embedding", table, build("to", build("relu", x), dtype=torch.int64)))
    inputs = (torch.tensor([0.0, -1.0]), torch.zeros(1, 1))
    for form in ({"replace": {"0": "max"}}, {"free": ("0",)}):
        entry = Deviation("far", ("relu",), "0 is lost", "none", "2099-01-01", **form)
        found = judge_run(CaseReference(graph, inputs), CaseRun("zero", inputs), [torch.ones(2, 1)], [entry])
        assert (found.comparison.verdict, found.occurred, found.applicable) == (Verdict.VALUE, (), ())


def test_judge_run_free_element_frees_outputs_changed_by_nan():
    """An output that only a NaN in a free element changes is free too."""
    graph = Graph("softmax")
    x = graph.add_input(TensorType(torch.float32, (2, 1)), "x")
    build = Builder(graph, load_registry().operators)
    graph.add_output(build("softmax", build("relu", x), dim=1))
    inputs = (torch.tensor([[1.0], [0.0]]),)
    entry = Deviation("lost", ("relu",), "0 is lost", "none", "2099-01-01", free=("0",))
    for wrong, verdict in (([1.0, math.nan], Verdict.DEVIATION), ([math.nan, 1.0], Verdict.SPECIAL)):
        result = [torch.tensor(wrong)[:, None]]
        found = judge_run(CaseReference(graph, inputs), CaseRun("zero", inputs), result, [entry])
        assert found.comparison.verdict is verdict, found.comparison.message


def test_judge_run_free_element_frees_its_comparison():
    """A comparison of a free element is free, even if only a negative number shows it."""
    graph = Graph("below")
    x = graph.add_input(TensorType(torch.float32, (2,)), "x")
    build = Builder(graph, load_registry().operators)
    graph.add_output(build("le", build("relu", x), 0.5))
    inputs = (torch.tensor([math.nan, 1.0]),)
    entry = Deviation("lost", ("relu",), "NaN is lost", "none", "2099-01-01", free=("nan",))
    for wrong, verdict in (([True, False], Verdict.DEVIATION), ([False, True], Verdict.VALUE)):
        found = judge_run(CaseReference(graph, inputs), CaseRun("nan", inputs), [torch.tensor(wrong)], [entry])
        assert found.comparison.verdict is verdict, found.comparison.message


def test_judge_run_free_result_may_change_data_dependent_size():
    """A free result may have another size only if the size depends on data."""
    x = torch.tensor([1.0, math.nan, 3.0])
    entry = Deviation("merge", ("unique2", "sort"), "NaN is lost", "none", "2099-01-01", free=("operand-nan",))
    graph = build_call_graph(load_registry().operators["unique2"], [x], {"return_inverse": True})
    shorter = [torch.tensor([1.0]), torch.tensor([0, 0, 0]), torch.empty(0, dtype=torch.int64)]
    assert (
        judge_run(CaseReference(graph, [x]), CaseRun("nan", (x,)), shorter, [entry]).comparison.verdict
        is Verdict.DEVIATION
    )
    for wrong in (torch.tensor([[1.0]]), torch.tensor([1])):
        found = judge_run(CaseReference(graph, [x]), CaseRun("nan", (x,)), [wrong, *shorter[1:]], [entry]).comparison
        assert found.verdict is Verdict.STRUCTURE, "another rank or dtype is never free"
    fixed = build_call_graph(load_registry().operators["sort"], [x], {"dim": 0})
    found = judge_run(
        CaseReference(fixed, [x]), CaseRun("nan", (x,)), [shorter[0], torch.tensor([0])], [entry]
    ).comparison
    assert found.verdict is Verdict.STRUCTURE
