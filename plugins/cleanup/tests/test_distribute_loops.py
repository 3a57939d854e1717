"""Loops are split into layers, linear recurrences, and calls for all rows; the results stay equal."""

import pytest
import torch
from clika_ref_cleanup.distribute_loops import DistributeLoops
from torch import nn
from torch._higher_order_ops import scan

from clika_ref import clika_compile
from clika_ref.core.execution import interpret
from clika_ref.core.inference import Builder
from clika_ref.core.invariants import verify
from clika_ref.core.ir import Graph, walk
from clika_ref.core.passes import Phase, Pipeline
from clika_ref.core.registry import load_registry

REGISTRY = load_registry()


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


WEIGHT = randn(4, 4, seed=1)

STEPS = {
    "add": (lambda h, x: h * x.sigmoid() + x, "linear_recurrence"),
    "sub": (lambda h, x: x - h * 0.5, "linear_recurrence"),
    "neg and div": (lambda h, x: -h / (1 + x.abs()) + 1, "linear_recurrence"),
    "where": (lambda h, x: torch.where(x > 0, h * 0.5 + x, h), "linear_recurrence"),
    "lerp to a row": (lambda h, x: torch.lerp(h, x, x.sigmoid()), "linear_recurrence"),
    "lerp from a row": (lambda h, x: torch.lerp(x, h, 0.3), "linear_recurrence"),
    "addcmul": (lambda h, x: torch.addcmul(x, h, x.tanh(), value=0.5), "linear_recurrence"),
    "sum": (lambda h, x: h + x, "linear_recurrence"),
    "matrix": (lambda h, x: torch.tanh(h @ WEIGHT + x @ WEIGHT), "scan"),
    "maximum": (lambda h, x: torch.maximum(h - 0.1, x), "scan"),
    "square": (lambda h, x: h * h * 0.1 + x, "scan"),
}
"""Steps of a loop, and the call of the graph that computes the states."""


@pytest.mark.parametrize("name", STEPS)
def test_distribute_loops_equals_eager(name):
    """Each step, with a readout of the states before and after it, equals eager at another length."""
    step, expected = STEPS[name]

    def run(x):
        def combine(h, row):
            following = step(h, row.exp().sin())
            return following, (following.softmax(-1) * row).sum(-1) + h.mean()

        return scan(combine, torch.ones(x.shape[1], 4), x)

    module = clika_compile(run, tracing_inputs=[randn(5, 2, 4), randn(6, 3, 4)])
    kinds = [node.op_type for node in module.graph.nodes]
    assert [kind for kind in kinds if kind in ("scan", "linear_recurrence")] == [expected]
    assert "softmax" in kinds, "the readout is computed for all rows"
    x = randn(9, 2, 4, seed=2)
    h, rows = torch.ones(2, 4), []
    for row in x:
        before, h = h, step(h, row.exp().sin())
        rows.append((h.softmax(-1) * row).sum(-1) + before.mean())
    torch.testing.assert_close(list(module(x)), [h, torch.stack(rows)])


def test_distribute_loops_keeps_cell_with_read_state():
    """An LSTM cell whose cell states are all returned stays in the loop: the layer returns only the last one."""

    class CellStates(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTMCell(4, 4)

        def forward(self, x):
            h = c = torch.zeros(x.shape[1], 4)
            found = []
            for row in x:
                h, c = self.cell(row, (h, c))
                found.append(c)
            return torch.stack(found)

    model = CellStates().eval()
    module = clika_compile(model, tracing_inputs=[randn(5, 2, 4), randn(6, 3, 4)], discard_input_model=False)
    assert [n.op_type for n in walk(module.graph) if "lstm" in n.op_type] == ["lstm_cell"]
    x = randn(9, 2, 4, seed=2)
    torch.testing.assert_close(module(x), model(x))


def test_distribute_loops_state_before_row_read_alone():
    """A result of the state before each row, when nothing reads the states after the rows."""

    def run(x):
        return scan(lambda h, row: (torch.tanh(h @ WEIGHT + row), h * 2), torch.ones(x.shape[1], 4), x)

    module = clika_compile(run, tracing_inputs=[randn(5, 2, 4), randn(6, 3, 4)])
    assert [node.op_type for node in module.graph.nodes].count("mul") == 1, "the product is computed for all rows"
    x = randn(9, 2, 4, seed=2)
    h, rows = torch.ones(2, 4), []
    for row in x:
        rows.append(h * 2)
        h = torch.tanh(h @ WEIGHT + row)
    torch.testing.assert_close(list(module(x)), [h, torch.stack(rows)])


@pytest.mark.parametrize("motif", DistributeLoops.motifs, ids=lambda motif: motif.__name__)
def test_distribute_loops_motif_changes_and_keeps_results(motif):
    """The pass changes each of its motifs, and keeps the results."""
    graph = Graph("motif")
    for value in motif(Builder(graph, REGISTRY.operators)):
        graph.add_output(value)
    verify(graph)
    inputs = [randn(*value.type.shape) for value in graph.inputs]
    expected, before = interpret(graph, inputs), str(graph)
    Pipeline.of({"distribute-loops": REGISTRY.passes["distribute-loops"]}, REGISTRY.operators, Phase.CLEAN).run(graph)
    assert str(graph) != before
    torch.testing.assert_close(interpret(graph, inputs), expected)
