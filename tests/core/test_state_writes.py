"""New state is written after everything was read: results that share memory with what is overwritten survive."""

import torch
from torch import nn

from clika_ref import clika_compile


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        before = self.count.clone()
        self.count.add_(x)
        return before.view(3, 1)


class Swap(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.zeros(2))
        self.register_buffer("b", torch.ones(2))

    def forward(self, x):
        kept = self.a.clone()
        self.a.copy_(self.b)
        self.b.copy_(kept)
        return x + self.a


def test_what_was_read_before_an_update_is_returned_as_it_was():
    module = clika_compile(Counter(), tracing_inputs=[torch.ones(3)], discard_input_model=False)
    for step in range(3):
        assert torch.equal(module(torch.ones(3)), torch.full((3, 1), float(step)))
    assert torch.equal(module.get_buffer("count"), torch.full((3,), 3.0))


def test_two_buffers_change_places():
    module = clika_compile(Swap(), tracing_inputs=[torch.zeros(2)], discard_input_model=False)
    assert torch.equal(module(torch.zeros(2)), torch.ones(2))
    assert torch.equal(module.get_buffer("a"), torch.ones(2))
    assert torch.equal(module.get_buffer("b"), torch.zeros(2))


def test_an_input_that_is_overwritten_does_not_change_its_earlier_copy():
    def double(x):
        before = x.clone()
        x.mul_(2)
        return before.unsqueeze(0)

    module = clika_compile(double, tracing_inputs=[torch.ones(2)])
    x = torch.full((2,), 3.0)
    assert torch.equal(module(x), torch.full((1, 2), 3.0))
    assert torch.equal(x, torch.full((2,), 6.0))
