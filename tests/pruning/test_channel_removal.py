"""Dependent channels and heads are found; the pruned graph computes the same as with zeros in their place."""

import pytest
import torch

from clika_ref.core.execution import interpret, read_sizes
from clika_ref.core.invariants import verify
from clika_ref.pruning.dependency_tracing import build_dependency_graph
from clika_ref.pruning.groups import find_fixed_reason, find_groups
from clika_ref.pruning.removal import remove_units

EXPECTED = {
    "Residual": {("stem", "outer"): 8, ("inner",): 12},
    "Depthwise": {("wide", "deep", "excite"): 8, ("squeeze",): 4, ("up",): 6},
    "Grouped": {("wide", "grouped", "up"): 4},
    "Dense": {("stem",): 6, ("first",): 4, ("second",): 6, ("gate",): 6},
    "Shuffled": {("wide",): 4},
    "Halved": {("wide",): 6, ("deep",): 8},
    "Mixed": {("wide",): 4, ("first", "second"): 4},
    "Attention": {("query", "key", "value"): 2, ("value",): 2},
    "RepeatedHeads": {("query", "key", "value"): 2, ("value",): 2},
    "Encoder": {("attention",): 4, ("wide",): 24},
}
"""By what makes them, how many units there are: of heads those of the keys."""


def find_dependencies(module, inputs):
    graph = module.graph.clone()
    sizes = read_sizes(graph, inputs)
    return build_dependency_graph(graph, sizes), sizes


def zero_channels(found, gone):
    """Return a clone in which layers multiply the units to remove by 0."""
    clone = found.graph.clone()
    for layer in found.layers.values():
        places = found.units_of(layer.x).get(layer.channel)
        if layer.groups == 1 and places is not None:
            kept = set(found.units.remaining_indices(places, gone).tolist())
            lost = torch.tensor([i for i in range(len(places)) if i not in kept], dtype=torch.int64)
            weight = clone.constants[layer.weight.name]
            weight.data = weight.data.detach().index_fill(layer.inner, lost, 0.0)
    return clone


@pytest.mark.parametrize("name", EXPECTED)
def test_remove_units_matches_zeroed_channels(name, compile_model):
    """Coupled channels and heads are found, and removing them equals setting them to zero."""
    module, inputs = compile_model(name)
    found, sizes = find_dependencies(module, [inputs[0]])
    every = find_groups(found)
    assert {tuple(n.origin.scope for n in g.producers): len(g.units) for g in every} == EXPECTED[name]
    gone = frozenset(u for group in every for u in group.units[1::2])
    wanted = zero_channels(found, gone)
    before = sum(v.data.numel() for v in found.graph.constants.values())
    assert not remove_units(found, gone, sizes)
    verify(found.graph)
    assert sum(v.data.numel() for v in found.graph.constants.values()) < 0.8 * before
    for x in inputs:  # of which the second has sizes that nothing was run for
        expected, actual = (interpret(graph, [x])[0][0] for graph in (wanted, found.graph))
        torch.testing.assert_close(actual, expected)


def test_find_fixed_reason_names_fixed_value(compile_model):
    """The reason names the value that fixes a layer."""
    module, inputs = compile_model("Encoder")
    found, _ = find_dependencies(module, [inputs[0]])
    reasons = {node.origin.scope: find_fixed_reason(found, node) for node in found.layers}
    assert "reads %x, which cannot change" in reasons["attention"]  # the last of its layers projects into the residual
    assert "reads %add, which cannot change" in reasons["narrow"]
