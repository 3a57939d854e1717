"""The inputs for comparing an artifact if no example is left, as in copies."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from clika_ref import clika_compile
from clika_ref.export.example_inputs import choose_example


class Embedded(nn.Module):
    """Looks up rows by float indices; random floats may be negative or too large for an index."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(10, 4)

    def forward(self, x):
        return self.rows(x.long())


def make_one_hot(x):
    return F.one_hot((x * 3).long(), 4)


def index_add(x):
    return torch.zeros(4, x.shape[1]).index_add(0, (x[0] * 4).long().clamp(max=3), x)


def find_largest_root(x):
    return torch.sqrt(x).argmax(-1)


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (Embedded(), torch.tensor([1.0, 2.0, 3.0])),
        (make_one_hot, torch.rand(2, 3)),
        (index_add, torch.rand(3, 3)),
        (find_largest_root, torch.rand(3, 5)),
    ],
    ids=["embedding", "one_hot", "index_add", "roots"],
)
def test_clika_export_copy_compared_on_valid_inputs(model, x, tmp_path):
    """A copied module is compared on inputs that its model accepts."""
    module = clika_compile(model, tracing_inputs=[x])
    copy.deepcopy(module).clika_export(tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx").exists()


def choose_example_for(function, x):
    module = clika_compile(function, tracing_inputs=[x])
    (found,) = choose_example(module.graph, [torch.ones_like(x)])
    return found


def test_choose_example_prefers_normal_then_positive():
    """Normal numbers are tried first, then positive numbers, then ones."""
    x = torch.rand(4, 5)
    assert (choose_example_for(lambda x: x * 2, x) < 0).any()
    rooted = choose_example_for(lambda x: x.sqrt().argmax(-1), x)
    assert (rooted >= 0).all()
    assert rooted.unique().numel() > 1
    ones = torch.ones(4, 5)
    assert torch.equal(
        choose_example_for(lambda x: torch.zeros(4, 5).index_select(0, x[0].floor().long() - 1), ones), ones
    )


def test_choose_example_inf_mask_keeps_normal_numbers():
    """A mask of infinities does not reject normal numbers."""
    found = choose_example_for(lambda x: x.masked_fill(torch.eye(4) > 0, -torch.inf).softmax(-1), torch.rand(4, 4))
    assert (found < 0).any()


def test_choose_example_float8_results_checked():
    """Results in float8 are checked for finite elements."""
    assert (choose_example_for(lambda x: x.to(torch.float8_e4m3fn).float(), torch.rand(4, 4)) < 0).any()


def test_choose_example_offsets_not_drawn():
    """Offsets of bags are never drawn at random."""
    module = clika_compile(nn.EmbeddingBag(10, 3), tracing_inputs=[(torch.tensor([1, 2, 4]), torch.tensor([0, 2]))])
    dummy = [torch.ones(3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)]
    assert choose_example(module.graph, dummy) is dummy
