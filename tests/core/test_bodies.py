"""Bodies of control flow: copies, names, revisions, invariants, and passes that know only one graph."""

import pytest
import sympy
import torch

from clika_ref.core.errors import PassError
from clika_ref.core.execution import interpret
from clika_ref.core.fx_execution import compile_with_fx
from clika_ref.core.invariants import verify
from clika_ref.core.ir import Graph, Node, walk, walk_graphs
from clika_ref.core.operators import Body, operator
from clika_ref.core.passes import Phase, Pipeline
from clika_ref.core.rewriter import apply_rules, rule
from clika_ref.core.symbols import Symbol, SymbolSource, make_symbol
from clika_ref.core.types import TensorType
from clika_ref.export.symbol_substitution import substitute_symbols


@operator()
def choose(x: torch.Tensor, *operands: torch.Tensor, first: Body, second: Body) -> tuple[torch.Tensor, ...]:
    """Run ``first`` on the operands if the sum of ``x`` is positive, else ``second``."""
    return (first if x.sum() > 0 else second)(*operands)


FLOATS = TensorType(torch.float32, (make_symbol("n"),))


@pytest.fixture
def chosen(graph, operator_table):
    """Return ``choose(x, x, n)``: ``-(x + weight)`` and ``full(n) + weight``."""
    x = graph.takes("n")
    weight = graph.add_constant(torch.tensor([2.0]), "layer.weight")
    bodies = [graph.new_body(f"choose.{name}") for name in choose.bodies]
    for body in bodies:
        value, size = body.add_input(FLOATS, "x"), body.add_input(TensorType(torch.int64, ()), "n")
        body.symbols["n"] = Symbol("n", 0, None, SymbolSource(size.name, None, holds_length=True))
        first = body is bodies[0]
        start = value if first else insert(body, operator_table["full"], size=(make_symbol("n"),), value=1.0)
        body.add_output(insert(body, operator_table["add"], start, weight))
    body = bodies[0]
    body.set_output(0, insert(body, operator_table["neg"], body.outputs[0]))
    node = graph.insert(Node(choose, [x, x, make_symbol("n")], {}, bodies=bodies), [FLOATS])
    return graph.returns(node.output)


def insert(graph, op, *operands, **attrs):
    call = op.call(*operands, **attrs)
    return graph.insert(Node(op, call.operands, call.attrs), [FLOATS]).output


def compute(graph, x):
    """Return the output by the interpreter, after a comparison with the fast form."""
    found = interpret(graph, [x])[0][0]
    holder = type("Holder", (), {f"constant_{i}": v.data for i, v in enumerate(graph.constants.values())})
    assert torch.equal(compile_with_fx(graph)(holder, x)[0], found)
    return found


POSITIVE, NEGATIVE = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([-1.0, -2.0])


def test_bodies_run_the_chosen_one(chosen):
    """The interpreter and the fast form run one body, with the constants and the size that it reads."""
    verify(chosen)
    assert compute(chosen, POSITIVE).tolist() == [-3.0, -4.0, -5.0]
    assert compute(chosen, NEGATIVE).tolist() == [3.0, 3.0]


def test_bodies_hook_sees_nodes_that_ran(chosen):
    """A hook sees the nodes of the body that ran, then the node of the body."""
    seen = []
    interpret(chosen, [NEGATIVE], lambda node, _: seen.append(node.op_type))
    assert seen == ["full", "add", "choose"]


def test_bodies_str_shows_them_below_their_node(chosen):
    """The text of a graph contains its bodies."""
    lines = [line.strip() for line in str(chosen).splitlines()]
    assert lines[lines.index("graph choose.second(%x_2: float32[n], %n_1: int64[])") - 1] == "return %neg"
    assert "%add_1: float32[n] = add(%full, %layer.weight)" in lines


def test_bodies_clone_is_deep(chosen):
    """A change of a clone's body leaves the original unchanged, and their names and results are equal."""
    clone = chosen.clone()
    verify(clone)
    assert str(clone) == str(chosen)
    body = next(clone.nodes).bodies[0]
    body.set_output(0, next(body.nodes).output)
    assert compute(clone, POSITIVE).tolist() == [3.0, 4.0, 5.0]
    assert compute(chosen, POSITIVE).tolist() == [-3.0, -4.0, -5.0]
    assert {part.root for part in walk_graphs(clone)} == {clone}


def test_bodies_change_increments_revision_of_owner(chosen):
    """A change of a body increments the revision of its graph."""
    body, before = next(chosen.nodes).bodies[1], chosen.revision
    body.set_output(0, body.inputs[0])
    assert chosen.revision > before


def test_bodies_names_are_unique(chosen):
    """A new value of any body gets a name that no other graph uses."""
    first, second = next(chosen.nodes).bodies
    assert first.fresh_name("add") == "add_2"
    assert second.fresh_name("add") == "add_3"
    assert second.add_constant(torch.zeros(1), "layer.weight").name == "layer.weight_1"
    assert "layer.weight_1" in chosen.constants


def test_bodies_erased_node_releases_constants(chosen, operator_table):
    """Constants that only an erased body read are unused."""
    node = next(chosen.nodes)
    chosen.set_output(0, insert(chosen, operator_table["neg"], chosen.inputs[0]))
    chosen.erase(node)
    verify(chosen)
    assert chosen.constants["layer.weight"].use_count == 0
    chosen.drop_unused_constants()
    assert not chosen.constants


def test_bodies_replaced_constant_changes_only_own_readers(chosen, operator_table):
    """Only the readers in the same graph read a computed value in place of a constant; all read another constant."""
    weight = chosen.constants["layer.weight"]
    chosen.add_output(weight)
    call = operator_table["full"].call(size=(1,), value=7.0)
    chosen.replace(weight, chosen.insert(Node(operator_table["full"], (), call.attrs), [weight.type]).output)
    assert chosen.outputs[1].name == "full_1"
    assert compute(chosen, POSITIVE).tolist() == [-3.0, -4.0, -5.0]
    chosen.replace(weight, chosen.add_constant(torch.tensor([5.0]), "other"))
    verify(chosen)
    assert compute(chosen, POSITIVE).tolist() == [-6.0, -7.0, -8.0]


def test_verify_body_reading_outer_value_rejected(chosen, operator_table):
    """A body that reads a value of its owner raises an error."""
    body = next(chosen.nodes).bodies[0]
    body.add_output(insert(body, operator_table["neg"], chosen.inputs[0]))
    with pytest.raises(PassError, match=r"neg\(%x\) reads %x before it is computed"):
        verify(chosen)


def test_verify_body_of_another_graph_rejected(chosen):
    """A node with the body of another graph raises an error."""
    node, stranger = next(chosen.nodes), Graph("other")
    node.bodies = (node.bodies[0], stranger.new_body("lost"))
    with pytest.raises(PassError, match=r"the body lost of .* was not created by new_body of the graph"):
        verify(chosen)


def test_substitute_symbols_reaches_bodies(chosen):
    """A fixed length replaces the symbol in bodies and in the operand that passes it."""
    chosen.symbols.clear()
    substitute_symbols(chosen, {make_symbol("n"): sympy.Integer(3)})
    assert next(chosen.nodes).inputs[2] == 3
    assert not any(part.symbols for part in walk_graphs(chosen))
    assert compute(chosen, -POSITIVE).tolist() == [3.0, 3.0, 3.0]


@rule("neg")
def _negate_by_adding(node, build):
    return build("add", node.inputs[0], 1)


class NegateByAdding:
    """A pass that knows nothing of bodies."""

    name, phase, after, removes = "negate-by-adding", Phase.CLEAN, (), "node"

    def __call__(self, graph, operators, /):
        apply_rules(graph, [_negate_by_adding], operators)


def test_pipeline_runs_passes_on_bodies(chosen, operator_table):
    """A pipeline runs a pass on each body, and reports that it changed the graph."""
    reports = Pipeline((NegateByAdding(),), operator_table).run(chosen)
    assert reports[0].changed
    assert [node.op_type for node in walk(chosen)] == ["choose", "add", "add", "full", "add"]
    assert compute(chosen, POSITIVE).tolist() == [4.0, 5.0, 6.0]
