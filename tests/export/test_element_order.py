"""A runtime may order almost equal elements differently from eager, and no others."""

import pytest
import torch
from torch import nn

from clika_ref import clika_compile
from clika_ref.core.artifacts import Artifact
from clika_ref.core.execution import interpret
from clika_ref.export.artifact_check import ROUNDING_TOLERANCE
from clika_ref.export.element_order import agrees_in_own_order

SCORES = torch.tensor([[0.5, 3.0, 3.0000002, -1.0, 2.0]])


class Interpreter:
    """A runtime that computes a graph node by node, with results replaced by a hook."""

    def __init__(self, hook):
        self.hook = hook

    def compile(self, graph, path):
        self.graph = graph
        return Artifact(path, "interpreter", (), ())

    def load(self, _artifact):
        return lambda inputs: interpret(self.graph, inputs, self.hook)[0]


class Best(nn.Module):
    """The features of the three best scores, by an operator that orders them."""

    def __init__(self, operator):
        super().__init__()
        self.operator = operator

    def forward(self, scores):
        if self.operator == "topk":
            order = scores.topk(3, -1)[1]
        else:
            order = getattr(scores, self.operator)(dim=-1, descending=True)
            order = order[:, :3] if self.operator == "argsort" else order[1][:, :3]
        return order * 10, scores.gather(1, order).sigmoid()


def compare(operator, positions):
    """Compare a runtime whose order has the elements of eager's at ``positions``."""
    module = clika_compile(Best(operator), tracing_inputs=[SCORES], discard_input_model=False)

    def permute(node, results):
        if node.op.name != operator:
            return None
        rest = list(range(3, results[-1].shape[1]))
        return tuple(result[:, [*positions, *rest]] for result in results)

    graph = module.graph
    found = interpret(graph, [SCORES], permute)[0]
    return agrees_in_own_order(Interpreter(permute), graph, [SCORES], found, ROUNDING_TOLERANCE)


@pytest.mark.parametrize("operator", ["topk", "sort", "argsort"])
def test_agrees_in_own_order_almost_equal_elements_may_swap(operator):
    """Scores within a few roundings may be in either order; a score that is larger by a half may not follow."""
    assert compare(operator, [1, 0, 2])
    assert not compare(operator, [0, 2, 1])


def test_agrees_in_own_order_repeated_index_rejected():
    """The same element twice is no order, though its score is almost equal."""
    assert not compare("topk", [1, 1, 2])


def test_agrees_in_own_order_nothing_ordered():
    """A graph that orders nothing has no other order."""
    graph = clika_compile(nn.Sigmoid(), tracing_inputs=[SCORES], discard_input_model=False).graph
    assert not agrees_in_own_order(Interpreter(None), graph, [SCORES], [SCORES.sigmoid()], ROUNDING_TOLERANCE)
