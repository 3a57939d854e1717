"""Numbers that a model in pieces reads from tensors, and sizes that no tracing input had."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from clika_ref import (
    DeploymentSettings_ONNXRuntime_ONNX,
    ModelError,
    PartialArtifact,
    PartialClikaModule,
    clika_compile,
)
from clika_ref.partial_graphs.dynamic_sizes import RECOMPILE_LIMIT

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # of Dynamo, which hides it from users

ONNX_RUNTIME = DeploymentSettings_ONNXRuntime_ONNX()


def compile_in_pieces(model, inputs):
    module = clika_compile(model.eval(), tracing_inputs=inputs, fullgraph=False)
    assert isinstance(module, PartialClikaModule)
    return module


class Reading(nn.Module):
    """Reads numbers from a tensor: compares one, and computes with the others."""

    def __init__(self, computes: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.computes = computes

    def forward(self, x):
        y = torch.relu(self.first(x))
        number, count = float(y.detach().max()), int(10 * y.detach().sum()) + 2
        if number > 1e9:
            raise ValueError("overflow")
        y = self.second(y)
        return y * number + (number + 1) / count if self.computes else y


@pytest.mark.slow
@pytest.mark.parametrize("computes", [False, True])
def test_numbers_read_from_tensors_need_no_further_graphs(computes, tmp_path):
    """Neither the module nor its runner compiles another graph for another value."""
    torch.manual_seed(0)
    model = Reading(computes).eval()
    compiled = compile_in_pieces(copy.deepcopy(model), [torch.randn(2, 8), torch.randn(3, 8)])
    compiled.clika_export(tmp_path / "exported", ONNX_RUNTIME)
    runner = PartialArtifact.load(tmp_path / "exported").bind(copy.deepcopy(model))
    runner(torch.randn(2, 8))
    before = counters["stats"]["unique_graphs"]
    for size in range(RECOMPILE_LIMIT + 2):
        x = torch.randn(1 + size % 7, 8)
        torch.testing.assert_close(compiled(x), model(x))
        torch.testing.assert_close(runner(x), model(x).detach(), atol=1e-4, rtol=1e-4)  # other kernels
    assert counters["stats"]["unique_graphs"] == before


def take_left_half(x):
    count = int(x.abs().max().item()) + 1
    return x[:, :2] * count, count, x.max().item() * 2


class ReturningNumbers(nn.Module):
    """Returns an integer and a float that it reads from a tensor; its own code makes no graph."""

    def forward(self, *args):
        return take_left_half(*args)


@pytest.mark.slow
def test_numbers_returned_by_a_model_in_pieces(tmp_path):
    """The pieces return them as tensors, and the model as numbers, without further graphs."""
    torch.manual_seed(0)
    model = ReturningNumbers()
    compiled = compile_in_pieces(ReturningNumbers(), [torch.randn(1, 4), 5 * torch.randn(2, 4)])
    compiled.clika_export(tmp_path / "exported", ONNX_RUNTIME)
    runner = PartialArtifact.load(tmp_path / "exported").bind(ReturningNumbers())
    runner(torch.randn(2, 4))
    before = counters["stats"]["unique_graphs"]
    for size in range(1, 9):
        x = size * torch.randn(size, 4)
        for call in (compiled, runner):
            found, expected = call(x), model(x)
            assert [type(item) for item in found] == [type(item) for item in expected]
            torch.testing.assert_close(found, expected)
    assert counters["stats"]["unique_graphs"] == before
    assert not any(piece.eager_reason for piece in compiled.clika_pieces)


@pytest.mark.slow
def test_number_of_one_tracing_input_compared_in_few_graphs():
    """A comparison needs no input, so that the number becomes dynamic after some values."""
    torch.manual_seed(0)
    model = Reading(computes=False).eval()
    compiled = compile_in_pieces(copy.deepcopy(model), [torch.randn(2, 8)])
    for _ in range(RECOMPILE_LIMIT + 2):
        x = torch.randn(2, 8)
        torch.testing.assert_close(compiled(x), model(x))


class CheckedLayer(nn.Module):
    """Branches on the elements of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        if x.isnan().any():
            raise ValueError("NaN")
        return self.linear(x)


class Rated(nn.Module):
    """Layers with a number each, which is the same in all calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CheckedLayer() for _ in range(3))

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = normalize(layer(x), 10.0**-index)
        return x


def normalize(x, eps):
    if x.isnan().any():
        return x
    return torch.layer_norm(x, (32,), eps=eps)


@pytest.mark.slow
def test_number_of_a_layer_is_a_constant():
    """Its values are the same in each call of the model, so that it may be an attribute of an operator."""
    torch.manual_seed(0)
    model, x = Rated().eval(), torch.randn(4, 32)
    compiled = compile_in_pieces(copy.deepcopy(model), [x[:2], x[:3]])
    torch.testing.assert_close(compiled(x), model(x))
    assert not any(piece.eager_reason for piece in compiled.clika_pieces)


@pytest.mark.slow
def test_size_that_no_input_had_rejected(caplog):
    """The message names the argument, both sizes and the line, and Dynamo logs nothing."""
    compiled = compile_in_pieces(Reading(computes=False), [torch.ones(2, 8), torch.ones(3, 8)])
    expected = (
        r"forward at .*: x has size \[4, 2\], but \[any, 8\] in all tracing inputs: a and b must have same reduction "
        r"dim, .*\(at test_numbers_and_sizes.py:\d+\)\. To make a dim dynamic, compile with tracing inputs"
    )
    with pytest.raises(ModelError, match=expected):
        compiled(torch.ones(4, 2))
    with pytest.raises(ModelError, match=r"x has size \[8\], but \[any, 8\] in all tracing inputs\. To make"):
        compiled(torch.ones(8))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


class Wrapped(nn.Module):
    """Calls a library module before a loop with breaks, which Python runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.layers = nn.ModuleList(CheckedLayer() for _ in range(2))

    def forward(self, x):
        x = self.linear(x)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.slow
def test_size_for_a_library_module_rejected():
    """Python calls it, so that the error has no line."""
    compiled = compile_in_pieces(Wrapped(), [torch.ones(2, 32), torch.ones(3, 32)])
    with pytest.raises(ModelError, match=r"a and b must have same reduction dim, but got .* X \[32, 32\]"):
        compiled(torch.ones(2, 7))


@pytest.mark.slow
def test_dtype_that_no_input_had_rejected():
    """The message names the piece."""
    compiled = compile_in_pieces(Wrapped(), [torch.ones(2, 32), torch.ones(3, 32)])
    with pytest.raises(ModelError, match=r"linear, forward of linear: input .* does not match float32"):
        compiled(torch.ones(2, 32, dtype=torch.float64))
