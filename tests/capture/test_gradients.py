"""Gradients that a trace loses: the backward of an autograd.Function, which a warning names."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from clika_ref import clika_compile


class Round(torch.autograd.Function):
    """A straight-through estimator: the gradient passes as if nothing had been rounded."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 1.2))

    def forward(self, x):
        return Round.apply(self.weight) * x + Round.apply(x)


class Written(Quantized):
    """The same estimator as operations."""

    def forward(self, x):
        return (self.weight + (self.weight.round() - self.weight).detach()) * x


X = torch.ones(2, 3)


def test_a_warning_names_each_autograd_function_once_with_its_line(tmp_path, capsys):
    applies = torch.autograd.Function.__dict__["apply"]
    module = clika_compile(Quantized(), tracing_inputs=[X, torch.ones(4, 3)], logs_dir=tmp_path)
    assert torch.equal(module(X), 2 * X)
    (log,) = tmp_path.iterdir()
    text = log.read_text()
    warning = (
        "Warning: Round, a torch.autograd.Function called at test_gradients.py:29, keeps its forward and loses its"
    )
    assert text.count(warning) == 1
    assert "write it as operations, such as x + (round(x) - x).detach()" in text
    assert "loses its" in capsys.readouterr().err
    assert torch.autograd.Function.__dict__["apply"] is applies


def test_what_the_warning_advises_keeps_the_gradient(tmp_path):
    module = clika_compile(Written(), tracing_inputs=[X], logs_dir=tmp_path)
    module(X).sum().backward()
    assert torch.equal(module.weight.grad, torch.full((3,), 2.0))
    assert "Warning" not in next(tmp_path.iterdir()).read_text()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_loses_nothing_and_gives_no_warning(tmp_path, reentrant):
    def checkpointed(x):
        return checkpoint(torch.sin, x, use_reentrant=reentrant)

    clika_compile(checkpointed, tracing_inputs=[X.clone().requires_grad_()], logs_dir=tmp_path)
    assert "Warning" not in next(tmp_path.iterdir()).read_text()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo itself does
def test_the_dynamo_backend_warns_too(tmp_path):
    torch._dynamo.reset()
    torch.compile(Quantized(), backend="clika", options={"logs_dir": tmp_path})(X)
    assert (
        "Warning: A class that Dynamo does not name, a torch.autograd.Function, keeps its"
        in next(tmp_path.iterdir()).read_text()
    )
