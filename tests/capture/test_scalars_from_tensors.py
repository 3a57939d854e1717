"""Numbers that forward reads from tensors: without gradients, with Python's type promotion and arithmetic."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from clika_ref import clika_compile
from clika_ref.core.errors import ModelError

X = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) + 0.1


class Scaled(nn.Module):
    """A weight and a gain, combined by a function."""

    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 4))
        self.gain = nn.Parameter(torch.tensor(2.5))
        self.function = function

    def forward(self, x):
        return self.function(x * self.weight, self.gain)


def compute_gradients(model):
    """Train one step on X and return the gradient of every parameter."""
    model(X).pow(2).sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "function",
    [
        lambda y, gain: y * float(gain),
        lambda y, gain: y / y.norm().item(),
        lambda y, gain: (2 * y).clamp(max=gain.item()),
        lambda y, gain: y.masked_fill(y > 1, gain.reshape(1).item()),
    ],
    ids=["float", "item of a result", "clamp", "one element with a dim"],
)
def test_item_stops_gradients(function):
    """No gradient flows through a number that is read from a tensor."""
    model = Scaled(function)
    module = clika_compile(copy.deepcopy(model), tracing_inputs=[X])
    torch.testing.assert_close(compute_gradients(module), compute_gradients(model))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: torch.arange(4) * n.item(),
        lambda x, n: n.item() - torch.arange(4),
        lambda x, n: x.sum() * n.item(),
        lambda x, n: x.half().sum() + n.item(),
        lambda x, n: x.double() * n.item(),
        lambda x, n: x.half() * 1e-4 * n.item(),
        lambda x, n: torch.lerp(x, x + 1, n.item()),
        lambda x, n: torch.where(x > 0.5, x, n.item()),
        lambda x, n: torch.full((3,), n.item()) + x.sum(),
        lambda x, n: x * torch.full_like(x, n.item()),
        lambda x, n: x.half().new_full((4, 1), n.item()),
    ],
)
def test_item_promotes_as_python_number(compile_and_compare, tmp_path, function, dtype):
    """A number that is read from a tensor promotes as a Python number."""
    module = compile_and_compare(function, [(X, torch.tensor(0.3, dtype=dtype))])
    module.clika_export(tmp_path / "promoted.onnx")


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: x * (n.item() * 2),
        lambda x, n: x / (1 - n.item() ** 0.5),
        lambda x, n: x * max(n.item(), 1.0) - min(2, n.item()),
        lambda x, n: x * (abs(-n.item()) + math.sqrt(n.item())),
        lambda x, n: x * (n.item() % 2 + n.item() // 2),
        lambda x, n: x * (n.item() / x.shape[0]) * x.sum().item(),
        lambda x, n: torch.arange(3) * round(n.item()),
        lambda x, n: torch.cat([x[: int(n)], x[: math.floor(n.item()) - 1], x[math.ceil(n.item() / 2) - 1 :]]),
    ],
)
def test_item_python_arithmetic_matches_eager(compile_and_compare, tmp_path, function):
    """Python arithmetic with a number from a tensor matches eager."""
    inputs = [(X, torch.tensor(2.7)), (torch.cat([X, X]), torch.tensor(3.5))]
    module = compile_and_compare(function, inputs, [(X, torch.tensor(1.1))])
    module.clika_export(tmp_path / "computed.onnx")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda x, n: x * (n.item() > 1),
            r"mul.* at test_scalars_from_tensors.py:\d+: it uses number > 1.0, a number read from",
        ),
        (
            lambda x, n: x * round(n.item(), 1),
            r"test_scalars_from_tensors.py:\d+: round of a number .* is not supported",
        ),
        (
            lambda x, n: x * (n > 1).item(),
            r"test_scalars_from_tensors.py:\d+: it uses Eq\(number, 1\), a number read from",
        ),
    ],
)
def test_item_unsupported_arithmetic_rejected_with_line(function, message):
    """Unsupported arithmetic with such a number raises an error with its line."""
    with pytest.raises(ModelError, match=message):
        clika_compile(function, tracing_inputs=[(X, torch.tensor(2.7))])


class Cache(nn.Module):
    """A cache that is filled from where the last call ended."""

    def __init__(self):
        super().__init__()
        self.register_buffer("position", torch.tensor(0))
        self.register_buffer("kept", torch.zeros(99, 4))

    def forward(self, x):
        start = self.position.item()
        self.kept[start : start + 3] = x
        self.position.add_(3)
        return self.kept.sum(0) * self.position.item()


def test_item_of_buffer_read_at_each_call(compile_and_compare, tmp_path):
    """An integer in a buffer is read again at each call."""
    module = compile_and_compare(Cache(), [X], [X, 2 * X])
    module.clika_export(tmp_path / "cache.onnx")


@pytest.mark.parametrize(
    "read", [lambda x, n: x * n.item(), lambda x, n: x[:, : n.item()], lambda x, n: x.expand(n, 3, 4)]
)
def test_item_of_buffer_may_change_between_calls(read):
    """An integer in a buffer may change between calls."""

    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.tensor(3))

        def forward(self, x):
            return read(x, self.count)

    module = clika_compile(Counted(), tracing_inputs=[X])
    module.count.fill_(2)
    torch.testing.assert_close(module(X), read(X, module.count))


def use_signed_integer(x, k):
    return x.roll(k, 1), x + k // 2, x * (k % 3), x * max(k, 0), x * abs(k), x[:, :k]


@pytest.mark.parametrize("read", [int, torch.tensor])
def test_item_negative_numbers_match_eager(tmp_path, read):
    """Negative integers match eager, also after pickling."""

    def model(x, k):
        return use_signed_integer(x, int(k))

    x = torch.arange(24.0).reshape(2, 12)
    compiled = clika_compile(model, tracing_inputs=[(x, read(3)), (x, read(5))], logs_dir=None)
    loaded = pickle.loads(pickle.dumps(compiled))  # noqa: S301 - just made
    for k in (-5, -1, 0, 1, 4):
        for module in (compiled, loaded):
            assert all(map(torch.equal, module(x, read(k)), model(x, k)))
    compiled.clika_export(tmp_path / "model.onnx")


def test_item_branch_on_sign_guarded():
    """A branch on the sign of an integer is guarded."""

    def model(x, k):
        return x * 2 if k >= 0 else x * 3

    compiled = clika_compile(model, tracing_inputs=[(torch.ones(2), 3), (torch.ones(2), 5)], logs_dir=None)
    assert torch.equal(compiled(torch.ones(2), 0), torch.full((2,), 2.0))
    with pytest.raises(ModelError, match=r"k = -1 .* violates k >= 0"):
        compiled(torch.ones(2), -1)


class Anchors(nn.Module):
    """Fills a tensor of a dynamic size with an element of a constant tensor, and writes to it, as detectors do."""

    def __init__(self):
        super().__init__()
        self.strides = torch.tensor([8.0, 16.0])

    def forward(self, x):
        filled = x.new_full((x.shape[-1], 1), self.strides[0])
        filled[0] += 1
        return filled * self.strides[1]


def test_new_full_of_constant_with_dynamic_size(tmp_path):
    """The size is dynamic, and the graph writes to the filled tensor."""
    model = Anchors()
    module = clika_compile(model, tracing_inputs=[torch.ones(2, 5), torch.ones(3, 8)])
    module.clika_export(tmp_path / "anchors.onnx")
    for size in (1, 6):
        assert torch.equal(module(torch.ones(4, size)), Anchors()(torch.ones(4, size)))
