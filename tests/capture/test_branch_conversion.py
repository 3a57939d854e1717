"""Branches on the values of tensors: the module, its gradients and its file equal eager in each branch."""

import copy
import inspect
import traceback

import branching_nets as models
import pytest
import torch
from loaded_copies import load_copy
from onnx_sessions import assert_file_equals_eager, open_session
from torch import nn
from torch.utils import _pytree as pytree

from clika_ref import ClikaCompileOptions, DeploymentSettings_ONNXRuntime_ONNX, clika_compile
from clika_ref.capture.branch_conversion.conversion import BranchConversion
from clika_ref.capture.branch_conversion.sites import BranchSite
from clika_ref.capture.callables import make_callable
from clika_ref.core.errors import ModelError

CONVERT = ClikaCompileOptions(convert_branches=True)


def randn(*shape, seed=0, offset=0.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + offset


TRACED = [(randn(2, 4, offset=1),), (randn(3, 4, offset=-1),)]
UNSEEN = [(randn(5, 4, seed=i, offset=offset),) for i, offset in enumerate((-4, -2, -1, -0.2, 0.0, 0.2, 1, 3))]
TRACED_PAIRS = [(randn(2, 4), randn(2, 4, seed=1)), (randn(3, 4), randn(3, 4, seed=1))]
UNSEEN_PAIRS = [(randn(5, 4, offset=i), randn(5, 4, seed=1, offset=j)) for i in (-2, 2) for j in (-2, 2)]
TRACED_SIZES = [(randn(2, 4), randn(5, 4, seed=1)), (randn(3, 4), randn(4, 4, seed=1))]
UNSEEN_SIZES = [(randn(1, 4, offset=2), randn(7, 4)), (randn(6, 4, offset=-2), randn(2, 4))]

PAIRS = {"Nested": (TRACED_PAIRS, UNSEEN_PAIRS), "Sizes": (TRACED_SIZES, UNSEEN_SIZES)}
"""The inputs of models with two arguments."""

MODELS = [
    *("Assigning", "Unchanged", "EarlyReturn", "ReturnInEach", "Nested", "Looping", "LoopOfPairs", "BranchInLoop"),
    *("LoopInBranch", "Expressions", "PlainAndTraced", "ReadNumbers", "ForLoop", "Helpers", "Derived", "Decorated"),
    *("Structures", "Sizes", "WithBlock", "InPlaceOnCopy", "Normalized", "ExitByBreak", "ExitByReturn", "NestedLoops"),
    *("LoopTest", "Halting", "Recurrent"),
]


def build(name):
    torch.manual_seed(3)
    return getattr(models, name)().eval()


@pytest.mark.slow_cases("ExitByBreak", "ExitByReturn", "Helpers", "NestedLoops", "ReturnInEach")
@pytest.mark.parametrize("name", MODELS)
def test_conversion_module_and_file_equal_eager(name, tmp_path, compile_and_compare):
    """The compiled module and its file in ONNX Runtime equal eager, in all branches, and at sizes never traced."""
    inputs, unseen = PAIRS.get(name, (TRACED, UNSEEN))
    model, target = build(name), DeploymentSettings_ONNXRuntime_ONNX()
    module = compile_and_compare(
        copy.deepcopy(model), inputs, unseen, deployment_settings=target, clika_compile_options=CONVERT
    )
    module.clika_export(tmp_path / "model.onnx")
    assert_file_equals_eager(tmp_path / "model.onnx", model, unseen)


@pytest.mark.slow_cases("ExitByBreak")
@pytest.mark.parametrize("name", ["Assigning", "Looping", "Derived", "ExitByBreak"])
def test_conversion_gradients_equal_eager(name):
    """Gradients of the weights are those of eager in each branch."""
    model = build(name)
    module = clika_compile(copy.deepcopy(model), tracing_inputs=TRACED, clika_compile_options=CONVERT)
    for call in UNSEEN:
        expected, actual = (collect_gradients(m, call) for m in (model, module))
        for key, gradient in expected.items():
            torch.testing.assert_close(actual[key], gradient, msg=lambda text, key=key: f"{key}: {text}")


def collect_gradients(model, call):
    model.zero_grad()
    (x,) = (x.clone().requires_grad_() for x in call)
    sum(y.square().sum() for y in pytree.tree_leaves(model(x))).backward()
    weights = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in model.named_parameters()}
    return weights | {"x": x.grad}


@pytest.mark.parametrize("name", ["Assigning", "EarlyReturn", "Expressions", "Derived"])
def test_conversion_nan_condition_equals_eager(name, tmp_path):
    """A condition on NaN takes the branch of eager, in the module and in the file."""
    model, call = build(name), torch.full((2, 4), torch.nan)
    module = clika_compile(copy.deepcopy(model), tracing_inputs=TRACED, clika_compile_options=CONVERT)
    module.clika_export(tmp_path / "model.onnx")
    session, expected = open_session(tmp_path / "model.onnx"), pytree.tree_leaves(model(call))
    for found in (module(call), [torch.from_numpy(x) for x in session.run(None, {"x": call.numpy()})]):
        torch.testing.assert_close(pytree.tree_leaves(found), expected, equal_nan=True)


class NanIsTrue(nn.Module):
    def forward(self, x):
        return x.isnan().float() + 1 if x.sum() else x * 0


def test_conversion_condition_on_number_equals_eager(compile_and_compare):
    """A condition on a number is true unless it is zero, and true for NaN."""
    call = torch.tensor([torch.nan, 1.0])
    compile_and_compare(NanIsTrue(), [torch.ones(2)], [torch.zeros(2), call], clika_compile_options=CONVERT)


class TensorAndNumber(nn.Module):
    def forward(self, x, n):
        if x.sum() > 0 and int(n) > 3:
            return x * 2
        return x - 1


def test_conversion_condition_on_tensor_and_number_equals_eager(tmp_path):
    """A condition may combine a tensor and a number that is read from one, in module and file."""
    x, numbers = torch.ones(3), [torch.tensor(5), torch.tensor(2)]
    calls = [(x * sign, n) for sign in (1, -1) for n in numbers]
    module = clika_compile(
        TensorAndNumber(), tracing_inputs=calls[:2], convert_branches=True, discard_input_model=False
    )
    module.clika_export(tmp_path / "m.onnx")
    session = open_session(tmp_path / "m.onnx")
    for call in calls:
        expected = TensorAndNumber()(*call)
        assert torch.equal(module(*call), expected)
        (found,) = session.run(None, {name: value.numpy() for name, value in zip(("x", "n"), call, strict=True)})
        assert torch.equal(torch.from_numpy(found), expected)


class TensorAndSize(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        if x.mean() > 0.5 and x.shape[1] > 3:
            return self.a(x)
        return self.b(x)


def test_conversion_condition_on_size_stays_guarded():
    """The size in a converted condition is a branch of the model, which no random run drops."""
    torch.manual_seed(0)
    model, calls = TensorAndSize().eval(), [torch.randn(2, 5, 6) + 2, torch.randn(3, 7, 6) - 2]
    module = clika_compile(model, tracing_inputs=calls, convert_branches=True, discard_input_model=False)
    assert torch.equal(module(calls[0][:, :4]), model(calls[0][:, :4]))
    with pytest.raises(ModelError, match="x_1 = 3"):
        module(calls[0][:, :3])


class Limited(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        hidden = self.a(x)
        if torch.isinf(hidden).any():
            hidden = torch.clamp(hidden, min=-1e4, max=1e4)
        return self.b(hidden)


def test_conversion_rare_branch_serves_length_one():
    """A branch that no input takes, as of T5 for infinite numbers, excludes no length."""
    torch.manual_seed(0)
    model, calls = Limited().eval(), [torch.randn(2, 5, 6), torch.randn(3, 7, 6)]
    module = clika_compile(model, tracing_inputs=calls, convert_branches=True, discard_input_model=False)
    for shape in ((1, 1, 6), (4, 9, 6)):
        x = torch.randn(shape)
        torch.testing.assert_close(module(x), model(x))


def list_codes():
    """Return the code of each function of the models."""
    functions = [f for f in vars(models).values() if inspect.isfunction(f)]
    classes = [c for c in vars(models).values() if inspect.isclass(c)]
    methods = [f for c in classes for f in vars(c).values() if inspect.isfunction(f)]
    return {f: f.__code__ for f in (*functions, *methods)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Helpers", "Derived", "Decorated"])
def test_conversion_restores_functions(name):
    """After a compilation, all functions of the model have their own code."""
    before = list_codes()
    clika_compile(build(name), tracing_inputs=TRACED, clika_compile_options=CONVERT)
    assert list_codes() == before
    assert all(f.__code__ is code for f, code in before.items())


def cast_if_positive(x):
    return x.double() if x.sum() > 0 else x


def test_conversion_failure_restores_functions():
    """After a branch was rejected in a trace, the function has its own code."""
    code = cast_if_positive.__code__
    with pytest.raises(ModelError, match="Compute the same type and shape in both"):
        clika_compile(cast_if_positive, tracing_inputs=TRACED, clika_compile_options=CONVERT)
    assert cast_if_positive.__code__ is code


class Failing(models.TwoLayers):
    def forward(self, x):
        if x.sum() > 0:
            for _ in range(2):
                x = torch.cat([x, x[0]])  # fails
        return self.a(x)


def test_conversion_traceback_names_original_lines():
    """Tracebacks through rewritten code name the function, the file and the line of the original."""
    model = Failing()
    conversion = BranchConversion(make_callable(model))
    with conversion.record_branches():
        model(-torch.ones(2, 4))
    with conversion.install(), pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, 4))
    frames = [f for f in traceback.extract_tb(caught.value.__traceback__) if f.filename == __file__]
    start = inspect.getsourcelines(Failing.forward)[1]
    assert [(f.name, f.lineno - start) for f in frames[1:]] == [("forward", 1), ("forward", 3)]
    assert frames[-1].line.endswith("# fails")


@pytest.mark.slow
def test_conversion_unreached_branches_are_listed(capsys):
    """A branch that no tracing input reaches is a warning with its line, also in the state of the module."""
    module = clika_compile(build("Assigning"), tracing_inputs=TRACED, clika_compile_options=CONVERT)
    line = inspect.getsourcelines(models.Assigning.forward)[1] + 5
    message = (
        f"branching_nets.py:{line}: no tracing input reaches the branch where the condition of 'if' is true, so it was "
        "not compared with eager"
    )
    assert message in " ".join(capsys.readouterr().err.split())
    assert message in module.clika_state.warnings, "the report shows it"
    reached = [*TRACED, (randn(4, 4, offset=-4),)]
    module = clika_compile(build("Assigning"), tracing_inputs=reached, clika_compile_options=CONVERT)
    assert not module.clika_state.warnings


def double_negative(x):
    if x.amin() < -1:
        return x * 2
    return x


class UnreachedCall(nn.Module):
    """A function with a branch that only a branch calls that no tracing input reaches."""

    def forward(self, x):
        if x.sum() > 100:
            return double_negative(x - 60)
        return x + 1


def test_conversion_function_of_unreached_branch_is_converted(compile_and_compare):
    """A function that eager does not reach is found when the trace fails in it."""
    unseen = [torch.tensor([200.0, 0.0]), torch.tensor([200.0, 100.0])]
    compile_and_compare(UnreachedCall(), [torch.ones(2)], unseen, clika_compile_options=CONVERT)


class OnSizes(nn.Module):
    def forward(self, x):
        if x.shape[0] > 1 and self.training is False:
            x = x * 2
        return x


def test_conversion_plain_branches_rewrites_nothing():
    """A model without branches on values is not rewritten."""
    model = OnSizes().eval()
    conversion = BranchConversion(make_callable(model))
    with conversion.record_branches():
        model(torch.ones(2))
    assert conversion.is_empty


def test_conversion_difference_of_rewritten_function_is_found(monkeypatch):
    """A rewritten function that differs from its original is an error that names it."""
    monkeypatch.setattr(BranchSite, "run_return", lambda self, test, when_true, when_false: when_true())
    with pytest.raises(ModelError, match=r"the rewritten EarlyReturn.forward at branching_nets.py:\d+ differs"):
        clika_compile(build("EarlyReturn"), tracing_inputs=TRACED, clika_compile_options=CONVERT)


@pytest.mark.slow
def test_conversion_local_class_and_function(compile_and_compare):
    """Models that functions define, with variables of these functions, are converted."""
    limit = 0.5

    def clip(x, factor=2):
        return x / factor if x.amax() > limit else x

    class Local(models.TwoLayers):
        def forward(self, x):
            y = clip(self.a(x))
            if y.sum() > limit:
                y = clip((super().extra_repr() and x) or y, factor=3)
            return y

    compile_and_compare(Local(), TRACED, UNSEEN, clika_compile_options=CONVERT)
    compile_and_compare(clip, TRACED, UNSEEN, clika_compile_options=CONVERT)


def test_conversion_saved_module_equals_module():
    """A converted module is saved and loaded with equal results."""
    module = clika_compile(build("LoopInBranch"), tracing_inputs=TRACED, clika_compile_options=CONVERT)
    loaded = load_copy(module)
    for call in UNSEEN:
        assert torch.equal(loaded(*call), module(*call))


def test_conversion_off_names_option():
    """Without the conversion, the error proposes it; with it, the error does not."""
    with pytest.raises(ModelError, match=r"ClikaCompileOptions\(convert_branches=True\) converts if, while"):
        clika_compile(build("EarlyReturn"), tracing_inputs=TRACED)

    def repeat(x):
        for _ in range(int(x.sum())):
            x = x * 2
        return x

    with pytest.raises(ModelError, match="A branch or a size depends on the values of a tensor") as caught:
        clika_compile(repeat, tracing_inputs=[torch.ones(2)], clika_compile_options=CONVERT)
    assert "convert_branches" not in str(caught.value)


class Catching(models.TwoLayers):
    """A branch that cannot be converted, in a function that catches all errors."""

    def forward(self, x):
        try:
            return cast_if_positive(self.a(x)).float()
        except Exception:  # noqa: BLE001 - it is what the test looks at
            return x


def test_conversion_caught_rejection_is_found():
    """A model that catches the error about a branch is rejected, and does not take another branch."""
    with pytest.raises(ModelError, match=r"the model caught a BranchConversionError at .*Compute the same type"):
        clika_compile(Catching(), tracing_inputs=TRACED, clika_compile_options=CONVERT)


class Checking(models.TwoLayers):
    def forward(self, x):
        if x.isnan().any():
            raise ValueError("found NaN")
        return self.a(x)


def test_conversion_rejected_model_compiles_in_pieces():
    """With `fullgraph=False`, a model whose branch is rejected is compiled in pieces."""
    model = Checking().eval()
    module = clika_compile(copy.deepcopy(model), tracing_inputs=TRACED, clika_compile_options=CONVERT, fullgraph=False)
    for call in TRACED:
        torch.testing.assert_close(module(*call), model(*call))


def make_layer():
    """Return a layer whose class is its own, with the same code as that of other calls."""

    class Layer(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum() > 0 else x - 1

    return Layer()


def test_conversion_classes_with_the_same_code(compile_and_compare):
    """Two classes that one class statement made are both converted."""
    model = nn.Sequential(make_layer(), make_layer())
    compile_and_compare(model, TRACED, UNSEEN, clika_compile_options=CONVERT)
