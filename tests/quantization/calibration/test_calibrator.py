"""The calibrator records activations, stores batches whole or not at all, and rejects invalid data."""

import re

import pytest
import torch
from seeded_tensors import randn
from torch import nn

from clika_ref import clika_compile
from clika_ref.core.errors import ModelError
from clika_ref.quantization.calibration.calibrator import Calibration, Reservoir


def trace_graph(module, *inputs):
    return clika_compile(module, tracing_inputs=[inputs]).graph


def make_batches(count, *shape):
    return [randn(*shape, seed=i) for i in range(count)]


def test_calibration_records_float_activations_without_moves():
    """Every float activation is recorded, except results of data movement."""
    graph = trace_graph(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Flatten(), nn.Softmax(-1)), torch.zeros(2, 4))
    found = Calibration(graph)
    for x in make_batches(3, 2, 4):
        found.add([x])
    kinds = {v.producer.op.name if v.producer else "input" for v in graph.inputs} | {
        node.op.name for node in graph.nodes for v in node.outputs if v.name in found.table.values
    }
    assert kinds == {"input", "linear", "relu", "softmax"}
    assert found.table.batches == 3


def test_calibration_statistics_match_eager():
    """The statistics equal those of eager."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh()).eval()
    data = make_batches(5, 2, 4)
    expected = [module(x).detach() for x in data]
    graph = trace_graph(module, torch.zeros(2, 4))
    found = Calibration(graph)
    for x in data:
        found.add([x])
    statistics = found.table.values[graph.outputs[0].name]
    assert (statistics.low, statistics.high) == (min(t.min() for t in expected), max(t.max() for t in expected))
    assert statistics.histogram.total == sum(t.numel() for t in expected)


class Masked(nn.Module):
    def forward(self, x, keep):
        scores = x @ x.transpose(-1, -2)
        return torch.softmax(scores + torch.where(keep, 0.0, torch.finfo(x.dtype).min), -1) @ x


def test_calibration_masks_excluded_from_ranges():
    """Masked values are marked and do not change a range."""
    keep = torch.tensor([True, True, False])
    graph = trace_graph(Masked(), torch.zeros(3, 4), keep)
    found = Calibration(graph)
    found.add([make_batches(1, 3, 4)[0], keep])
    marked = {name for name, s in found.table.values.items() if s.is_unbounded}
    kinds = {v.producer.op.name for v in (v for n in graph.nodes for v in n.outputs) if v.name in marked}
    assert "add" in kinds
    assert "softmax" not in kinds
    assert "matmul" not in kinds
    assert all(abs(s.low) < 100 and abs(s.high) < 100 for s in found.table.values.values() if not s.is_empty)


@pytest.mark.parametrize(("bad", "kind"), [(torch.nan, "NaN"), (torch.inf, "infinity")])
def test_calibration_nan_or_inf_input_rejected_and_continues(bad, kind):
    """An input with NaN or inf raises an error, and calibration can continue."""
    found = Calibration(trace_graph(nn.Sequential(nn.Linear(4, 6)), torch.zeros(2, 4)))
    good, spoiled = make_batches(1, 2, 4)[0], torch.full((2, 4), bad)
    found.add([good])
    with pytest.raises(ModelError, match=rf"calibration batch 2: the input '\w+' contains {kind}\. Remove the batch"):
        found.add([spoiled])
    found.add([good])
    assert found.table.batches == 2
    assert all(s.batches == 2 for s in found.table.values.values())
    assert len(found.reservoir.batches) == 2


class Added(nn.Module):
    def forward(self, x, mask):
        return torch.softmax(x @ x.transpose(-1, -2) + mask, -1) @ x


def test_calibration_mask_of_infinities_as_input_accepted():
    """An input may be a mask of minus infinity, and no range contains the mask values."""
    mask = torch.tensor([0.0, -torch.inf, 0.0])
    found = Calibration(trace_graph(Added(), torch.zeros(3, 4), torch.zeros(3)))
    found.add([make_batches(1, 3, 4)[0], mask])
    assert found.table.values["mask"].is_unbounded
    for spoiled in (mask + 1, -mask, torch.full((3,), -torch.inf)):
        with pytest.raises(ModelError, match="the input 'mask' contains infinity"):
            found.add([make_batches(1, 3, 4)[0], spoiled])


class Root(nn.Module):
    def forward(self, x):
        return torch.sqrt(x - 1) + 1


def test_calibration_nan_names_node():
    """NaN inside of the graph names its node and the user's line."""
    found = Calibration(trace_graph(Root(), torch.ones(2)))
    with pytest.raises(ModelError, match=re.escape("from sqrt in ")) as caught:
        found.add([torch.zeros(2)])
    assert "calibration batch 1: %" in str(caught.value)
    assert "test_calibrator.py" in str(caught.value), "the user's line"
    assert found.table.batches == 0
    assert found.table.values == {}


class Logarithm(nn.Module):
    """Turns an infinite number into NaN, two nodes after the node that returns inf."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 3)
        nn.init.constant_(self.head.weight, 0.0)

    def forward(self, x):
        return self.head(torch.log(x).transpose(0, 1).reshape(-1, 2))


def test_calibration_nan_from_inf_names_source_node():
    """NaN that results from an infinite number also names the node of that number."""
    found = Calibration(trace_graph(Logarithm(), torch.ones(2, 4)))
    with pytest.raises(
        ModelError, match=r"from linear in head.*, contains NaN, since log in .* returns infinity. Remove"
    ):
        found.add([torch.zeros(2, 4)])


def test_calibration_failing_node_names_batch():
    """A node that fails raises an error that names the batch."""
    found = Calibration(trace_graph(nn.Embedding(5, 4), torch.zeros(3, dtype=torch.int64)))
    found.add([torch.tensor([0, 4, 1])])
    with pytest.raises(ModelError, match=r"calibration batch 2: .*embedding.* execution failed: .*index out of range"):
        found.add([torch.tensor([0, 5, 1])])
    assert found.table.batches == 1


def test_reservoir_keeps_copies_within_limit():
    """The reservoir keeps copies of the first batches within its limit."""
    found = Reservoir(limit_bytes=100)
    first = torch.zeros(20)
    for _ in range(3):
        found.offer([first])
    found.offer([torch.zeros(1)])
    first += 1
    assert [t.tolist() for (t,) in found.batches] == [[0.0] * 20]
    assert found.used_bytes == 80


def test_reservoir_keeps_one_batch_of_any_size():
    """The reservoir keeps at least one batch."""
    found = Reservoir(limit_bytes=1)
    found.offer([torch.zeros(20)])
    found.offer([torch.zeros(20)])
    assert len(found.batches) == 1
