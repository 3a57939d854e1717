"""The graph: what each mutator keeps right, what it refuses, and that ``verify`` finds each broken invariant."""

import re

import pytest
import sympy
import torch

from clika_ref.core.errors import PassError
from clika_ref.core.invariants import verify
from clika_ref.core.ir import Graph, Node, Use, Value
from clika_ref.core.symbols import Guard, make_symbol
from clika_ref.core.types import Origin, TensorType

FLOATS = TensorType(torch.float32, (2, 3))


def nodes(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes]


# Reading


def test_the_text_of_a_graph_shows_everything(graph):
    x = graph.takes("n", 3)
    graph.guards.append(Guard(sympy.Gt(make_symbol("n"), 4), "model.py:7"))
    bias = graph.add_constant(torch.zeros(3), "head.bias")
    y = graph("reshape", graph("add", x, bias), shape=(3 * make_symbol("n"),))
    y.producer.origin = Origin(("head",), ("model.py:9",))
    graph.set_state("head.bias", bias)
    graph.returns(y, x)
    assert str(graph).splitlines() == [
        "graph draft(%x: float32[n, 3])",
        "  symbol n: 0.. from dim 0 of 'x'",
        "  guard n > 4 (from model.py:7)",
        "  %add: float32[n, 3] = add(%x, %head.bias)",
        "  %reshape: float32[3*n] = reshape[shape=(3*n)](%add)  # head at model.py:9",
        "  state head.bias <- %head.bias",
        "  return %reshape, %x",
    ]


def test_nodes_are_found_by_match(graph):
    node = graph("add", graph("neg", graph.takes(2)), 1).producer
    match node:
        case Node("add", (Value(producer=Node("neg", (x,))), 1)):
            assert x is graph.inputs[0]
        case _:
            pytest.fail("did not match")


def test_nodes_may_be_erased_and_inserted_while_iterating(graph):
    x = graph.takes(2)
    for _ in range(3):
        graph("neg", x)
    seen = []
    for node in graph.nodes:
        seen.append(node.name)
        if len(seen) == 1:
            graph.erase(node)  # iteration goes on from here
            graph("neg", x)  # and sees what is added behind
    assert seen == ["neg", "neg_1", "neg_2", "neg_3"]
    assert nodes(graph) == ["neg_1", "neg_2", "neg_3"]
    assert [n.name for n in graph.nodes_backward()] == ["neg_3", "neg_2", "neg_1"]


def test_an_erased_node_and_its_erased_neighbour_do_not_end_an_iteration(graph):
    x = graph.takes(2)
    for _ in range(4):
        graph("neg", x)
    seen = []
    for node in graph.nodes:
        seen.append(node.name)
        if node.name == "neg":
            first, second, *_ = list(graph.nodes)
            graph.erase(first)
            graph.erase(second)
    assert seen == ["neg", "neg_2", "neg_3"]


# Building


def test_taken_names_get_a_number(graph):
    assert [graph.takes(1).name, graph.takes(1).name, graph.takes(1, name="x_1").name, graph.takes(1).name] == [
        "x",
        "x_1",
        "x_1_1",
        "x_2",
    ]


def test_a_constant_keeps_its_tensor_and_its_qualified_name(graph):
    weight = torch.nn.Parameter(torch.ones(2))
    value = graph.add_constant(weight, "head.weight")
    assert value.data is weight
    assert value.is_constant
    assert graph.constants == {"head.weight": value}
    assert not graph.takes(1).is_constant


def test_a_state_entry_can_be_changed(graph):
    x = graph.takes(2)
    count = graph.add_constant(torch.zeros(2), "count")
    first, second = graph("add", count, x), graph("add", count, 1)
    graph.set_state("count", first)
    graph.set_state("count", second)
    assert first.uses == ()
    assert second.uses == (Use(graph, "count"),)
    verify(graph)


# The four mutators


def test_insert_puts_a_node_before_another_and_lists_its_uses(graph, table):
    x = graph.takes(2, 3)
    last = graph("neg", x).producer
    made = graph.insert(Node(table["add"], [x, x], {}), [FLOATS], before=last, names=["sum"])
    assert nodes(graph) == ["sum", "neg"]
    assert x.uses == (Use(last, 0), Use(made, 0), Use(made, 1))
    assert made.output.producer is made
    assert len(graph) == 2
    assert made in graph
    verify(graph)


def test_erase_forgets_a_node_and_its_uses(graph):
    x = graph.takes(2)
    node = graph("add", x, x).producer
    graph.erase(node)
    assert (x.uses, len(graph), node in graph) == ((), 0, False)


def test_erase_refuses_what_is_still_read(graph):
    y = graph("neg", graph.takes(2))
    z = graph("neg", y)
    graph.returns(z)
    with pytest.raises(PassError, match=r"cannot erase %neg: .*: %neg_1: .* still reads %neg. Replace it there first."):
        graph.erase(y.producer)
    with pytest.raises(PassError, match=r"output 0 of the graph still reads %neg_1. Replace it there first."):
        graph.erase(z.producer)
    assert len(graph) == 2


def test_replace_moves_every_reader_at_its_place(graph):
    x, y = graph.takes(2), graph.takes(2, name="y")
    old = graph("neg", x)
    total = graph("add", old, old)
    graph.add_constant(torch.zeros(2), "memory")
    graph.set_state("memory", old)
    graph.returns(total, old)
    graph.replace(old, y)
    assert total.producer.inputs == (y, y)
    assert graph.outputs == [total, y]
    assert graph.state == {"memory": y}
    assert old.uses == ()
    assert set(y.uses) == {
        Use(total.producer, 0),
        Use(total.producer, 1),
        Use(graph, 1),
        Use(graph, "memory"),
    }
    verify(graph)


def test_replace_refuses_another_type(graph):
    x, y = graph.takes(2), graph.takes(3, name="y")
    message = (
        "cannot replace %x: float32[2] by %y: float32[3]: their types differ. Replace a value by one of the same type."
    )
    with pytest.raises(PassError, match=re.escape(message)):
        graph.replace(x, y)


def test_replacing_a_value_by_itself_changes_nothing(graph):
    x = graph.takes(2)
    graph("neg", x)
    before = graph.revision
    graph.replace(x, x)
    assert graph.revision == before
    assert len(x.uses) == 1


@pytest.mark.parametrize("new", [3, None, make_symbol("n")])
def test_set_input_takes_values_numbers_expressions_and_none(graph, new):
    x, y = graph.takes(2), graph.takes(2, name="y")
    node = graph("add", x, x).producer
    graph.set_input(node, 1, new)
    assert node.inputs == (x, new)
    assert x.uses == (Use(node, 0),)
    graph.set_input(node, 1, y)
    assert y.uses == (Use(node, 1),)
    verify(graph)


def test_every_change_raises_the_revision(graph):
    revisions = [graph.revision]

    def note(_=None):
        revisions.append(graph.revision)

    x = graph.takes(2)
    note()
    y = graph("neg", x)
    note()
    z = graph("add", y, x)
    note()
    graph.replace(y, x)
    note()
    note(graph.set_input(z.producer, 1, 1))
    note(graph.erase(y.producer))
    note(graph.add_constant(torch.ones(1), "one"))
    note(graph.drop_unused_constants())
    note(graph.add_output(z))
    note(graph.set_state("x", z))
    assert revisions == sorted(set(revisions))


# Whole graphs


def test_a_clone_is_independent_and_shares_tensors(graph):
    weight = graph.add_constant(torch.ones(3), "weight")
    graph.aliases["tied"] = "weight"
    graph.guards.append(Guard(sympy.Gt(make_symbol("n"), 4), ""))
    y = graph("add", graph.takes("n", 3), weight)
    graph.set_state("weight", weight)
    graph.returns(y)
    before = str(graph)
    copy = graph.clone()
    assert str(copy) == before
    assert (copy.aliases, copy.guards, copy.symbols) == (graph.aliases, graph.guards, graph.symbols)
    assert copy.constants["weight"].data is weight.data
    assert copy.fresh_name("add") == graph.fresh_name("add") == "add_1"
    for node in copy.nodes:
        copy.set_input(node, 1, 2)
    copy.guards.clear()
    copy.aliases.clear()
    copy.symbols.clear()
    assert str(graph) == before
    verify(copy)


def test_constants_that_nothing_reads_are_dropped(graph):
    used, kept = graph.add_constant(torch.ones(2), "used"), graph.add_constant(torch.ones(2), "written")
    graph.add_constant(torch.ones(2), "unused")
    graph.set_state("written", used)
    graph.drop_unused_constants()
    assert graph.constants == {"used": used, "written": kept}


# The invariants


def broken(graph, message: str) -> None:
    with pytest.raises(PassError, match=message) as caught:
        verify(graph)
    assert str(graph) in caught.value.__notes__


@pytest.fixture
def chain(graph):
    """A graph of two nodes, in order."""
    return graph.returns(graph("neg", graph("neg", graph.takes(2))))


def test_a_whole_graph_passes(chain):
    verify(chain)


def test_a_node_that_reads_a_later_one_is_found(chain, table):
    first, last = chain.nodes
    chain.set_input(first, 0, last.output)
    broken(chain, r"%neg: .* reads %neg_1 before it is computed")


def test_a_value_of_another_graph_is_found(chain):
    first, _ = chain.nodes
    chain.set_input(first, 0, Value(FLOATS, "stranger"))
    broken(chain, r"reads %stranger before it is computed")


def test_a_use_that_is_not_listed_is_found(chain):
    first, _ = chain.nodes
    del chain.inputs[0]._uses[Use(first, 0)]
    broken(chain, r"the use of %x by %neg: .* is not listed")


def test_an_output_whose_use_is_not_listed_is_found(chain):
    del chain.outputs[0]._uses[Use(chain, 0)]
    broken(chain, r"the use of %neg_1 by the graph is not listed")


def test_a_use_that_does_not_exist_is_found(chain):
    _, last = chain.nodes
    chain.inputs[0]._uses[Use(last, 0)] = None
    broken(chain, r"%x lists uses that do not exist")


def test_a_value_that_does_not_know_its_node_is_found(chain):
    first, last = chain.nodes
    first.output.producer = last
    broken(chain, r"%neg: float32\[2\] does not refer to %neg: ")


def test_a_value_of_a_wrong_index_is_found(chain):
    next(iter(chain.nodes)).output.index = 1
    broken(chain, r"does not refer to")


def test_a_name_that_occurs_twice_is_found(chain):
    _, last = chain.nodes
    last.output.name = "x"
    broken(chain, r"two values have the name 'x'; %x: .* produces one of them")


@pytest.mark.parametrize("read", [True, False])
def test_an_input_that_a_node_makes_is_found(chain, read):
    first, last = chain.nodes
    chain.inputs.append((first if read else last).output)
    if not read:
        chain.set_output(0, first.output)
    broken(chain, r"two values have the name 'neg(_1)?'; %neg.* produces one of them")


def test_an_input_that_is_listed_twice_is_found(chain):
    chain.inputs.append(chain.inputs[0])
    broken(chain, r"two values have the name 'x'")


def test_an_output_that_nothing_computes_is_found(chain):
    chain.outputs[0] = Value(FLOATS, "stranger")
    broken(chain, r"the graph returns %stranger, but no node computes it")


def test_a_state_that_nothing_computes_is_found(chain):
    chain.state["x"] = Value(FLOATS, "stranger")
    broken(chain, r"the graph returns %stranger, but no node computes it")


# Deferred constants


def test_a_clone_gives_names_that_nothing_bears_any_more(graph):
    x = graph.takes(2)
    graph.returns(graph("neg", x))
    graph.erase(graph("add", x, 1).producer)
    assert graph.fresh_name("add") == "add_1"
    assert graph.clone().fresh_name("add") == "add"
    assert graph.clone().fresh_name("neg") == "neg_1"


def test_data_that_a_function_computes_is_computed_where_it_is_read_and_not_before(graph):
    reads = []

    def half():
        reads.append(1)
        return torch.full((2, 3), 0.5)

    value = graph.add_constant(half, "scaled", FLOATS)
    graph.returns(graph("neg", value))
    twin = graph.clone()
    verify(twin)
    assert value.is_constant
    assert value.deferred_data is twin.constants["scaled"].deferred_data is half
    assert reads == []
    assert torch.equal(twin.constants["scaled"].data, torch.full((2, 3), 0.5))
    assert len(reads) == 1


def test_the_type_of_computed_data_is_found_where_it_is_not_given(graph):
    value = graph.add_constant(lambda: torch.zeros(2, 3), "zeros")
    assert value.type == FLOATS
    value.data = torch.ones(2, 3)
    assert value.deferred_data is None


def test_nodes_backward_before_a_node_yields_earlier_nodes(graph):
    first, second, third = (graph("neg", graph.takes(2)).producer for _ in range(3))
    assert [*graph.nodes_backward()] == [third, second, first]
    assert [*graph.nodes_backward(third)] == [second, first]
    assert [*graph.nodes_backward(first)] == []


def test_value_reports_its_reads(graph):
    x = graph.takes(2)
    total = graph("add", x, x)
    graph.returns(total)
    assert (x.use_count, total.use_count) == (2, 1)
    assert x.is_read_by(total.producer, 0)
    assert x.is_read_by(total.producer, 1)
    assert total.is_read_by(graph, 0)
    assert not x.is_read_by(graph, 0)


def test_remove_constant_frees_its_name(graph):
    graph.add_constant(torch.zeros(2), "weight")
    before = graph.revision
    graph.remove_constant("weight")
    assert graph.constants == {}
    assert graph.revision > before
    assert graph.add_constant(torch.ones(2), "weight").name == "weight"


def test_remove_constant_that_is_read_is_rejected(graph):
    weight = graph.add_constant(torch.zeros(2), "weight")
    graph.returns(graph("add", weight, weight))
    with pytest.raises(
        PassError, match=r"remove_constant\('weight'\): it is still read 2 times; replace it there first"
    ):
        graph.remove_constant("weight")
    assert graph.constants == {"weight": weight}
