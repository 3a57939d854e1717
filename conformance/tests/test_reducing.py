"""The reducer: a failing graph of any size becomes the few nodes that fail."""

from dataclasses import replace
from random import Random
from statistics import median

import pytest
import torch
from clika_ref_conformance.cases import CaseRun, GraphCase
from clika_ref_conformance.drawing.eager_values import compute_eager_values
from clika_ref_conformance.drawing.graphs.graph_generator import GraphGenerator
from clika_ref_conformance.drawing.graphs.random_graphs import grow_graph, make_case, select_graph_operators
from clika_ref_conformance.drawing.reducing.graphs import reduce_case

from clika_ref.core.errors import ClikaError
from clika_ref.core.inference import Builder
from clika_ref.core.invariants import verify
from clika_ref.core.ir import Graph
from clika_ref.core.registry import load_registry
from clika_ref.core.samples import random_draw
from clika_ref.core.symbols import Guard, Symbol, SymbolSource, make_symbol
from clika_ref.core.types import TensorType

REGISTRY = load_registry()
OPERATORS = select_graph_operators(REGISTRY.operators)


def op_types(case):
    return [node.op_type for node in case.graph.nodes]


def make_random_case(seed):
    random = Random(seed)
    return make_case(grow_graph(OPERATORS, GraphGenerator(random_draw(random))), f"case {seed}", random)


def is_runnable(case):
    """Return whether eager runs a case: repeats, for one, must still sum up to the size that the graph states."""
    try:
        compute_eager_values(case.graph, case.runs[0].inputs)
    except ClikaError:
        return False
    return True


def test_reduce_case_faulty_operator_leaves_one_call():
    """A faulty operator is reduced to one call."""
    sizes = []
    for seed in range(15):
        case = make_random_case(seed)
        faulty = op_types(case)[len(case.graph) // 2]
        small = reduce_case(case, lambda c, faulty=faulty: faulty in op_types(c) and is_runnable(c), 20)
        verify(small.graph)
        compute_eager_values(small.graph, small.runs[0].inputs)
        sizes.append(len(small.graph))
    assert median(sizes) == 1


def make_chain_case(*steps, outputs=(-1,)):
    """Return relu -> ... over float32[2, 3]."""
    graph = Graph()
    build = Builder(graph, REGISTRY.operators)
    values = [graph.add_input(TensorType(torch.float32, (2, 3)), "x")]
    for step in steps:
        values.append(build(step, values[-1]))
    for position in outputs:
        graph.add_output(values[position])
    return GraphCase("chain", graph, [CaseRun("typical", (torch.tensor([[1.0, -2.0, 3.5], [0.25, -0.5, 4.0]]),))])


def is_computed_from(value, kind):
    node = value.producer
    return node is not None and (node.op_type == kind or any(is_computed_from(v, kind) for v in node.inputs))


def test_reduce_case_nodes_between_bypassed():
    """Nodes between those that matter are bypassed."""
    case = make_chain_case(*["tanh"] * 4, "exp", "sin", "cos", "log1p", *["relu"] * 3, outputs=(2, 8, -1))

    def is_failing(c):
        return any(n.op_type == "log1p" and is_computed_from(n.output, "exp") for n in c.graph.nodes)

    small = reduce_case(case, is_failing, 20)
    assert op_types(small) == ["exp", "log1p"]
    assert len(small.graph.inputs) == len(small.graph.outputs) == 1


def test_reduce_case_keeps_failing_run_with_plain_elements():
    """Only the failing run is kept, and its elements become plain."""
    case = make_chain_case("sin", "exp")
    (run,) = case.runs
    case = GraphCase("two runs", case.graph, [run, CaseRun("negative", (-run.inputs[0],))])
    small = reduce_case(case, lambda c: c.runs[0].name == "negative" and "exp" in op_types(c), 20)
    assert [r.name for r in small.runs] == ["negative"]
    assert torch.equal(small.runs[0].inputs[0], torch.zeros(2, 3))


def test_reduce_case_removed_node_becomes_input():
    """A removed node becomes an input with eager's result."""
    case = make_chain_case("exp", "log1p")
    expected = torch.exp(case.runs[0].inputs[0])

    def is_failing(c):
        return op_types(c) in (["exp", "log1p"], ["log1p"]) and bool((c.runs[0].inputs[0] == expected).all())

    small = reduce_case(case, lambda c: op_types(c) == ["exp", "log1p"] or is_failing(c), 20)
    assert op_types(small) == ["log1p"]
    assert torch.equal(small.runs[0].inputs[0], expected)


def test_reduce_case_passing_case_returned_unchanged():
    """A case that does not fail is returned unchanged."""
    case = make_chain_case("exp", "log1p")
    assert reduce_case(case, lambda _: False, 20) is case


def test_reduce_case_no_time_returns_best():
    """When time is up, the best case so far is returned."""
    case = make_chain_case("exp", "log1p")
    assert reduce_case(case, lambda _: True, 0.0) is case


def test_reduce_case_predicate_error_rejects_candidate():
    """A predicate that raises rejects the candidate."""

    def is_failing(case):
        if len(case.graph) < 2:
            raise ValueError("cannot run it")
        return True

    assert len(reduce_case(make_chain_case("exp", "log1p", "sin"), is_failing, 20).graph) == 2


def make_dynamic_case():
    """Return exp of x[n, 3], and log1p of the sine of y[2 n, 3]."""
    graph = Graph()
    build = Builder(graph, REGISTRY.operators)
    n = make_symbol("n")
    x = graph.add_input(TensorType(torch.float32, (n, 3)), "x")
    y = graph.add_input(TensorType(torch.float32, (2 * n, 3)), "y")
    graph.symbols["n"] = Symbol("n", 1, None, SymbolSource("x", 0))
    graph.guards += [Guard(n >= 1, "model.py:3")]
    graph.add_output(build("exp", x))
    graph.add_output(build("log1p", build("sin", y)))
    return GraphCase("dynamic", graph, [CaseRun("typical", (torch.ones(2, 3), torch.ones(4, 3)))])


def test_reduce_case_needed_dynamic_dim_keeps_its_source():
    """Dynamic dims that matter stay, and their source stays an input."""
    case = make_dynamic_case()
    small = reduce_case(case, lambda c: "log1p" in op_types(c) and "n" in c.graph.symbols, 20)
    verify(small.graph)
    assert op_types(small) == ["log1p"]
    assert [v.name for v in small.graph.inputs] == ["sin", "x"]
    assert small.graph.symbols.keys() == {"n"}
    assert small.graph.guards == case.graph.guards
    assert small.graph.outputs[0].type.shape == (2 * make_symbol("n"), 3)
    assert [tuple(t.shape) for t in small.runs[0].inputs] == [(2, 3), (1, 3)]


def test_reduce_case_other_dynamic_dims_become_short():
    """Dynamic dims that do not matter become short and fixed."""
    small = reduce_case(
        make_dynamic_case(), lambda c: "log1p" in op_types(c) and max(len(t) for t in c.runs[0].inputs) > 3, 20
    )
    verify(small.graph)
    assert (small.graph.symbols, small.graph.guards) == ({}, [])
    assert [v.type.shape for v in small.graph.inputs] == [(4, 3), (2, 3)]
    assert [tuple(t.shape) for t in small.runs[0].inputs] == [(4, 3), (2, 3)]
    shorter = reduce_case(make_dynamic_case(), lambda c: "log1p" in op_types(c), 20)
    assert shorter.graph.outputs[0].type.shape == (2, 3)


def test_reduce_case_failure_of_two_runs_keeps_two():
    """If a failure needs two runs, two are kept."""
    case = replace(make_dynamic_case(), runs=[CaseRun(name, make_dynamic_case().runs[0].inputs) for name in "abcd"])
    small = reduce_case(case, lambda c: {"b", "d"} <= {run.name for run in c.runs}, 20)
    assert [run.name for run in small.runs] == ["b", "d"]
    assert small.graph is case.graph


def test_reduce_case_constants_stay_and_become_plain():
    """Constants stay constants and become plain."""
    graph = Graph()
    build = Builder(graph, REGISTRY.operators)
    x = graph.add_input(TensorType(torch.float32, (2, 3)), "x")
    weight = graph.add_constant(torch.randn(4, 3), "weight")
    graph.add_output(build("relu", build("linear", x, weight)))
    case = GraphCase("constant", graph, [CaseRun("typical", (torch.randn(2, 3),))])
    small = reduce_case(case, lambda c: "linear" in op_types(c), 20)
    assert op_types(small) == ["linear"]
    (constant,) = small.graph.constants.values()
    assert torch.equal(constant.data, torch.zeros(4, 3))
    assert not torch.equal(weight.data, torch.zeros(4, 3))


def test_reduce_case_failing_dead_code_kept():
    """Dead code is kept if it fails."""
    case = make_chain_case("sin", "exp", "cos", "tanh", "relu", outputs=(1, 3, 5))
    graph = case.graph
    build = Builder(graph, REGISTRY.operators)
    build("log1p", graph.inputs[0])
    for _ in range(3):
        graph.add_output(build("neg", graph.inputs[0]))

    def is_failing(c):
        return any(n.op_type == "log1p" and not n.output.uses for n in c.graph.nodes) and c.graph.outputs

    small = reduce_case(case, is_failing, 20)
    assert len(small.graph) <= 2
    assert len(small.graph.outputs) == 1


@pytest.mark.parametrize("output", [0, 1])
def test_reduce_case_multi_output_node_keeps_failing_output(output):
    """A node with several outputs is reduced to the failing one."""
    graph = Graph()
    build = Builder(graph, REGISTRY.operators)
    x = graph.add_input(TensorType(torch.float32, (2, 3)), "x")
    parts = build("var_mean", build("exp", x), dim=(1,))
    for part in parts:
        graph.add_output(build("relu", part))
    case = GraphCase("parts", graph, [CaseRun("typical", (torch.randn(2, 3),))])

    def is_failing(c):
        return any(n.op_type == "var_mean" and n.outputs[output].uses for n in c.graph.nodes)

    small = reduce_case(case, is_failing, 20)
    assert op_types(small) == ["var_mean"]
    assert [v.index for v in small.graph.outputs] == [output]
