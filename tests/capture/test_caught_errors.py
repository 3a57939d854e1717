"""Errors of tracers that a model catches: the trace would take another path than eager."""

import contextlib

import pytest
import torch
from torch import nn

from clika_ref import clika_compile
from clika_ref.core.errors import ModelError


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)


class Raising(Model):
    """Catches ValueError, which torch.fx also raises for a branch."""

    def forward(self, x):
        try:
            if x.max() > 0.5:
                raise ValueError  # noqa: TRY301 - as models do
        except ValueError:
            return self.layer(x)
        return x


class Suppressing(Model):
    def forward(self, x):
        with contextlib.suppress(Exception):
            scale = float(x.abs().max())
            x = x / 2 if scale > 1 else x
        return self.layer(x)


class Asking(Model):
    def __init__(self, ask, error):
        super().__init__()
        self.ask, self.error = ask, error

    def forward(self, x):
        try:
            found = self.ask(x)
        except self.error:
            found = True
        return self.layer(x) if found else x


MODELS = {
    "a branch": Raising(),
    "a suppressed float": Suppressing(),
    "float": Asking(lambda x: float(x.max()) > 0.5, Exception),
    "an array of NumPy's": Asking(lambda x: bool(x.numpy().max() > 0.5), RuntimeError),
    "equal": Asking(lambda x: torch.equal(x, x + 1), RuntimeError),
    "an index": Asking(lambda x: [False, True][(x.max() > 0.5).long()], Exception),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_capture_model_catching_tracer_error_rejected(model):
    """A model that catches an error of the tracer raises an error with the line."""
    with pytest.raises(ModelError, match=r"the model caught a \w+ at test_caught_errors.py:\d+: ") as caught:
        clika_compile(model, tracing_inputs=[torch.rand(2, 3) + 0.5])
    assert "choose with torch.where(condition, a, b)" in str(caught.value)


def test_capture_model_catching_eager_error_accepted(compile_and_compare):
    """A model may catch errors that eager raises too."""

    def catch_eager_error(x):
        try:
            return x.transpose(0, 1).squeeze(7)
        except IndexError:
            return x * 2

    compile_and_compare(catch_eager_error, [torch.rand(2, 3)])


def test_capture_model_catching_own_error_accepted(compile_and_compare):
    """A model may catch its own errors."""

    def catch_key_error(x):
        try:
            return x * {"b": 2}["a"]
        except KeyError:
            return x * 3

    compile_and_compare(catch_key_error, [torch.rand(2, 3), torch.rand(4, 3)])
