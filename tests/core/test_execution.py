"""The interpreter and generated code: equal results, state, late sizes, and errors that name the node."""

import math
import re

import pytest
import torch
from torch import fx

from clika_ref.core.errors import ClikaError
from clika_ref.core.execution import interpret, read_sizes
from clika_ref.core.fx_execution import to_fx
from clika_ref.core.symbols import Symbol, SymbolSource, make_symbol
from clika_ref.core.types import Origin, TensorType

N = make_symbol("n")


class GeneratedConstants:
    """Holds the constants that generated code reads."""

    def __init__(self, graph) -> None:
        for i, value in enumerate(graph.constants.values()):
            setattr(self, f"constant_{i}", value.data)


def run_fx(graph, inputs):
    """Run the FX form."""
    written = to_fx(graph)
    written.lint()
    code = written.python_code("self")
    namespace = dict(code.globals)
    exec(code.src, namespace)  # noqa: S102 - as the ClikaModule does
    return list(namespace["forward"](GeneratedConstants(graph), *inputs))


def run_both(graph, *inputs):
    """Return the outputs of the interpreter, which must equal those of the FX form."""
    expected, _ = interpret(graph, inputs)
    actual = run_fx(graph, inputs)
    assert len(actual) == len(expected)
    assert all(torch.equal(a, e) and a.dtype == e.dtype for a, e in zip(actual, expected, strict=True))
    return expected


def test_interpret_and_fx_nodes_computed_in_order(graph):
    """Nodes are computed in order, and an input may be an output."""
    x = graph.takes(2)
    graph.returns(graph("add", graph("neg", x), x), x)
    y, same = run_both(graph, torch.tensor([1.0, 2.0]))
    assert y.tolist() == [0.0, 0.0]
    assert same.tolist() == [1.0, 2.0]


def test_interpret_and_fx_several_results_distinguished(graph):
    """Several results of one node are distinguished."""
    first, second = graph("split_in_half", graph.takes(5))
    graph.returns(second, first)
    assert [t.tolist() for t in run_both(graph, torch.arange(5.0))] == [[2, 3, 4], [0, 1]]


def test_interpret_and_fx_number_and_size_operands(graph):
    """Operands may be numbers and size expressions."""
    x = graph.takes("n")
    graph.returns(graph("add", graph("add", x, 0.5), 2 * N + 1))
    assert run_both(graph, torch.zeros(3))[0].tolist() == [7.5] * 3


def test_to_fx_complex_operand_special_parts_kept(graph):
    """Infinity, NaN and negative zero in a complex operand are kept."""
    x = graph.takes(1)
    graph.returns(graph("add", x, complex(-0.0, math.inf)), graph("add", x, complex(math.nan, 0)))
    infinite, undefined = run_fx(graph, [torch.tensor([-0.0])])
    assert torch.signbit(infinite.real)
    assert torch.isinf(infinite.imag)
    assert torch.isnan(undefined.real)


def test_interpret_and_fx_attributes_hold_size_expressions(graph):
    """Attributes may hold size expressions."""
    x = graph.takes("n", 2)
    graph.returns(graph("reshape", x, shape=(2 * N,)), graph("full", size=(N, 1), value=3.0))
    flat, made = run_both(graph, torch.ones(4, 2))
    assert (flat.shape, made.shape) == ((8,), (4, 1))


def test_to_fx_constants_of_any_name_read_by_index(graph):
    """Constants are read by index, so that any name is safe."""
    odd = 'w"),print("EXECUTED"),("'
    names = ["head.0.weight", odd, "class", "constant_0"]
    values = [graph.add_constant(torch.tensor([float(i)]), name) for i, name in enumerate(names)]
    x = graph.takes(1, name='x=print("EXECUTED")')
    for value in values[::-1]:
        x = graph("add", x, value)
    graph.returns(x, values[3])
    assert [t.item() for t in run_both(graph, torch.tensor([10.0]))] == [16.0, 3.0]


def test_to_fx_source_contains_no_graph_name(graph):
    """The generated source contains no name of the graph."""
    x = graph.takes("n", name="secret_input")
    y = graph("add", x, graph.add_constant(torch.ones(1), "secret.weight"))
    graph.guards.clear()
    y.name = "secret_value"
    graph.returns(y)
    assert "secret" not in to_fx(graph).python_code("self").src


# Sizes


def test_read_sizes_reads_dims_and_numbers(graph):
    """Sizes are read from dims and from integer inputs."""
    graph.takes("n", 3, "m")
    length = graph.add_input(TensorType(torch.int64, ()), "length")
    graph.symbols["length"] = Symbol("length", 0, None, SymbolSource(length.name, None))
    graph.symbols["late"] = Symbol("late", 0, None, SymbolSource("nonzero", 0))
    assert read_sizes(graph, [torch.zeros(2, 3, 5), torch.tensor(7)]) == {"n": 2, "m": 5, "length": 7}


def test_interpret_and_fx_integer_input_defines_size(graph):
    """An integer input defines a size."""
    length = graph.add_input(TensorType(torch.int64, ()), "length")
    symbol = graph.symbols["length"] = Symbol("length", None, None, SymbolSource(length.name, None))
    graph.returns(graph("full", size=(symbol.expr,), value=1.0))
    assert run_both(graph, torch.tensor(3))[0].shape == (3,)


def test_interpret_and_fx_size_made_by_node_used_later(graph):
    """Later nodes may use a size that a node defines."""
    found = graph("nonzero", graph.takes(4), types=(TensorType(torch.int64, (make_symbol("u"), 1)),))
    graph.symbols["u"] = Symbol("u", 0, None, SymbolSource(found.name, 0))
    graph.returns(graph("full", size=(make_symbol("u") + 1,), value=2.0))
    assert run_both(graph, torch.tensor([1.0, 0.0, 1.0, 1.0]))[0].shape == (4,)


def test_interpret_and_fx_size_read_from_unused_result(graph):
    """A size may be read from a result that no node reads."""
    first, second = graph("split_in_half", graph.takes(5))
    graph.symbols["u"] = Symbol("u", 0, None, SymbolSource(second.name, 0))
    graph.returns(graph("full", size=(make_symbol("u"),), value=2.0), first)
    assert [t.shape for t in run_both(graph, torch.zeros(5))] == [(3,), (2,)]


# State


def test_interpret_returns_state_and_fx_writes_it(graph):
    """The interpreter returns new state; generated code writes it."""
    count = graph.add_constant(torch.tensor([5.0]), "count")
    graph.set_state("count", graph("add", count, 1))
    graph.returns(graph("neg", count))
    outputs, state = interpret(graph, [])
    assert outputs[0].tolist() == [-5.0]
    assert state["count"].tolist() == [6.0]
    assert count.data.tolist() == [5.0], "the interpreter writes nothing"
    assert run_fx(graph, [])[0].tolist() == [-5.0]
    assert count.data.tolist() == [6.0]


def test_to_fx_state_writes_to_input(graph):
    """Generated code may write to an input."""
    x = graph.takes(2)
    y = graph("add", x, 1)
    graph.set_state("x", y)
    graph.returns(y)
    given = torch.zeros(2)
    run_fx(graph, [given])
    assert given.tolist() == [1.0, 1.0]


# Devices


def test_interpret_and_fx_factory_follows_input_device(graph):
    """Tensors made without inputs are on the device of the other tensors."""
    graph.takes(2)
    graph.returns(graph("full", size=(2,), value=1.0))
    assert run_fx(graph, [torch.empty(2, device="meta")])[0].device.type == "meta"
    (made,), _ = interpret(graph, [torch.empty(2, device="meta")])
    assert made.device.type == "meta"


# Errors and the hook


def test_interpret_failing_node_reports_module_and_line(graph):
    """An error of a node names the node, its module and its line."""
    y = graph("neg", graph.takes(2))
    bad = graph("reshape", y, shape=(2,))
    bad.producer.attrs["shape"] = (3,)
    bad.producer.origin = Origin(("head.0",), ("model.py:3",))
    graph.returns(bad)
    message = (
        "%reshape: float32[2] = reshape[shape=(3)](%neg)  # head.0 at model.py:3 in head.0 at model.py:3: execution "
        "failed: "
    )
    with pytest.raises(ClikaError, match=re.escape(message)) as caught:
        interpret(graph, [torch.zeros(2)])
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_interpret_hook_sees_nodes_and_replaces_results(graph):
    """The hook receives each node and may replace its results."""
    x = graph.takes(1)
    graph.returns(graph("neg", graph("add", x, 1)))
    seen = []

    def hook(node, results):
        seen.append((node.op_type, results[0].item()))
        return (torch.tensor([10.0]),) if node.op_type == "add" else None

    outputs, _ = interpret(graph, [torch.zeros(1)], hook)
    assert seen == [("add", 1.0), ("neg", -10.0)]
    assert outputs[0].item() == -10.0


def test_interpret_frees_results_after_last_use(graph):
    """Results are freed after their last use."""
    import weakref  # noqa: PLC0415 - here only

    x = graph.takes(1)
    graph.returns(graph("neg", graph("neg", graph("neg", x))))
    made, alive = [], []

    def hook(node, results):
        alive.append([ref() is not None for ref in made])
        made.append(weakref.ref(results[0]))

    interpret(graph, [torch.zeros(1)], hook)
    assert alive == [[], [True], [False, True]]


def test_to_fx_returns_fx_graph(graph):
    """`to_fx` returns an `fx.Graph`."""
    graph.returns(graph("neg", graph.takes(1)))
    assert isinstance(to_fx(graph), fx.Graph)
