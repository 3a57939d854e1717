"""Branches of concatenated outputs, and the values that detections are selected from, count as outputs of their own."""

import pytest
import torch
from torch import nn

from clika_ref import clika_compile
from clika_ref.quantization.algorithms.compared_outputs import ComparedOutputs, OutputBranches


class Head(nn.Module):
    """Boxes in pixels and scores from 0 to 1, concatenated along a dim, and a function of the result."""

    def __init__(self, dim=1, finish=lambda y: y):
        super().__init__()
        self.boxes, self.scores, self.dim, self.finish = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), dim, finish

    def forward(self, x):
        return self.finish(torch.cat([self.boxes(x), self.scores(x)], self.dim))


def trace(model, shape=(2, 3, 8, 8)):
    """Return the stored graph of a model, with a dynamic batch."""
    return clika_compile(model.eval(), tracing_inputs=[torch.rand(shape), torch.rand(1, *shape[1:])]).graph


@pytest.mark.parametrize(
    "finish",
    [lambda y: y, torch.sigmoid, lambda y: torch.relu(y) * 2.0, lambda y: torch.cat([y.abs(), y[:, :1]], 1)],
    ids=["alone", "sigmoid", "two operators", "nested"],
)
def test_output_branches_of_concatenation(finish):
    """Each operand is a branch, also before operators with one tensor, and in another concatenation."""
    graph = trace(Head(finish=finish))
    y = torch.arange(2.0 * 9 * 64).reshape(2, 9, 8, 8)[:, : 9 if graph.outputs[0].type.shape[1] == 9 else 8]
    branches = OutputBranches(graph.outputs)
    found = branches.split([y])
    expected = [y[:, :4], y[:, 4:8], *([y[:, 8:]] if y.shape[1] == 9 else [])]
    assert len(found) == len(expected) == len(branches.names) == len({*branches.names})
    for own, part in zip(found, expected, strict=True):
        assert torch.equal(own, part)


@pytest.mark.parametrize(
    "model",
    [Head(dim=0), Head(dim=2, finish=nn.Conv2d(4, 4, 1)), Head(finish=lambda y: y.sum(1)), nn.Conv2d(3, 4, 1)],
    ids=["batch", "before a layer", "summed", "no concatenation"],
)
def test_output_branches_otherwise_whole_output(model):
    """A concatenation along the batch, or before a node that mixes its operands, makes no branches."""
    graph = trace(model)
    (name,) = OutputBranches(graph.outputs).names
    assert name == graph.outputs[0].name


class Selection(nn.Module):
    """Detections: the boxes, scores and labels of all cells with a score above a half."""

    def __init__(self):
        super().__init__()
        self.features, self.boxes, self.scores = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 1)

    def forward(self, x):
        x = self.features(x).relu()
        boxes, scores = self.boxes(x), self.scores(x).sigmoid()[:, 0]
        kept = torch.where(scores > 0.5)[0]
        return boxes[kept], scores[kept], kept


def test_compared_outputs_of_selection_are_values_before_it():
    """The boxes and scores of all cells are compared, which have known sizes; nodes after them are not run."""
    graph = trace(Selection(), (6, 8))
    compared = ComparedOutputs(graph)
    assert sorted(str(v.type.shape[1:]) for v in compared.values) == ["()", "(4,)"]
    small = compared.make_graph()
    assert [v.name for v in small.outputs] == [v.name for v in compared.values]
    assert len(small) < len(graph)
    assert not any(node.op_type == "index" for node in small.nodes)


def test_compared_outputs_of_known_size_are_outputs():
    """Other graphs are compared by their float outputs, in the graph itself."""
    graph = trace(Head())
    assert ComparedOutputs(graph).values == tuple(graph.outputs)
    assert ComparedOutputs(graph).make_graph() is graph


def test_compute_weights_small_branch_counts_by_its_own_norm():
    """The large branch counts relative to the whole output, and the small one to half of its own norm."""
    branches = OutputBranches(trace(Head()).outputs)
    assert branches.compute_weights([400.0, 0.5]) == pytest.approx([1 / 400.5, 1 / (2 * 0.5)])
    assert branches.compute_weights([3.0, 0.0]) == pytest.approx([1 / 3, 1 / 3])
    assert branches.compute_weights([0.0, 0.0]) == [0, 0]


def test_compute_weights_of_several_outputs_is_mean():
    """Outputs without branches count equally, except those that are 0."""
    branches = OutputBranches([trace(nn.Conv2d(3, 4, 1)).outputs[0] for _ in range(3)])
    assert branches.compute_weights([4.0, 0.0, 8.0]) == pytest.approx([1 / 8, 0, 1 / 16])
