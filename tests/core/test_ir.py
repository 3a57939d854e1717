"""The graph: invariants kept by each mutator, rejected changes, and violations that ``verify`` finds."""

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


def node_names(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes]


# Reading


def test_graph_str_shows_all_parts(graph):
    """The text of a graph shows symbols, guards, nodes, state and outputs."""
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


def test_node_match_finds_operator_pattern(graph):
    """A `match` statement finds nodes by operator and inputs."""
    node = graph("add", graph("neg", graph.takes(2)), 1).producer
    match node:
        case Node("add", (Value(producer=Node("neg", (x,))), 1)):
            assert x is graph.inputs[0]
        case _:
            pytest.fail("did not match")


def test_graph_nodes_may_change_during_iteration(graph):
    """Nodes may be erased and inserted during iteration."""
    x = graph.takes(2)
    for _ in range(3):
        graph("neg", x)
    seen = []
    for node in graph.nodes:
        seen.append(node.name)
        if len(seen) == 1:
            graph.erase(node)  # iteration continues from here
            graph("neg", x)  # and reaches nodes that are added after it
    assert seen == ["neg", "neg_1", "neg_2", "neg_3"]
    assert node_names(graph) == ["neg_1", "neg_2", "neg_3"]
    assert [n.name for n in graph.nodes_backward()] == ["neg_3", "neg_2", "neg_1"]


def test_graph_nodes_erased_neighbours_iteration_continues(graph):
    """Iteration continues after the current node and its neighbor were erased."""
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


def test_graph_taken_name_gets_number(graph):
    """A taken name gets a number."""
    assert [graph.takes(1).name, graph.takes(1).name, graph.takes(1, name="x_1").name, graph.takes(1).name] == [
        "x",
        "x_1",
        "x_1_1",
        "x_2",
    ]


def test_add_constant_keeps_tensor_and_qualified_name(graph):
    """A constant keeps its tensor and its qualified name."""
    weight = torch.nn.Parameter(torch.ones(2))
    value = graph.add_constant(weight, "head.weight")
    assert value.data is weight
    assert value.is_constant
    assert graph.constants == {"head.weight": value}
    assert not graph.takes(1).is_constant


def test_set_state_again_replaces_entry(graph):
    """A second `set_state` replaces the entry and updates its uses."""
    x = graph.takes(2)
    count = graph.add_constant(torch.zeros(2), "count")
    first, second = graph("add", count, x), graph("add", count, 1)
    graph.set_state("count", first)
    graph.set_state("count", second)
    assert first.uses == ()
    assert second.uses == (Use(graph, "count"),)
    verify(graph)


# The four mutators


def test_insert_adds_node_before_other_and_its_uses(graph, operator_table):
    """`insert` adds a node before another one and records its uses."""
    x = graph.takes(2, 3)
    last = graph("neg", x).producer
    made = graph.insert(Node(operator_table["add"], [x, x], {}), [FLOATS], before=last, names=["sum"])
    assert node_names(graph) == ["sum", "neg"]
    assert x.uses == (Use(last, 0), Use(made, 0), Use(made, 1))
    assert made.output.producer is made
    assert len(graph) == 2
    assert made in graph
    verify(graph)


def test_erase_removes_node_and_its_uses(graph):
    """`erase` removes a node and its uses."""
    x = graph.takes(2)
    node = graph("add", x, x).producer
    graph.erase(node)
    assert (x.uses, len(graph), node in graph) == ((), 0, False)


def test_erase_used_node_raises(graph):
    """A node with remaining uses cannot be erased; the error names a user."""
    y = graph("neg", graph.takes(2))
    z = graph("neg", y)
    graph.returns(z)
    with pytest.raises(PassError, match=r"cannot erase %neg: .*: %neg_1: .* still reads %neg. Replace it there first."):
        graph.erase(y.producer)
    with pytest.raises(PassError, match=r"output 0 of the graph still reads %neg_1. Replace it there first."):
        graph.erase(z.producer)
    assert len(graph) == 2


def test_replace_updates_every_use(graph):
    """`replace` updates nodes, outputs and state that use the value."""
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


def test_replace_other_type_raises(graph):
    """A value of another type cannot replace a value."""
    x, y = graph.takes(2), graph.takes(3, name="y")
    message = (
        "cannot replace %x: float32[2] by %y: float32[3]: their types differ. Replace a value by one of the same type."
    )
    with pytest.raises(PassError, match=re.escape(message)):
        graph.replace(x, y)


def test_replace_value_by_itself_changes_no_revision(graph):
    """Replacing a value by itself changes neither uses nor revision."""
    x = graph.takes(2)
    graph("neg", x)
    before = graph.revision
    graph.replace(x, x)
    assert graph.revision == before
    assert len(x.uses) == 1


@pytest.mark.parametrize("new", [3, None, make_symbol("n")])
def test_set_input_accepts_value_number_expression_none(graph, new):
    """`set_input` accepts values, numbers, size expressions and None."""
    x, y = graph.takes(2), graph.takes(2, name="y")
    node = graph("add", x, x).producer
    graph.set_input(node, 1, new)
    assert node.inputs == (x, new)
    assert x.uses == (Use(node, 0),)
    graph.set_input(node, 1, y)
    assert y.uses == (Use(node, 1),)
    verify(graph)


def test_graph_every_change_raises_revision(graph):
    """Every change of a graph raises its revision."""
    revisions = [graph.revision]

    def record_revision(_=None):
        revisions.append(graph.revision)

    x = graph.takes(2)
    record_revision()
    y = graph("neg", x)
    record_revision()
    z = graph("add", y, x)
    record_revision()
    graph.replace(y, x)
    record_revision()
    record_revision(graph.set_input(z.producer, 1, 1))
    record_revision(graph.erase(y.producer))
    record_revision(graph.add_constant(torch.ones(1), "one"))
    record_revision(graph.drop_unused_constants())
    record_revision(graph.add_output(z))
    record_revision(graph.set_state("x", z))
    assert revisions == sorted(set(revisions))


# Whole graphs


def test_clone_independent_and_shares_tensors(graph):
    """A clone is independent of the original and shares its tensors."""
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


def test_drop_unused_constants_keeps_read_and_state(graph):
    """Constants without uses are dropped, except those with a state entry."""
    used, kept = graph.add_constant(torch.ones(2), "used"), graph.add_constant(torch.ones(2), "written")
    graph.add_constant(torch.ones(2), "unused")
    graph.set_state("written", used)
    graph.drop_unused_constants()
    assert graph.constants == {"used": used, "written": kept}


# The invariants


def assert_verify_fails(graph, message: str) -> None:
    with pytest.raises(PassError, match=message) as caught:
        verify(graph)
    assert str(graph) in caught.value.__notes__


@pytest.fixture
def chain(graph):
    """A graph of two nodes, in order."""
    return graph.returns(graph("neg", graph("neg", graph.takes(2))))


def test_verify_valid_graph_passes(chain):
    """A valid graph passes verification."""
    verify(chain)


def test_verify_input_computed_later_raises(chain, operator_table):
    """An input that a later node computes raises an error."""
    first, last = chain.nodes
    chain.set_input(first, 0, last.output)
    assert_verify_fails(chain, r"%neg: .* reads %neg_1 before it is computed")


def test_verify_input_of_other_graph_raises(chain):
    """An input from another graph raises an error."""
    first, _ = chain.nodes
    chain.set_input(first, 0, Value(FLOATS, "stranger"))
    assert_verify_fails(chain, r"reads %stranger before it is computed")


def test_verify_unlisted_use_raises(chain):
    """A use that its value does not list raises an error."""
    first, _ = chain.nodes
    del chain.inputs[0]._uses[Use(first, 0)]
    assert_verify_fails(chain, r"the use of %x by %neg: .* is not listed")


def test_verify_unlisted_output_use_raises(chain):
    """An output that its value does not list as a use raises an error."""
    del chain.outputs[0]._uses[Use(chain, 0)]
    assert_verify_fails(chain, r"the use of %neg_1 by the graph is not listed")


def test_verify_nonexistent_use_raises(chain):
    """A listed use that does not exist raises an error."""
    _, last = chain.nodes
    chain.inputs[0]._uses[Use(last, 0)] = None
    assert_verify_fails(chain, r"%x lists uses that do not exist")


def test_verify_wrong_producer_raises(chain):
    """A value with a wrong producer raises an error."""
    first, last = chain.nodes
    first.output.producer = last
    assert_verify_fails(chain, r"%neg: float32\[2\] does not refer to %neg: ")


def test_verify_wrong_index_raises(chain):
    """A value with a wrong index raises an error."""
    next(iter(chain.nodes)).output.index = 1
    assert_verify_fails(chain, r"does not refer to")


def test_verify_duplicate_name_raises(chain):
    """Two values with one name raise an error."""
    _, last = chain.nodes
    last.output.name = "x"
    assert_verify_fails(chain, r"two values have the name 'x'; %x: .* produces one of them")


@pytest.mark.parametrize("read", [True, False])
def test_verify_input_produced_by_node_raises(chain, read):
    """A graph input that a node produces raises an error."""
    first, last = chain.nodes
    chain.inputs.append((first if read else last).output)
    if not read:
        chain.set_output(0, first.output)
    assert_verify_fails(chain, r"two values have the name 'neg(_1)?'; %neg.* produces one of them")


def test_verify_input_listed_twice_raises(chain):
    """A graph input that is listed twice raises an error."""
    chain.inputs.append(chain.inputs[0])
    assert_verify_fails(chain, r"two values have the name 'x'")


def test_verify_output_without_producer_raises(chain):
    """An output that no node computes raises an error."""
    chain.outputs[0] = Value(FLOATS, "stranger")
    assert_verify_fails(chain, r"the graph returns %stranger, but no node computes it")


def test_verify_state_without_producer_raises(chain):
    """A state entry that no node computes raises an error."""
    chain.state["x"] = Value(FLOATS, "stranger")
    assert_verify_fails(chain, r"the graph returns %stranger, but no node computes it")


# Deferred constants


def test_clone_fresh_name_reuses_erased_names(graph):
    """A clone gives names of erased nodes again."""
    x = graph.takes(2)
    graph.returns(graph("neg", x))
    graph.erase(graph("add", x, 1).producer)
    assert graph.fresh_name("add") == "add_1"
    assert graph.clone().fresh_name("add") == "add"
    assert graph.clone().fresh_name("neg") == "neg_1"


def test_add_constant_function_computed_on_access(graph):
    """The data of a deferred constant is computed on access, not before."""
    reads = []

    def make_half():
        reads.append(1)
        return torch.full((2, 3), 0.5)

    value = graph.add_constant(make_half, "scaled", FLOATS)
    graph.returns(graph("neg", value))
    twin = graph.clone()
    verify(twin)
    assert value.is_constant
    assert value.deferred_data is twin.constants["scaled"].deferred_data is make_half
    assert reads == []
    assert torch.equal(twin.constants["scaled"].data, torch.full((2, 3), 0.5))
    assert len(reads) == 1


def test_add_constant_function_without_type_infers_type(graph):
    """The type of a deferred constant is inferred if it is not given."""
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
