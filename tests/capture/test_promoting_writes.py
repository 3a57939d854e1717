"""In-place calls with operands of a higher dtype: computed as in eager, then cast back."""

import pytest
import torch
from torch import nn

from clika_ref import clika_compile


def add_int_to_uint8(x):
    return x.to(torch.uint8).add_(x.int()).float()


def write_float_to_half(x):
    return x.half().mul_(x), x.half().div_(x), x.half().clamp_(min=x), x.abs().half().pow_(x)


def add_long_to_int(x):
    y = (x * 10).int()
    y += (x * 2**33).long()
    return y


def write_into_float64(x):
    total, smallest = torch.empty(x.shape, dtype=torch.float64), torch.empty_like(x, dtype=torch.float64)
    torch.add(x, x, out=total)
    torch.minimum(x, x[0], out=smallest)
    return total, smallest


def compare_in_place(x):
    return x.clone().ge_(0.0), x.clone().eq_(x[0]), x.clone().lt_(x[:1])


def write_logical(x):
    return x.round().logical_not_(), x.clone().logical_and_(x.round()), (x > 0).logical_or_(x.round())


def write_through_views(x):
    y = x.half()
    y[:, 1:].mul_(x[:, 1:])
    y[0] += x.sum(0)
    return y


@pytest.mark.parametrize("shapes", [1, 2], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    "function",
    [
        add_int_to_uint8,
        write_float_to_half,
        add_long_to_int,
        write_into_float64,
        compare_in_place,
        write_logical,
        write_through_views,
    ],
)
def test_promoting_write_cast_to_destination(compile_and_compare, function, shapes):
    """The result of an in-place call is cast to the dtype of its destination."""
    inputs = [torch.rand(3, 4) * 100, torch.rand(5, 4) * 100][:shapes]
    compile_and_compare(function, inputs, [torch.full((3, 4), 200.0), torch.randn(3, 4).abs()])


def test_promoting_write_uninformative_inputs_match_eager():
    """Uninformative tracing inputs still give the cast of eager."""
    module = clika_compile(add_int_to_uint8, tracing_inputs=[torch.ones(2, 4)])
    assert torch.equal(module(torch.full((2, 4), 200.0)), torch.full((2, 4), 144.0))  # 400 - 256


class HalfTotal(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(4, dtype=torch.float16))

    def forward(self, x):
        self.total += x.sum(0)
        return self.total * 2


def test_promoting_write_fp16_buffer_accumulates_floats(compile_and_compare):
    """An FP16 buffer accumulates float32 inputs."""
    assert compile_and_compare(HalfTotal(), [torch.randn(3, 4)]).total.dtype == torch.float16


class Autocast(nn.Module):
    """A function of a linear layer's result and its input, within autocast."""

    def __init__(self, compute):
        super().__init__()
        self.layer, self.compute = nn.Linear(4, 4), compute

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.compute(self.layer(x), x)


def add_residual(y, x):
    y += x
    return y.float()


def addmm_in_place(_, x):
    return x.clone().addmm_(x, x[:4].abs())


def mm_into_out(_, x):
    out = torch.empty(x.shape[0], x.shape[0])
    return torch.mm(x, x.t(), out=out)


@pytest.mark.parametrize("shapes", [1, 2], ids=["static", "dynamic"])
@pytest.mark.parametrize("compute", [add_residual, addmm_in_place, mm_into_out])
def test_promoting_write_autocast_does_not_cast(compute, shapes):
    """Autocast does not cast for in-place calls, compared bit by bit."""
    model = Autocast(compute)
    module = clika_compile(model, tracing_inputs=[torch.zeros(4, 4), torch.zeros(5, 4)][:shapes])
    x = torch.randn(4, 4)
    torch.testing.assert_close(module(x), model(x), rtol=0, atol=0)
