"""Derivatives that a model computes in forward become calls, whose sizes are dynamic."""

import pytest
import torch
from torch import nn
from torch.autograd import grad
from torch.nn import functional

from clika_ref import ModelError, clika_compile

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
"""PyTorch scripts the formulas of forward derivatives."""

TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "grad and value": lambda f, x: torch.func.grad_and_value(lambda y: (f(y).sum(), 2 * y), has_aux=True)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones_like(x[:, :2]))[0],
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacrev": lambda f, x: torch.func.jacrev(lambda y: f(y).sum(0))(x),
    "jacfwd of each sample": lambda f, x: torch.vmap(torch.func.jacfwd(f))(x),
    "jacrev of each sample": lambda f, x: torch.vmap(torch.func.jacrev(f))(x),
    "hessian of each sample": lambda f, x: torch.vmap(torch.func.hessian(lambda y: f(y).sum()))(x),
}


class Derivative(nn.Module):
    """A network, and a derivative of it."""

    def __init__(self, transform):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        self.transform = transform

    def forward(self, x):
        return self.transform(self.net, x)


def compare_with_eager(model, make_input, folder):
    """Compare the results and gradients at sizes that were never traced, and the exported file."""
    module = clika_compile(model, tracing_inputs=[make_input(4), make_input(7)], discard_input_model=False)
    x = make_input(5)
    for each in (model, module):
        each.zero_grad()
        found = [y for y in torch.utils._pytree.tree_leaves(each(x.clone())) if y.requires_grad]
        if found:
            sum(y.square().sum() for y in found).backward()
    torch.testing.assert_close(module(x.clone()), model(x.clone()))
    gradients = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close({name: p.grad for name, p in module.named_parameters()}, gradients)
    module.clika_export(folder / "model.onnx")


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transform_matches_eager_at_other_sizes(name, tmp_path):
    """Transforms of `torch.func`, also nested, have the results and gradients of eager."""
    compare_with_eager(Derivative(TRANSFORMS[name]), lambda n: torch.randn(n, 3), tmp_path)


def stop_gradients(f, x):
    """Return a derivative with a part without gradients, and a detached one."""

    def compute(y):
        with torch.no_grad():
            factor = f(y)
        return (f(y) * factor + f(y.tanh()).detach() * y[:, :2]).sum()

    return torch.func.grad(compute)(x)


def test_grad_keeps_detached_parts_constant(tmp_path):
    """Parts under no_grad and detached ones have no gradient, neither in forward nor in training."""
    compare_with_eager(Derivative(stop_gradients), lambda n: torch.randn(n, 3), tmp_path)


def differentiate(f, x, **options):
    """Return ``-d f(x) / d x``."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return -torch.autograd.grad(f(x).sum(), x, **options)[0]


def adapt_weights(f, x):
    """Return the results of the weights after a step of gradient descent."""
    with torch.enable_grad():
        steps = torch.autograd.grad(f(x).square().mean(), [*f.parameters()], create_graph=True)
    w, b, v, c = (p - 0.1 * g for p, g in zip(f.parameters(), steps, strict=True))
    return functional.linear(functional.linear(x, w, b).tanh(), v, c)


FUNCTIONS = {
    "forces": differentiate,
    "with history": lambda f, x: differentiate(f, x, create_graph=True),
    "weights": adapt_weights,
    "both ways": lambda f, x: differentiate(f, x) + torch.func.grad(lambda y: f(y).sum())(x),
    "functional": lambda f, x: torch.autograd.functional.jacobian(lambda y: f(y).sum(0), x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_autograd_grad_matches_eager_at_other_sizes(name, tmp_path):
    """`torch.autograd.grad` has the results of eager, and its gradients if it creates a graph."""
    compare_with_eager(Derivative(FUNCTIONS[name]), lambda n: torch.randn(n, 3), tmp_path)


def test_autograd_grad_without_enable_grad(tmp_path):
    """A model that relies on the mode of its caller is captured with gradients recorded."""

    def compute(f, x):
        x.requires_grad_(True)
        energy = f(x)
        return energy, grad([energy], [x], grad_outputs=[torch.ones_like(energy)])[0]

    model = Derivative(compute).eval()
    module = clika_compile(model, tracing_inputs=[torch.randn(4, 3), torch.randn(7, 3)], discard_input_model=False)
    x = torch.randn(5, 3)
    torch.testing.assert_close(module(x.clone()), model(x.clone()))
    module.clika_export(tmp_path / "model.onnx")


class Layers(nn.Module):
    """Layers with composite calls, and backwards of their own."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.conv1d, self.conv2d = nn.Conv1d(2, 4, 3, stride=2, padding=1), nn.ConvTranspose2d(2, 4, 3, stride=2)
        self.pool, self.attention = nn.MaxPool1d(2), nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 4)

    def compute(self, x):
        """Return results of ``x[n, 2, 8]``."""
        match self.name:
            case "conv1d":
                return self.pool(self.conv1d(x).relu())
            case "conv2d":
                return self.conv2d(x.unflatten(2, (4, 2))).sin()
            case "attention":
                return self.attention(x, x, x)[0]
            case "linear":
                return functional.gelu(self.linear(self.norm(x)))
        return 1 / (1 + torch.cdist(x, x + 1))

    def forward(self, x):
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            found = torch.autograd.grad(self.compute(y).sin().sum(), y)[0]
        return found, torch.func.grad(lambda y: self.compute(y).sin().sum())(x)


@pytest.mark.parametrize("name", ["conv1d", "conv2d", "attention", "linear", "cdist"])
def test_derivative_of_layers_matches_eager(name, tmp_path):
    """Layers with more than two dims keep them dynamic, and their backwards are exported."""
    compare_with_eager(Layers(name).eval(), lambda n: torch.randn(n, 2, 8), tmp_path)


def test_backward_in_forward_error_names_line():
    """`Tensor.backward` in forward is rejected, with the line and the call to write."""

    def compute(f, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            f(x).sum().backward()
            return x.grad

    with pytest.raises(ModelError, match=r"torch\.autograd\.grad.*test_derivatives\.py"):
        clika_compile(Derivative(compute), tracing_inputs=[torch.randn(4, 3), torch.randn(7, 3)])
