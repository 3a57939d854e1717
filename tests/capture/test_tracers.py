"""The third tracer takes what the first two take: modules, methods and functions."""

import pytest
import torch
from torch import nn

from clika_ref.capture.callables import callee_of
from clika_ref.capture.inputs import ModelCall
from clika_ref.capture.tracers import TRACERS, applicable, trace


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def infer(self, x):
        return self.layer(x) + 1

    def forward(self, x):
        return self.infer(x) * 2


def double(x):
    return x * 2


MODEL = Model()


@pytest.mark.parametrize("tracer", applicable(dynamic=False), ids=lambda t: t.name)
@pytest.mark.parametrize("traced", [MODEL, MODEL.infer, double], ids=["module", "method", "function"])
def test_every_tracer_takes_modules_methods_and_functions(tracer, traced):
    callee = callee_of(traced)
    x = torch.randn(3, 2)
    with callee.as_module() as module:
        program = trace(tracer, module, ModelCall((x,), {}), None)
    assert torch.equal(program.module()(x), traced(x))


def test_static_sides_need_no_second_treatment_of_zero_and_one():
    assert len(applicable(dynamic=True)) == len(TRACERS) == len(applicable(dynamic=False)) + 1
