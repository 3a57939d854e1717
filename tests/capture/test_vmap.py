"""`torch.vmap` becomes calls on whole batches, whose size is dynamic."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state

from clika_ref import ModelError, clika_compile

FUNCTIONS = {
    "product": torch.vmap(lambda a: a.t() @ a),
    "two tensors": lambda x: torch.vmap(torch.mul)(x, x.sum(2, keepdim=True)),
    "reductions": torch.vmap(lambda a: a.sum(0) * a.mean()),
    "softmax": torch.vmap(lambda a: a.softmax(-1)[0]),
    "another dim": torch.vmap(lambda a: 2 * a, in_dims=1, out_dims=2),
    "several results": lambda x: torch.vmap(lambda a: (a + 1, a.amax()))(x)[1],
    "nested": lambda x: torch.vmap(torch.vmap(lambda a, b: a * b.sum(), in_dims=(0, None)))(x, x),
    "two regions": lambda x: torch.vmap(torch.exp)(torch.vmap(torch.sin)(x) + 1),
    "a tensor of all": lambda x: torch.vmap(torch.dot, in_dims=(1, None))(x[:, 0], x[:, 0, 0]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap_matches_eager_at_other_sizes(name, tmp_path):
    """The graph serves batches and lengths that were never traced, and so does the file."""
    function = FUNCTIONS[name]
    module = clika_compile(function, tracing_inputs=[torch.randn(2, 2, 6), torch.randn(3, 2, 9)])
    for shape in ((4, 2, 7), (2, 2, 9)):
        x = torch.randn(shape)
        torch.testing.assert_close(module(x), function(x))
    module.clika_export(tmp_path / "model.onnx")


class Ensemble(nn.Module):
    """Networks of one structure, whose weights are stacked."""

    def __init__(self):
        super().__init__()
        members = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(3)]
        stacked, _ = stack_module_state(members)
        self.names, self.stacked = [*stacked], nn.ParameterList(stacked.values())
        self.__dict__["member"] = copy.deepcopy(members[0]).to("meta")

    def forward(self, x):
        weights = dict(zip(self.names, self.stacked, strict=True))
        call = torch.vmap(lambda own, x: functional_call(self.member, own, (x,)), in_dims=(0, None))
        return call(weights, x).mean(0)


def test_vmap_over_weights_trains():
    """An ensemble over stacked weights has the results and the gradients of eager."""
    model = Ensemble()
    module = clika_compile(model, tracing_inputs=[torch.randn(2, 4), torch.randn(3, 4)], discard_input_model=False)
    x = torch.randn(5, 4)
    for each in (model, module):
        each(x).square().sum().backward()
    torch.testing.assert_close(module(x), model(x))
    gradients = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close({name: p.grad for name, p in module.named_parameters()}, gradients)


def test_vmap_call_without_operator_named():
    """A call inside a region that no operator serves is named."""
    with pytest.raises(ModelError, match=r"airy_ai"):
        clika_compile(torch.vmap(torch.special.airy_ai), tracing_inputs=[torch.randn(2, 3)])


def test_vmap_of_convolution_serves_any_mapped_size():
    """A convolution mapped over a dynamic dim agrees with eager, also for more rows than NNPACK needs (16)."""
    convolve = lambda a: torch.nn.functional.conv1d(a[None], torch.ones(4, 2, 3))[0]  # noqa: E731
    function = torch.vmap(convolve, in_dims=1, out_dims=1)
    module = clika_compile(function, tracing_inputs=[torch.randn(2, 3, 9), torch.randn(2, 5, 11)])
    for rows in (1, 4, 24):
        x = torch.randn(2, rows, 10)
        torch.testing.assert_close(module(x), function(x))


def test_vmap_of_convolution_over_weights_agrees():
    """A convolution whose weights differ between the rows agrees with eager."""
    weights = torch.randn(3, 4, 2, 3)
    function = lambda x: torch.vmap(torch.nn.functional.conv1d, in_dims=(None, 0))(x, weights)  # noqa: E731
    module = clika_compile(function, tracing_inputs=[torch.randn(1, 2, 9), torch.randn(2, 2, 11)])
    x = torch.randn(4, 2, 10)
    torch.testing.assert_close(module(x), function(x))
