"""Parameters that ``forward`` writes to: captured if traced, otherwise rejected by name, and always restored."""

import pytest
import torch
from torch import nn

from clika_ref import ModelError, clika_compile


class Writing(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.write, self.held = write, [self.weight.detach()]

    def forward(self, x):
        self.write(self)
        return x * self.weight


def add_to_weight(model):
    with torch.no_grad():
        model.weight.add_(1)


def double_data(model):
    model.weight.data.mul_(2)


def double_kept_weight(model):
    model.held[0].mul_(2)


def double_outside_tracing(model):
    if not torch.compiler.is_compiling() and isinstance(model.weight, nn.Parameter):
        model.weight.data.mul_(2)


def assign_data(model):
    model.weight.data = model.weight.data * 2


@pytest.mark.parametrize("discard", [True, False])
@pytest.mark.parametrize("write", [add_to_weight, double_data])
def test_parameter_write_follows_eager_and_undone(discard, write):
    """A written parameter follows eager, and the original is restored."""
    model, reference, x = Writing(write), Writing(write), torch.ones(2, 3)
    module = clika_compile(model, tracing_inputs=[x, torch.ones(4, 3)], discard_input_model=discard)
    assert torch.equal(model.weight, torch.ones(3))
    for _ in range(2):
        assert torch.equal(module(x), reference(x))


@pytest.mark.parametrize("discard", [True, False])
@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            double_outside_tracing,
            r"writes to weight in a way that this trace does not record, .* self.weight.copy_\(...\)",
        ),
        (
            assign_data,
            r"forward assigns to the .data of 'weight', which a graph cannot represent. Write to it in place",
        ),
    ],
)
def test_parameter_write_without_trace_rejected(discard, write, message):
    """Writes that the trace does not see raise an error and are undone."""
    model = Writing(write)
    with pytest.raises(ModelError, match=message):
        clika_compile(model, tracing_inputs=[torch.ones(2, 3)], discard_input_model=discard)
    assert torch.equal(model.weight, torch.ones(3))


def test_parameter_data_assigned_own_copy_accepted():
    """Assigning a copy of its own data to a weight is no write."""

    def replace_data(model):
        model.weight.data = model.weight.data.clone()

    x = torch.ones(2, 3)
    module = clika_compile(Writing(replace_data), tracing_inputs=[x])
    assert torch.equal(module(x), x)


def test_parameter_data_read_detached_and_follows_weight():
    """Reading `.data` stops gradients and follows the weight."""

    class Reads(Writing):
        def forward(self, x):
            return (x * self.weight.data).data.exp() * self.weight

    model, x = Reads(add_to_weight), torch.randn(2, 3)
    module = clika_compile(model, tracing_inputs=[x, torch.randn(4, 3)], discard_input_model=False)
    for net in (model, module):
        net(x).sum().backward()
    torch.testing.assert_close(module.weight.grad, model.weight.grad)
    with torch.no_grad():
        model.weight.mul_(2)
        module.weight.mul_(2)
    torch.testing.assert_close(module(x), model(x))


def test_parameter_written_through_other_reference():
    """A write to a tensor that is the whole memory of a weight is a write to the weight."""
    model = Writing(double_kept_weight)
    module = clika_compile(model, tracing_inputs=[torch.ones(2, 3)], discard_input_model=False)
    assert torch.equal(model.weight, torch.ones(3))
    for _ in range(2):
        torch.testing.assert_close(module(torch.ones(2, 3)), model(torch.ones(2, 3)))
    torch.testing.assert_close(module.weight, model.weight)


def test_parameter_sharing_written_memory_rejected():
    """A weight that shares the memory of a written tensor raises an error."""
    model = Writing(double_kept_weight)
    model.held = [model.weight.detach()[1:]]
    with pytest.raises(ModelError, match="'weight' shares memory with another parameter, buffer or tensor that forw"):
        clika_compile(model, tracing_inputs=[torch.ones(2, 3)], discard_input_model=False)
    assert torch.equal(model.weight, torch.ones(3))


class SharedNorm(nn.Module):
    """One batch norm under two names."""

    def __init__(self):
        super().__init__()
        norm = nn.BatchNorm1d(3)
        self.heads = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), norm) for _ in range(2)])

    def forward(self, x):
        return sum(head(x) for head in self.heads)


class TiedWeight(nn.Module):
    """One weight under two names; forward writes to one of them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.first.weight = self.last.weight

    def forward(self, x):
        with torch.no_grad():
            self.last.weight.mul_(0.5)
        return self.last(self.first(x))


@pytest.mark.parametrize("kind", [SharedNorm, TiedWeight])
def test_tied_tensor_written_under_both_names(kind):
    """A tensor under two names is written under both."""
    model = kind().train()
    options = {"skip_eval_set_mode": True, "discard_input_model": False}
    module = clika_compile(model, tracing_inputs=[torch.randn(4, 3)], **options)
    for _ in range(2):
        x = torch.randn(4, 3)
        torch.testing.assert_close(module(x), model(x))
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], tensor)
