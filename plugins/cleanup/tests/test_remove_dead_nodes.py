"""Dead nodes are removed; nodes that an output, a state entry or a symbol needs stay."""

import pytest
import sympy
import torch
from clika_ref_cleanup.remove_dead_nodes import RemoveDeadNodes
from pass_sketches import noise

from clika_ref.core.ir import Node
from clika_ref.core.symbols import Guard, Symbol, SymbolSource, make_symbol
from clika_ref.core.types import TensorType


def test_remove_dead_nodes_removes_chain(sketch):
    """Nodes that become unread are removed too."""
    x = sketch.input(2, 3)
    sketch("exp", sketch("neg", sketch("relu", x)))
    kept = sketch("abs", x)
    assert sketch.returns(kept).clean(RemoveDeadNodes()) == ["abs"]


def test_remove_dead_nodes_one_read_output_keeps_node(sketch):
    """One output with a use keeps the node."""
    x = sketch.input(2, 4)
    _, right = sketch("split_with_sizes", x, split_sizes=(1, 3), dim=1)
    assert sketch.returns(right).clean(RemoveDeadNodes()) == ["split_with_sizes"]


def test_remove_dead_nodes_state_kept(sketch):
    """New state is kept although no output depends on it."""
    x, count = sketch.input(2), sketch.constant(torch.zeros(2), "count")
    sketch.graph.set_state("count", sketch("add", count, x))
    assert sketch.returns(x).clean(RemoveDeadNodes()) == ["add"]


def test_remove_dead_nodes_unread_random_removed(sketch):
    """An unread random node is removed."""
    x = sketch.input(2)
    sketch(noise, x)
    assert sketch.returns(sketch("neg", x)).clean(RemoveDeadNodes()) == ["neg"]


def add_symbol_element(sketch, name):
    """Add a node whose one element is the symbol of the given name."""
    x = sketch.input(4, name="count_me")
    value = sketch("count_nonzero", x)
    sketch.graph.symbols[name] = Symbol(name, 0, None, SymbolSource(value.name, None))
    return value


@pytest.mark.parametrize("position", ["attribute", "operand", "guard"])
def test_remove_dead_nodes_symbol_source_kept(sketch, position):
    """A node whose symbol is needed stays."""
    add_symbol_element(sketch, "n")
    y = sketch.input(3, name="y")
    if position == "attribute":
        y = sketch("expand", sketch("sum", y), size=(make_symbol("n"),))
    elif position == "operand":
        y = sketch("mul", y, make_symbol("n"))
    else:
        sketch.graph.guards.append(Guard(sympy.Gt(make_symbol("n"), 2), ""))
    sketch.returns(y)
    before = sketch.kinds
    RemoveDeadNodes()(sketch.graph, {})
    assert sketch.kinds == before


def test_remove_dead_nodes_symbol_of_dead_node_removed(sketch):
    """A symbol is removed with its node if only dead nodes need it."""
    add_symbol_element(sketch, "n")
    y = sketch.input(3, name="y")
    unread = Node(sketch.build.operators["expand"], [sketch("sum", y)], {"size": (make_symbol("n"),)})
    sketch.graph.insert(unread, [TensorType(torch.float32, (make_symbol("n"),))])
    assert sketch.returns(sketch("neg", y)).clean(RemoveDeadNodes()) == ["neg"]
    assert sketch.graph.symbols == {}
