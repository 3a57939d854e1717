"""New state is written after all reads, so that results and gradients of overwritten values are correct."""

import copy

import pytest
import torch
from torch import nn

from clika_ref import clika_compile
from clika_ref.core.fx_execution import snapshot_state


@pytest.fixture(params=[True, False], ids=["recorded", "unrecorded"])
def _gradients(request):
    """With gradients all state that is read is copied first; without them only tensors that results share."""
    with torch.set_grad_enabled(request.param):
        yield


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


@pytest.mark.usefixtures("_gradients")
def test_clika_module_value_before_update_returned():
    """A value that was read before an update is returned unchanged."""
    module = clika_compile(Counter(), tracing_inputs=[torch.ones(3)], discard_input_model=False)
    for step in range(3):
        assert torch.equal(module(torch.ones(3)), torch.full((3, 1), float(step)))
    assert torch.equal(module.get_buffer("count"), torch.full((3,), 3.0))


@pytest.mark.usefixtures("_gradients")
def test_clika_module_swaps_two_buffers():
    """A model can swap two buffers."""
    module = clika_compile(Swap(), tracing_inputs=[torch.zeros(2)], discard_input_model=False)
    assert torch.equal(module(torch.zeros(2)), torch.ones(2))
    assert torch.equal(module.get_buffer("a"), torch.ones(2))
    assert torch.equal(module.get_buffer("b"), torch.zeros(2))


@pytest.mark.usefixtures("_gradients")
def test_clika_module_overwritten_input_keeps_earlier_copy():
    """Overwriting an input does not change an earlier copy of it."""

    def double(x):
        before = x.clone()
        x.mul_(2)
        return before.unsqueeze(0)

    module = clika_compile(double, tracing_inputs=[torch.ones(2)])
    x = torch.full((2,), 3.0)
    assert torch.equal(module(x), torch.full((1, 2), 3.0))
    assert torch.equal(x, torch.full((2,), 6.0))


class Trained(nn.Module):
    """A weight and a buffer; the tested call overwrites values that it has read."""

    def __init__(self, call):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.register_buffer("scale", torch.tensor([3.0, 4.0]))
        self.call = call

    def forward(self, x):
        return self.call(self, x)


def assign_buffer(model, x):
    y = x * model.weight * model.scale
    model.scale = model.scale * 0.9 + y.detach().mean(0)
    return y


def write_buffer(model, x):
    y = x * model.weight * model.scale.clone()
    model.scale.mul_(0.9)
    return y


def write_weight(model, x):
    y = x.exp() * model.weight.clone()
    with torch.no_grad():
        model.weight.mul_(0.9)
    return y * model.weight


def write_input(model, x):
    y = x.clone() * model.weight
    x.add_(1)
    return y


@pytest.mark.parametrize("call", [assign_buffer, write_buffer, write_weight, write_input])
def test_clika_module_write_after_read_trains(call):
    """The backward pass works after the call has overwritten tensors that it read."""
    eager = Trained(call)
    module = clika_compile(copy.deepcopy(eager), tracing_inputs=[torch.ones(2, 2)])
    given = torch.randn(2, 2, requires_grad=True)
    for _ in range(2):
        for model in (eager, module):
            model(given * 1).square().sum().backward()
        torch.testing.assert_close(module.weight.grad, eager.weight.grad)
    torch.testing.assert_close(module.scale, eager.scale)


def test_snapshot_state_unshared_copied_for_gradients_only():
    """Unshared state is copied only if gradients are recorded."""
    state = torch.ones(2)
    assert snapshot_state(state, is_shared=False) is not state
    with torch.no_grad():
        assert snapshot_state(state, is_shared=False) is state
