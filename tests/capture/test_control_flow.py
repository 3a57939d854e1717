"""Conditions, loops and scans: the module, its gradients and its file equal eager at sizes that were not traced."""

import copy
from functools import partial

import pytest
import torch
from loaded_copies import load_copy
from onnx_sessions import assert_file_equals_eager
from torch import nn
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops.map import map as map_rows
from torch.utils import _pytree as pytree

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, clika_compile
from clika_ref.core.errors import ModelError
from clika_ref.core.ir import walk, walk_graphs


class EarlyExit(nn.Module):
    def __init__(self):
        super().__init__()
        self.short, self.long = nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x):
        return torch.cond(x.mean() > 0, lambda x: self.short(x) * x.shape[0], lambda x: self.long(x).tanh(), (x,))


class CapturedSize(nn.Module):
    """A branch reads a size of a tensor that it does not read, and a constant of the code."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, y):
        count = x.shape[0]
        return torch.cond(y.sum() > 0, lambda y: self.layer(y) * count, lambda y: self.layer(y) + torch.arange(3), (y,))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        def choose(x):
            return torch.cond(x.max() > 1, self.a, lambda x: self.b(x) - 1, (x,))

        return torch.cond(x.mean() > 0, choose, lambda x: self.c(x).relu(), (x,)) + self.a(x)


class Repeat(nn.Module):
    """A loop whose count is an input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, count):
        _, found = while_loop(
            lambda i, _: i < count,
            lambda i, h: (i + 1, self.layer(h).tanh()),
            (torch.zeros((), dtype=torch.int64), x),
        )
        return found


class Recurrent(nn.Module):
    """A scan that reads a computed tensor from outside, and a size."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        scale = x.mean((0, 1))

        def step(h, row):
            h = (self.layer(h) + row * scale).tanh().reshape(x.shape[0], -1)
            return h, h * 2

        return scan(step, x.new_zeros(x.shape[0], 4), x, dim=1)


class Rows(nn.Module):
    def forward(self, x, y):
        return map_rows(lambda row, other: row.cos() + other, x, y)


class LinearRecurrence(nn.Module):
    """``h[t] = a[t] * h[t - 1] + b[t]``."""

    def forward(self, a, b):
        def combine(left, right):
            return left[0] * right[0], left[1] * right[0] + right[1]

        return associative_scan(combine, (a.sigmoid(), b), 1, combine_mode="generic")[1]


def randn(*shape, seed=0, offset=0.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + offset


CASES = {
    "cond": (
        EarlyExit,
        [(randn(1, 4, offset=1),), (randn(2, 4, offset=-1),)],
        [(randn(5, 4, offset=2),), (randn(3, 4, offset=-2),)],
    ),
    "captured size": (
        CapturedSize,
        [(randn(1, 4), randn(2, 4)), (randn(2, 4), randn(3, 4))],
        [(randn(7, 4), randn(4, 4, offset=3)), (randn(7, 4), randn(1, 4, offset=-3))],
    ),
    "nested cond": (
        Nested,
        [(randn(2, 4),), (randn(3, 4),)],
        [(randn(7, 4, offset=3),), (randn(7, 4, offset=-3),), (randn(1, 4) * 0.1 + 0.1,)],
    ),
    "while_loop": (
        Repeat,
        [(randn(2, 4), torch.tensor(3)), (randn(3, 4), torch.tensor(2))],
        [(randn(5, 4), torch.tensor(0)), (randn(1, 4), torch.tensor(9))],
    ),
    "scan": (Recurrent, [(randn(2, 5, 4),), (randn(3, 6, 4),)], [(randn(1, 9, 4),), (randn(4, 1, 4),)]),
    "map": (Rows, [(randn(2, 4), randn(4)), (randn(3, 4), randn(4))], [(randn(5, 4), randn(4))]),
    "associative scan": (
        LinearRecurrence,
        [(randn(2, 5, 3), randn(2, 5, 3, seed=1)), (randn(3, 6, 3), randn(3, 6, 3, seed=1))],
        [(randn(1, 9, 3), randn(1, 9, 3, seed=1)), (randn(4, 1, 3), randn(4, 1, 3, seed=1))],
    ),
    "associative scan of fixed length": (
        LinearRecurrence,
        [(randn(2, 5, 3), randn(2, 5, 3, seed=1)), (randn(3, 5, 3), randn(3, 5, 3, seed=1))],
        [(randn(4, 5, 3), randn(4, 5, 3, seed=1))],
    ),
}
"""Each model, its tracing inputs, and inputs of other sizes that take other branches."""


@pytest.mark.slow_cases("nested cond", "captured size")
@pytest.mark.parametrize("name", CASES)
def test_control_flow_module_and_file_equal_eager(name, tmp_path, compile_and_compare):
    """The compiled module and its file in ONNX Runtime equal eager, at sizes never traced."""
    build, inputs, unseen = CASES[name]
    model = build().eval()
    target = DeploymentSettings_ONNXRuntime_ONNX()
    module = compile_and_compare(copy.deepcopy(model), inputs, unseen, deployment_settings=target)
    module.clika_export(tmp_path / "model.onnx")
    assert_file_equals_eager(tmp_path / "model.onnx", model, unseen)


@pytest.mark.parametrize("name", ["cond", "nested cond", "while_loop", "scan"])
def test_control_flow_gradients_equal_eager(name):
    """Gradients of weights, also of branches that did not run, are those of the same Python control flow."""
    build, inputs, unseen = CASES[name]
    model = build().eval()
    module = clika_compile(copy.deepcopy(model), tracing_inputs=inputs)
    for call in unseen if name != "while_loop" else unseen[1:]:  # after 0 iterations, nothing has a gradient
        module.zero_grad()
        sum(x.square().sum() for x in pytree.tree_leaves(module(*call))).backward()
        expected = run_python_gradients(name, model, call)
        actual = {k: p.grad for k, p in module.named_parameters()}
        for key, gradient in expected.items():
            found = actual[key] if actual[key] is not None else torch.zeros_like(gradient)
            torch.testing.assert_close(found, gradient)


def run_python_gradients(name, model, call):
    """Return the gradients of the same model with Python's branches and loops."""
    model.zero_grad()
    result = PYTHON_FORMS[name](model, *call)
    sum(x.square().sum() for x in pytree.tree_leaves(result)).backward()
    return {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in model.named_parameters()}


def run_recurrent(model, x):
    h, scale, found = x.new_zeros(x.shape[0], 4), x.mean((0, 1)), []
    for row in x.unbind(1):
        h = (model.layer(h) + row * scale).tanh()
        found.append(h * 2)
    return h, torch.stack(found, 1)


def run_repeat(model, x, count):
    for _ in range(int(count)):
        x = model.layer(x).tanh()
    return x


def run_nested(model, x):
    choose = model.a if x.max() > 1 else lambda x: model.b(x) - 1
    return (choose(x) if x.mean() > 0 else model.c(x).relu()) + model.a(x)


PYTHON_FORMS = {
    "cond": lambda m, x: m.short(x) * x.shape[0] if x.mean() > 0 else m.long(x).tanh(),
    "nested cond": run_nested,
    "while_loop": run_repeat,
    "scan": run_recurrent,
}


def test_control_flow_saved_module_equals_module():
    """A module with nested bodies is saved and loaded with equal results."""
    _, inputs, unseen = CASES["nested cond"]
    module = clika_compile(Nested().eval(), tracing_inputs=inputs)
    loaded = load_copy(module)
    for call in (*inputs, *unseen):
        assert torch.equal(loaded(*call), module(*call))


def test_control_flow_weights_keep_names_and_are_constants_of_bodies():
    """Bodies read weights under their names in the model, and names are unique across bodies."""
    module = clika_compile(Nested().eval(), tracing_inputs=CASES["nested cond"][1])
    assert set(dict(module.named_parameters())) == set(dict(Nested().named_parameters()))
    graph = module.graph
    read = {v.name for node in walk(graph) if node.op_type == "linear" for v in node.inputs[1:]}
    assert read == set(dict(module.named_parameters()))
    names = [v.name for part in walk_graphs(graph) for v in part.inputs]
    names += [v.name for node in walk(graph) for v in node.outputs]
    assert len(names) == len(set(names))


class Doubled(torch.autograd.Function):
    """A custom backward, for which eager also runs with gradients."""

    @staticmethod
    def forward(_ctx, x):
        return x * 2

    @staticmethod
    def backward(_ctx, gradient):
        return gradient * 2


def test_control_flow_eager_works_after_compilation():
    """`torch.cond` still runs in eager after a compilation: Dynamo skips no code of PyTorch's for good."""
    assert Doubled.__module__ != "torch"
    model = EarlyExit().eval()
    clika_compile(model, tracing_inputs=CASES["cond"][1], discard_input_model=False)
    for call in CASES["cond"][2]:
        torch.testing.assert_close(model(*call), PYTHON_FORMS["cond"](model, *call))


class CondOf(nn.Module):
    """A condition with the given branches."""

    def __init__(self, when_true, when_false):
        super().__init__()
        self.branches = when_true, when_false
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x):
        return torch.cond(x.sum() > 0, *(partial(branch, self) for branch in self.branches), (x,))


def write_input(_, x):
    x.add_(1)
    return x * 2


def write_buffer(model, x):
    model.total.add_(1)
    return x * 2


REJECTED = {
    "writes to its input": (
        write_input,
        "a body of control flow writes to a tensor from outside. Return the new value",
    ),
    "writes to a buffer": (
        write_buffer,
        "a body of control flow writes to a tensor from outside. Return the new value",
    ),
    "returns its input": (
        lambda _, x: x,
        r"returns a tensor from outside, or one tensor twice. Return a copy: x.clone\(\)",
    ),
    "another dtype": (lambda _, x: x.double(), "expected same dtype but got torch.float64 and torch.float32"),
    "another rank": (
        lambda _, x: x.sum(0),
        "expected same dim but got 1 and 2. Return the same dtype and rank from both",
    ),
    "another number of tensors": (
        lambda _, x: (x + 1, x + 2),
        "the branches of torch.cond return different structures",
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_cond_rejected_branch_named(name):
    """A branch that PyTorch cannot trace raises an error that names the problem and the remedy."""
    branch, message = REJECTED[name]
    with pytest.raises(ModelError, match=message):
        clika_compile(CondOf(branch, lambda _, x: x * 3), tracing_inputs=[(randn(2, 4),), (randn(3, 4),)])


def test_while_loop_over_number_rejected():
    """A loop that carries a Python number raises an error with the form that works."""
    layer = nn.Linear(4, 4)

    def count_in_python(x):
        return while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, layer(h)), (0, x))[1]

    with pytest.raises(ModelError, match=r"while_loop carries numbers. Carry tensors: torch.tensor\(0\) instead of 0"):
        clika_compile(count_in_python, tracing_inputs=[(randn(2, 4),)])


def test_cond_on_size_and_nan_take_false_branch():
    """A condition on a size is computed at each call, and NaN is not greater than a number."""

    def by_size(x):
        return torch.cond(x.shape[0] > 4, lambda x: x + 1, lambda x: x * 3, (x,))

    def by_nan(x):
        return torch.cond(x.sum() * float("nan") > 0, lambda x: x + 1, lambda x: x * 3, (x,))

    inputs = [(randn(2, 4),), (randn(3, 4),)]
    for function, calls in ((by_size, [randn(5, 4), randn(4, 4)]), (by_nan, [randn(2, 4)])):
        module = clika_compile(function, tracing_inputs=inputs)
        for x in calls:
            assert torch.equal(module(x), x + 1 if len(x) > 4 else x * 3)


def test_while_loop_not_run_on_empty_inputs():
    """Compilation ends although a loop would not end for an input without elements."""

    def double(x):
        return while_loop(lambda h: h.sum() < 100, lambda h: (h * 2 + 1,), (x.abs(),))[0]

    module = clika_compile(double, tracing_inputs=[(randn(2, 4),), (randn(3, 4),)])
    x = randn(7, 4)
    expected = x.abs()
    while expected.sum() < 100:
        expected = expected * 2 + 1
    assert torch.equal(module(x), expected)


def test_cond_in_torch_compile_gives_no_warning(capsys):
    """PyTorch differentiates the branches of `torch.cond` by a class of its own, and the compiled module does, too."""
    assert Doubled in torch.autograd.Function.__subclasses__(), "without such a class, no backward is searched"
    model = EarlyExit().eval()
    compiled = torch.compile(model, backend="clika")
    for call in CASES["cond"][2]:
        torch.testing.assert_close(compiled(*call), model(*call))
    assert "ignores the backward" not in capsys.readouterr().err


class CountInBranch(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x):
        def write(x):
            self.count.add_(1)
            return x + self.count

        return torch.cond(x.sum() > 0, lambda x: x * 2, write, (x,))


def test_cond_branch_that_writes_names_branch_and_buffer():
    """The error names which branch writes, and to what."""
    with pytest.raises(ModelError, match=r"the branch for false writes to 'count'\. Return the new value"):
        clika_compile(CountInBranch(), tracing_inputs=[torch.rand(1, 4), torch.rand(2, 4)])


def test_while_loop_with_other_type_names_carried_value():
    """The error names the carried value whose type the body changes, and both types."""

    def double(x):
        return while_loop(lambda x: x.sum() < 10, lambda x: ((x * 2).double(),), (x,))

    message = r"returns carried value 0 with another type \(dtype: torch.float64 vs torch.float32\)"
    with pytest.raises(ModelError, match=message):
        clika_compile(double, tracing_inputs=[torch.rand(1, 4), torch.rand(2, 4)])


class SizeInBranch(nn.Module):
    """A branch on a size inside a branch that random inputs do not always take."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def choose(self, x):
        return self.a(x) if x.shape[0] > 1 else self.b(x)

    def forward(self, x):
        return torch.cond(x.mean() > 0, self.choose, lambda x: x * 2, (x,))


@pytest.mark.parametrize("seed", range(3))
def test_branch_on_size_inside_branch_stays_guarded(seed):
    """A run that does not enter a branch is no evidence that its guards are irrelevant."""
    torch.manual_seed(seed)
    model, calls = SizeInBranch().eval(), [torch.randn(2, 5, 6) + 2, torch.randn(3, 7, 6) - 2]
    module = clika_compile(model, tracing_inputs=calls, discard_input_model=False)
    assert torch.equal(module(calls[1][:2, :1]), model(calls[1][:2, :1]))
    with pytest.raises(ModelError, match="batch = 1"):
        module(calls[0][:1])


def test_clika_compile_condition_inside_another_model_rejected():
    """A compiled condition cannot be traced again: the error states to compile the whole original model."""
    x = [randn(2, 4), randn(3, 4)]
    compiled = clika_compile(EarlyExit(), tracing_inputs=x)
    with pytest.raises(ModelError, match=r"ClikaModule with a condition .* Compile the whole model"):
        clika_compile(nn.Sequential(compiled, nn.ReLU()), tracing_inputs=x)
