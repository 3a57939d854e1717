"""Rewrite rules: matches, allowed results, reasons for skipping, and names of outputs."""

import re

import pytest
import torch

from clika_ref.core.errors import PassError
from clika_ref.core.invariants import verify
from clika_ref.core.ir import Node, Value
from clika_ref.core.rewriter import MatchStats, Rule, Skip, apply_rules, can_substitute, erase_dead, rule, substitute
from clika_ref.core.symbols import Symbol, SymbolSource, make_symbol
from clika_ref.core.types import Origin, TensorType


@rule("neg")
def drop_double_neg(node, build):
    """``neg(neg(x))`` is ``x``."""
    match node.inputs[0]:
        case Value(producer=Node("neg", (x,))):
            return x
    return Skip("its operand is no neg", 1)


@rule("add")
def add_zero(node, build):
    """``x + 0`` is ``x``."""
    x, y = node.inputs
    return x if isinstance(y, int) and y == 0 else Skip("adds something")


@rule("add")
def add_as_neg(node, build):
    """``x + 1`` becomes ``neg(neg(x) + -1)``."""
    x, y = node.inputs
    return build("neg", build("add", build("neg", x), -1)) if y == 1 else Skip("adds no 1")


def add_negations(graph, count, value):
    for _ in range(count):
        value = graph("neg", value)
    return value


def test_rule_named_after_function():
    """A rule is named after its function."""
    assert drop_double_neg == Rule("drop-double-neg", ("neg",), drop_double_neg.rewrite)


def test_apply_rules_repeats_until_no_match(graph, operator_table):
    """Rules apply until none matches."""
    x = graph.takes(2)
    graph.returns(graph("add", add_negations(graph, 9, x), x))
    assert apply_rules(graph, [drop_double_neg], operator_table) == 4
    assert graph.kinds == ["neg", "add"]
    verify(graph)


def test_apply_rules_new_nodes_matched_again(graph, operator_table):
    """Nodes that a rule creates are matched again."""
    x = graph.takes(2)
    graph.returns(graph("add", graph("add", graph("neg", x), 1), x))
    assert apply_rules(graph, [drop_double_neg, add_as_neg], operator_table) == 2
    assert graph.kinds == ["add", "neg", "add"]
    verify(graph)


def test_apply_rules_calls_rule_for_its_op_types_only(graph, operator_table):
    """A rule is called only for the op types that it names."""
    seen = []

    @rule("add")
    def record_op_type(node, build):
        seen.append(node.op_type)
        return Skip("looks only")

    graph.returns(graph("add", graph("neg", graph.takes(2)), 1))
    assert apply_rules(graph, [record_op_type], operator_table) == 0
    assert seen == ["add"]


def test_apply_rules_new_nodes_keep_position_and_origin(graph, operator_table):
    """New nodes take the position and origin of the old node, with the rule in its history."""
    y = graph("add", graph.takes(2), 1)
    y.producer.origin = Origin(("head",), ("model.py:3",))
    graph.returns(graph("neg", graph("neg", y)))
    apply_rules(graph, [add_as_neg], operator_table)
    assert graph.kinds == ["neg", "add", "neg", "neg", "neg"]
    origins = [node.origin for node in graph.nodes][:3]
    assert origins == [Origin(("head",), ("model.py:3",), ("add-as-neg",))] * 3


def test_apply_rules_erases_unused_nodes(graph, operator_table):
    """Nodes without remaining uses are erased."""
    x = graph.takes(2)
    y = graph("add", graph("neg", graph("neg", x)), 0)
    graph.returns(graph("neg", y))
    apply_rules(graph, [drop_double_neg, add_zero], operator_table)
    assert graph.kinds == ["neg"]


@pytest.mark.parametrize("answer", [None, 3, (), "x"])
def test_apply_rules_invalid_return_raises(graph, operator_table, answer):
    """A rule that returns an invalid object raises an error with the node."""
    graph.returns(graph("neg", graph.takes(2)))
    odd = Rule("odd-rule", ("neg",), lambda node, build: answer)
    returned = re.escape(repr(answer))
    message = (
        rf"rule odd-rule: it returned {returned} for %neg: .*. Return one value for each output, or Skip\(reason\)."
    )
    with pytest.raises(PassError, match=message):
        apply_rules(graph, [odd], operator_table)


def test_apply_rules_other_type_raises(graph, operator_table):
    """A rule that returns a value of another type raises an error."""
    x, y = graph.takes(2), graph.takes(3, name="y")
    graph.returns(graph("neg", graph("neg", x)))
    wrong = Rule("wrong", ("neg",), lambda node, build: y if node.inputs[0] is x else Skip("the other"))
    with pytest.raises(PassError, match="their types differ"):
        apply_rules(graph, [wrong], operator_table)


# Why a rule did not fire


def test_match_stats_keeps_closest_skip(graph, operator_table):
    """The closest skip of each rule is kept."""
    near = Rule("near", ("add",), lambda node, build: Skip(f"adds {node.inputs[1]}", node.inputs[1]))
    y = graph("add", graph("add", graph("add", graph.takes(2), 1), 5), 3)
    graph.returns(y)
    misses = MatchStats()
    apply_rules(graph, [near], operator_table, misses)
    skip, node = misses.closest["near"]
    assert skip == Skip("adds 5", 5)
    assert node.startswith("%add_1:")


def test_match_stats_equal_skips_keep_first(graph, operator_table):
    """Of equally close skips, the first one is kept."""
    graph.returns(graph("add", graph("add", graph.takes(2), 1), 2))
    misses = MatchStats()
    apply_rules(graph, [add_zero], operator_table, misses)
    assert misses.closest["add-zero"] == (Skip("adds something"), "%add: float32[2] = add(%x, 1)")


# Names


def test_apply_rules_output_not_replaced_by_input(graph, operator_table):
    """An output is not replaced by an input."""
    x = graph.takes(2)
    y = graph("add", x, 0)
    graph.returns(y)
    assert not can_substitute(graph, y, x)
    assert apply_rules(graph, [add_zero], operator_table) == 0
    assert graph.outputs == [y]


def test_apply_rules_two_outputs_not_merged(graph, operator_table):
    """Two outputs are not merged into one value."""
    y = graph("neg", graph.takes(2))
    z = graph("add", y, 0)
    graph.returns(y, z)
    assert apply_rules(graph, [add_zero], operator_table) == 0


def test_apply_rules_output_keeps_its_name(graph, operator_table):
    """A value that replaces an output takes its name."""
    y = graph("neg", graph.takes(2))
    z = graph("add", y, 0)
    z.name = "logits"
    graph.returns(z)
    apply_rules(graph, [add_zero], operator_table)
    assert graph.kinds == ["neg"]
    assert [v.name for v in graph.outputs] == ["logits"]
    verify(graph)


def test_apply_rules_symbol_source_keeps_name(graph, operator_table):
    """A value that defines a symbol keeps its name."""
    x = graph.takes(3)
    found = graph("nonzero", x, types=(TensorType(torch.int64, (make_symbol("u"), 1)),))
    graph.symbols["u"] = Symbol("u", 0, None, SymbolSource(found.name, 0))
    same = graph("add", found, 0, types=(found.type,))
    graph.returns(same)
    assert not can_substitute(graph, same, found)
    assert apply_rules(graph, [add_zero], operator_table) == 0


def test_apply_rules_state_keeps_own_tensor(graph, operator_table):
    """A state entry keeps a tensor of its own."""
    x = graph.takes(2)
    graph.add_constant(torch.zeros(2), "memory")
    y = graph("add", x, 0)
    graph.set_state("memory", y)
    assert apply_rules(graph, [add_zero], operator_table) == 0
    assert graph.state["memory"] is y


def test_substitute_swaps_names_of_outputs_only(graph):
    """`substitute` moves uses and swaps the names of outputs only."""
    x = graph.takes(2)
    old, new = graph("neg", x), graph("neg", x)
    reader = graph("add", old, 1)
    substitute(graph, old, new)
    assert reader.producer.inputs == (new, 1)
    assert (old.name, new.name) == ("neg", "neg_1")


def test_apply_rules_last_remaining_use_matched_again(graph, operator_table):
    """The last remaining user of a value is matched again."""

    @rule("add")
    def add_more(node, build):
        """``x + 1`` becomes ``x + 4`` if nothing else reads ``x``."""
        x, y = node.inputs
        return build("add", x, 4) if y == 1 and len(x.uses) == 1 else Skip("adds no 1, or to what others read")

    y = graph("add", graph.takes(2), 2)
    shared = graph("neg", y)
    graph.returns(graph("add", shared, 1), graph("add", graph("neg", shared), 3))
    assert apply_rules(graph, [add_more, drop_double_neg], operator_table) == 2
    assert [node.inputs[1] for node in graph.nodes if node.op_type == "add"] == [2, 4, 3]
    verify(graph)


# Dead nodes


def test_erase_dead_removes_unused_producers(graph):
    """A dead node is erased with its unused producers."""
    x = graph.takes(2)
    kept = graph("neg", x)
    last = graph("add", graph("neg", kept), 1)
    graph.returns(kept)
    assert [node.op_type for node in erase_dead(graph, last.producer)] == ["add", "neg"]
    assert graph.kinds == ["neg"]


def test_erase_dead_keeps_symbol_source(graph):
    """A node that defines a symbol is kept."""
    found = graph("nonzero", graph.takes(3), types=(TensorType(torch.int64, (make_symbol("u"), 1)),))
    graph.symbols["u"] = Symbol("u", 0, None, SymbolSource(found.name, 0))
    assert erase_dead(graph, found.producer) == []
    assert graph.kinds == ["nonzero"]
