"""Every node has its module and the user's line as origin."""

import functools
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch import nn

from clika_ref import ModelError, clika_compile
from clika_ref.capture.origins import is_installed_file
from clika_ref.capture.symbols import SymbolTable
from clika_ref.core.ir import Graph
from clika_ref.core.symbols import make_symbol


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.head(x))

    def infer(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.head(x))

    @torch.inference_mode()
    def predict(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.head(x))


def compute_sine(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


def scale_and_sine(scale: float, x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x * scale)


def sine_hook(_: nn.Module, _inputs: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


def call_with_helper(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return scale_and_sine(2.0, model(x))


def call_singledispatch(x: torch.Tensor) -> torch.Tensor:
    return functools.singledispatch(torch.sin)(x)


class Below(nn.Module):
    """A model with calls and hooks below ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return call_with_helper(self.head, x)


def make_hooked_layer() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_forward_hook(sine_hook)
    return model


def find_sine_line(called) -> str:
    """The line of the call of ``sin``."""
    lines, first = inspect.getsourcelines(called)
    return f"test_origins.py:{first + next(i for i, line in enumerate(lines) if 'torch.sin' in line)}"


@pytest.mark.parametrize(
    ("make", "called"),
    [
        (Model, Model.forward),
        (lambda: Model().infer, Model.infer),
        (lambda: compute_sine, compute_sine),
        (lambda: Model().predict, Model.predict),
        (lambda: functools.partial(scale_and_sine, 2.0), scale_and_sine),
        (make_hooked_layer, sine_hook),
        (Below, scale_and_sine),
        (lambda: call_singledispatch, call_singledispatch),
    ],
    ids=["module", "method", "function", "decorated", "partial", "hook", "helper", "standard library"],
)
def test_node_origin_has_line_of_user(make, called):
    """The origin of a node has the line of the user's call."""
    module = clika_compile(make(), tracing_inputs=[torch.zeros(1, 2)])
    (sin,) = [node for node in module.graph.nodes if node.op_type == "sin"]
    assert sin.origin.line == find_sine_line(called)
    assert all(line.startswith("test_origins.py:") for line in sin.origin.lines)


@pytest.mark.parametrize("decorate", [torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", enabled=False)])
def test_guard_in_decorated_method_names_line(decorate):
    """A guard names the line of the user in a decorated method."""

    @decorate
    def squeeze(x):
        return torch.sin(x.squeeze())  # so that `innermost_model_line` finds it

    module = clika_compile(squeeze, tracing_inputs=[torch.rand(2, 3), torch.rand(4, 3)])
    assert f"Ne(batch, 1) (from {find_sine_line(squeeze)})" in map(str, module.graph.guards)


def test_node_origin_has_module():
    """The origin of a node has its module."""
    module = clika_compile(Model(), tracing_inputs=[torch.zeros(1, 2)])
    assert [(node.op_type, node.origin.scope) for node in module.graph.nodes] == [("linear", "head"), ("sin", "")]


def test_unsupported_call_names_line():
    """An unsupported call of a function is reported with its line."""

    def call_ldl(x):
        return torch.linalg.ldl_factor(x)[0]

    with pytest.raises(
        ModelError, match=r"ldl_factor\S* in <root> at test_origins\.py:\d+: no operator is declared for it"
    ):
        clika_compile(call_ldl, tracing_inputs=[torch.eye(3)])


@pytest.mark.parametrize("file", ["<stdin>", "<string>", "<ipython-input-1>", "typed.py"])
def test_guard_of_interactive_code_kept(file):
    """A branch in interactive code is guarded, because it is the user's."""
    names = {}
    exec(compile("def idle(x):\n    return x + 1 if x.shape[0] == 1 else 1 + x", file, "exec"), names)  # noqa: S102 - as a prompt does
    module = clika_compile(names["idle"], tracing_inputs=[torch.ones(2, 3), torch.ones(4, 3)])
    with pytest.raises(ModelError, match=r"violates Ne\(batch, 1\)"):
        module(torch.ones(1, 3))


def test_is_installed_file_includes_torch_fx_code(tmp_path):
    """Code that torch.fx generates does not count as the user's."""
    assert not is_installed_file(str(tmp_path / "model.py"))
    assert [is_installed_file(f) for f in ("<eval_with_key>.3", torch.__file__, pytest.__file__)] == [True, True, True]


def find_guard_line(text, file, line):
    """Return the line of a guard that Dynamo attributes to a file and a line."""
    table, raw = SymbolTable(Graph("g")), sympy.Symbol("s0", integer=True)
    table.known_symbols[raw] = make_symbol("n")
    sloc = SimpleNamespace(maybe_user_loc=f"{text}  # {file}:{line} in forward", framework_loc=None)
    env: Any = SimpleNamespace(guards=[SimpleNamespace(expr=raw > 4, sloc=sloc)], var_to_range={})
    return table.guards(env)[0].guard.line


def test_guard_line_distinguishes_shortened_file_names():
    """A file name that Dynamo shortens is matched by its line, so that the user's file is recognized."""
    source = inspect.getsource(torch.nn.functional).splitlines()
    line = next(i for i, text in enumerate(source, 1) if text.startswith("def relu("))
    packaged, own = (
        find_guard_line(source[line - 1], "nn/functional.py", line),
        find_guard_line("if n > 4:", "nn/functional.py", line),
    )
    assert (packaged, own) == (f"torch/nn/functional.py:{line}", f"functional.py:{line}")
    assert find_guard_line("", "site-packages/vision/resnet.py", 3) == "vision/resnet.py:3"
