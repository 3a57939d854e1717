"""Functions and their modules: found wherever they are stored, so that they train and leave train mode."""

import functools
import types

import pytest
import torch
from torch import nn

from clika_ref import clika_compile
from clika_ref.capture.reachable_modules import MAX_SEARCHED_ENTRIES, MAX_VALUES_PER_DEPTH, find_reachable_modules

X = torch.ones(2, 3)


def make_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))


NET = make_network()
TABLE = {"n": make_network()}


def call_by_name(x):
    return NET(x)


def call_by_table(x):
    return TABLE["n"](x)


def call_by_function(x):
    return call_by_table(x) + 0


def call_in_closure(value, call):
    return lambda x: call(value, x)


class Pipe:
    """A plain object with a module in a dict, called itself or by a method."""

    def __init__(self):
        self.half = {"of it": make_network()}

    def __call__(self, x):
        return self.half["of it"](x)

    def run(self, x):
        return self(x)


FUNCTIONS = {
    "NET": call_by_name,
    "TABLE_n": call_by_table,
    "call_by_table_TABLE_n": call_by_function,
    "value_n": call_in_closure({"n": make_network()}, lambda d, x: d["n"](x)),
    "value_0_1": call_in_closure([(0, make_network())], lambda v, x: v[0][1](x)),
    "value_net": call_in_closure(types.SimpleNamespace(net=make_network()), lambda v, x: v.net(x)),
    "half_of_it": Pipe(),
    "0_half_of_it": functools.partial(Pipe.run, Pipe()),
}


@pytest.mark.parametrize(("name", "function"), FUNCTIONS.items(), ids=list(FUNCTIONS))
def test_find_reachable_modules_names_module_of_function(name, function):
    """A function owns the modules that it can reach, and they keep their mode."""
    module = clika_compile(function, tracing_inputs=[X], discard_input_model=False)
    assert [n for n, _ in module.named_parameters()] == [f"{name}.0.weight", f"{name}.0.bias"]
    net = find_reachable_modules(function)[name]
    assert net.training, "only compiled in evaluation mode"
    assert torch.equal(module(X), net.eval()(X))
    net.train()


def test_clika_compile_method_of_object_owns_modules():
    """A method of a plain object owns the modules of the object."""
    module = clika_compile(Pipe().run, tracing_inputs=[X])
    assert [n for n, _ in module.named_parameters()] == ["half_of_it.0.weight", "half_of_it.0.bias"]


def test_find_reachable_modules_ignores_attribute_names():
    """The name of an attribute does not refer to a global module."""
    names = {"pipe": Pipe(), "run": make_network()}
    function = types.FunctionType((lambda x: pipe.run(x) + 0).__code__, names)  # noqa: F821 - a global of the function
    assert list(find_reachable_modules(function)) == ["pipe_half_of_it"]


def test_clika_compile_function_keeps_module_modes():
    """Modules that a function uses keep their training modes."""
    net = make_network()
    net[1].eval()
    module = clika_compile(lambda x: net(x) + 0, tracing_inputs=[X])
    assert [part.training for part in net.modules()] == [True, True, False]
    assert torch.equal(module(X), net.eval()(X) + 0)


def test_find_reachable_modules_found_once_without_parts():
    """A module is found once, and its parts are not listed."""
    net = make_network()
    assert list(find_reachable_modules(call_in_closure([net, net[0], {"again": net}], None))) == ["value_0"]


def test_find_reachable_modules_names_valid_and_unique():
    """Names are valid and unique."""
    found = find_reachable_modules(
        functools.partial(print, {"a b": make_network(), "a.b": make_network()}, half=make_network())
    )
    assert list(found) == ["half_", "0_a_b", "0_a_b_1"], "the nearest first"


@pytest.mark.parametrize(
    "name", ["training", "forward", "_called", "_parameters", "graph", "clika_export", "T_destination"]
)
def test_clika_compile_module_variable_of_any_name(name):
    """A module may be held by a variable of any name."""
    net = make_network()
    function = types.FunctionType((lambda x: held(x) + 0).__code__.replace(co_names=(name,)), {name: net})  # noqa: F821
    module = clika_compile(function, tracing_inputs=[X], discard_input_model=False)
    assert len(list(module.parameters())) == 2
    assert torch.equal(module(X), net.eval()(X))


class Counted(dict):
    """A dict that counts how many of its entries are looked at."""

    looks = 0

    def items(self):
        for item in super().items():
            Counted.looks += 1
            yield item


def test_find_reachable_modules_large_containers_limited():
    """Only the first entries of large containers are searched."""
    entries, net = 2 * MAX_SEARCHED_ENTRIES, make_network()
    table = Counted((i, Counted.fromkeys(range(entries))) for i in range(entries))
    assert list(find_reachable_modules(call_in_closure([table, [0.0] * entries, net], None))) == ["value_2"]
    assert Counted.looks <= MAX_SEARCHED_ENTRIES + MAX_VALUES_PER_DEPTH + MAX_SEARCHED_ENTRIES


class InList(nn.Module):
    """A list hides its modules from PyTorch."""

    def __init__(self):
        super().__init__()
        self.hidden = [make_network()]

    def forward(self, x):
        return nn.Identity()(self.hidden[0](x))


def test_clika_compile_unregistered_module_warned(tmp_path):
    """A module that is not registered in the model gives a warning with its line."""
    clika_compile(InList(), tracing_inputs=[X], logs_dir=tmp_path)
    text = next(tmp_path.iterdir()).read_text()
    line = InList.forward.__code__.co_firstlineno + 1
    message = (
        f"Warning: Sequential, called at test_reachable_modules.py:{line}, is not part of InList: its weights become"
    )
    assert text.count(message) == 1
    assert text.count("Warning") == 1, "its parts go without saying, and nn.Identity has no weights"


def test_clika_compile_loose_parameter_warned(tmp_path):
    """A parameter outside of modules gives a warning."""
    scale = nn.Parameter(torch.ones(3))
    clika_compile(lambda x: x * scale, tracing_inputs=[X], logs_dir=tmp_path)
    text = next(tmp_path.iterdir()).read_text()
    assert "Warning: the function uses the parameter 'scale', which is not in a module: it becomes a constant" in text
