"""Regions without gradients: their results, and other code that switches gradients on and off."""

import contextlib
import copy
import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from clika_ref import clika_compile
from clika_ref.capture import tracers
from clika_ref.core.errors import ModelError


class Layers(nn.Module):
    """A function of two linear layers, each with parameters of its own."""

    def __init__(self, compute):
        super().__init__()
        self.layer, self.head, self.compute = nn.Linear(4, 4), nn.Linear(4, 4), compute

    def forward(self, x):
        return self.compute(self, x)


def compute_gradients(module, x):
    """Return the gradient of each parameter and of the input, None where none arrives."""
    x = x.clone().requires_grad_()
    module(x).square().sum().backward()
    return {**{name: p.grad for name, p in module.named_parameters()}, "x": x.grad}


@pytest.fixture
def assert_gradients_match():
    """Return a function that compiles a model, and asserts that results and all gradients equal eager's."""

    def check(model, around=contextlib.nullcontext):
        model, x = copy.deepcopy(model), torch.randn(3, 4)
        with around():
            module = clika_compile(model, tracing_inputs=[x], discard_input_model=False)
        assert torch.equal(module(x), model(x))
        wanted, found = compute_gradients(model, x), compute_gradients(module, x)
        assert {name for name, g in found.items() if g is None} == {name for name, g in wanted.items() if g is None}
        for name, gradient in wanted.items():
            assert gradient is None or torch.allclose(found[name], gradient), name
        return module

    return check


def within_no_grad(change):
    """Return a computation that changes the output of the first layer without gradients."""

    def compute(net, x):
        y = net.layer(x)
        with torch.no_grad():
            y = change(y)
        return net.head(y)

    return compute


RETURNED = {
    "cast": lambda y: y.float(),
    "contiguous": lambda y: y.contiguous(),
    "dropout": lambda y: F.dropout(y, 0.5, training=False),
    "alpha dropout": lambda y: F.alpha_dropout(y, 0.5, training=False),
    "dropout of nothing": lambda y: torch.dropout(y, p=0.0, train=True),
    "written": lambda y: y.mul_(2),
    "cast and written": lambda y: y.float().mul_(2),
    "written as cast": lambda y: (y.float().add_(1), y)[1],
    "reshaped and written": lambda y: y.unsqueeze_(0).mul_(2),
    "written and reshaped": lambda y: y.mul_(2).unsqueeze_(0),
    "detached": lambda y: y.detach_(),
    "computed": lambda y: y * 2,
    "flattened by data": lambda y: y.nonzero().flatten().sum() + y[y[:, 0] > -9].flatten().view(3, 4),
    "viewed": lambda y: y.view(4, 3).view(3, 4),
    "written view": lambda y: y.view(12).mul_(2).view(3, 4),
}


@pytest.mark.parametrize("change", RETURNED.values(), ids=RETURNED)
def test_no_grad_region_results_have_eager_history(change, assert_gradients_match):
    """Results of a no_grad region have the autograd history of eager."""
    assert_gradients_match(Layers(within_no_grad(change)))


class Masked(nn.Module):
    """Combines masks without gradients by an operator that Python gives two underscores, and ATen too."""

    def __init__(self, combine):
        super().__init__()
        self.combine = combine

    def forward(self, x, mask):
        positive = x > 0
        with torch.no_grad():
            kept = self.combine(positive, mask)
        return x * kept, kept


@pytest.mark.parametrize(
    ("combine", "neutral"),
    [(torch.Tensor.__and__, True), (torch.Tensor.__or__, False), (torch.Tensor.__xor__, False)],
    ids=["and", "or", "xor"],
)
def test_no_grad_region_dunder_operator_returns_new_tensor(combine, neutral):
    """The result of `__and__` is not replaced by its first operand."""
    x = torch.randn(3, 4)
    inputs = [(x, torch.full((3, 4), neutral))]
    module = clika_compile(Masked(combine), tracing_inputs=inputs, discard_input_model=False)
    mask = torch.rand(3, 4) > 0.5
    for found, wanted in zip(module(x, mask), Masked(combine)(x, mask), strict=True):
        assert torch.equal(found, wanted)


class Double(torch.autograd.Function):
    """Doubles its operand, in a region that changes nothing: there are no gradients in the forward of a Function."""

    @staticmethod
    def forward(ctx, x):
        with torch.no_grad():
            return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class DoubleWithGradients(Double):
    """The same where the region would switch them on."""

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            y = x * 2
        return y + 0


def compute_partly_in_region(region):
    """Return a block of two layers, one of them in a region."""

    def block(net, x):
        with region():
            y = net.layer(x)
        return net.head(x) + y

    return block


def double_with_gradients(y):
    with torch.enable_grad():
        return y * 2


def checkpoint_block(net, x, block, *, use_reentrant):
    return net.head(checkpoint(partial(block, net), net.layer(x), use_reentrant=use_reentrant))


def checkpoint_nested(net, x):
    return net.head(checkpoint(partial(checkpoint, net.layer, use_reentrant=False), x, use_reentrant=False))


AFTER = {
    "function": lambda net, x: net.head(Double.apply(net.layer(x))),
    "function with gradients": lambda net, x: net.head(DoubleWithGradients.apply(net.layer(x))),
    "function in a region": within_no_grad(Double.apply),
    "checkpoint": lambda net, x: net.head(checkpoint(net.layer, x, use_reentrant=False)),
    "nested checkpoint": checkpoint_nested,
    "reentrant": partial(checkpoint_block, block=compute_partly_in_region(contextlib.nullcontext), use_reentrant=True),
    "reentrant, partly frozen": partial(
        checkpoint_block, block=compute_partly_in_region(torch.no_grad), use_reentrant=True
    ),
    "reentrant, partly trained": partial(
        checkpoint_block, block=compute_partly_in_region(torch.enable_grad), use_reentrant=True
    ),
    "reentrant in a region": within_no_grad(lambda y: checkpoint(double_with_gradients, y, use_reentrant=True)),
    "partly frozen": partial(checkpoint_block, block=compute_partly_in_region(torch.no_grad), use_reentrant=False),
}


@pytest.mark.parametrize("around", [contextlib.nullcontext, torch.no_grad], ids=["plain", "no_grad"])
@pytest.mark.parametrize("compute", AFTER.values(), ids=AFTER)
@pytest.mark.filterwarnings("ignore:.*requires_grad=True:UserWarning", "ignore:.*loses its backward:UserWarning")
def test_capture_functions_and_checkpoints_train_as_eager(compute, around, assert_gradients_match):
    """Autograd functions and checkpoints that switch gradients train as eager."""
    assert_gradients_match(Layers(compute), around)


@pytest.mark.parametrize("around", [contextlib.nullcontext, torch.no_grad], ids=["plain", "no_grad"])
def test_symbolic_trace_rejects_grad_regions(monkeypatch, around):
    """A symbolic trace rejects regions that it would lose."""
    model = Layers(within_no_grad(lambda y: y * 2))
    monkeypatch.setattr(tracers, "TRACERS", tracers.TRACERS[-1:])
    with around(), pytest.raises(ModelError, match="gradients are switched on or off for a region"):
        clika_compile(model, tracing_inputs=[torch.randn(3, 4)])
    module = clika_compile(Layers(lambda net, x: net.head(net.layer(x))), tracing_inputs=[torch.randn(3, 4)])
    assert module(torch.randn(3, 4)).shape == (3, 4)


class Scaled(torch.autograd.Function):
    """Takes a keyword argument."""

    @staticmethod
    def forward(ctx, x, by=2.0):
        ctx.by = by
        return x * by

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.by, None


@pytest.mark.filterwarnings("ignore:.*loses its backward:UserWarning")
def test_autograd_function_keywords_in_every_thread(monkeypatch, assert_gradients_match):
    """Autograd functions accept keyword arguments in every thread during a trace."""
    monkeypatch.setattr(tracers, "TRACERS", tracers.TRACERS[:1])
    failed: list[Exception] = []
    done = threading.Event()

    def apply_until_done():
        while not done.is_set():
            try:
                Scaled.apply(torch.ones(2, requires_grad=True), by=3.0).sum().backward()
            except Exception as error:  # noqa: BLE001 - whatever it is, a compilation must not raise it here
                failed.append(error)

    thread = threading.Thread(target=apply_until_done)
    thread.start()
    try:
        assert_gradients_match(Layers(lambda net, x: net.head(Scaled.apply(net.layer(x), by=3.0))))
    finally:
        done.set()
        thread.join()
    assert not failed
