"""Parameters that ``forward`` writes to: captured where a trace sees it, refused by name elsewhere, always undone."""

import pytest
import torch
from torch import nn

from clika_ref import ModelError, clika_compile


class Writing(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.write = write

    def forward(self, x):
        self.write(self.weight)
        return x * self.weight


def adds(weight):
    with torch.no_grad():
        weight.add_(1)


def doubles_data(weight):
    weight.data.mul_(2)


def assigns_data(weight):
    weight.data = weight.data * 2


@pytest.mark.parametrize("discard", [True, False])
def test_a_parameter_that_is_written_to_follows_eager_and_is_left_as_it_was(discard):
    model, reference, x = Writing(adds), Writing(adds), torch.ones(2, 3)
    module = clika_compile(model, tracing_inputs=[x, torch.ones(4, 3)], discard_input_model=discard)
    assert torch.equal(model.weight, torch.ones(3))
    for _ in range(2):
        assert torch.equal(module(x), reference(x))


@pytest.mark.parametrize("discard", [True, False])
@pytest.mark.parametrize(
    ("write", "message"),
    [
        (doubles_data, r"writes to the parameters weight where no trace sees it, .* self.weight.copy_\(...\)"),
        (assigns_data, r"forward assigns to the .data of 'weight', which no graph can hold; write to it in place"),
    ],
)
def test_writes_that_no_trace_shows_are_refused_by_name_and_undone(discard, write, message):
    model = Writing(write)
    with pytest.raises(ModelError, match=message):
        clika_compile(model, tracing_inputs=[torch.ones(2, 3)], discard_input_model=discard)
    assert torch.equal(model.weight, torch.ones(3))


def test_giving_a_weight_a_copy_of_its_data_is_no_write():
    def moved(weight):
        weight.data = weight.data.clone()

    model = Writing(moved)
    with pytest.raises(ModelError) as caught:  # tracers refuse the assignment itself
        clika_compile(model, tracing_inputs=[torch.ones(2, 3)])
    assert "assigns to the .data" not in str(caught.value)
