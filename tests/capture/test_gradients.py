"""Gradients that a trace loses: warnings name each autograd.Function and each hook."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import is_grad_enabled, nn
from torch.utils.checkpoint import checkpoint

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, ModelError, QuantizationSettings, clika_compile
from clika_ref.capture import gradients
from clika_ref.capture.callables import make_callable
from clika_ref.capture.inputs import ModelCall
from clika_ref.quantization.qat.fake_quantization import _FakeQuantize


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


round_ = Round.apply


class Bound(Quantized):
    """The same under names that were bound before anything was compiled."""

    def __init__(self):
        super().__init__()
        self.round = Round.apply

    def forward(self, x):
        return round_(self.weight) * self.round(x)


class Written(Quantized):
    """The same estimator as operations."""

    def forward(self, x):
        return (self.weight + (self.weight.round() - self.weight).detach()) * x


X = torch.ones(2, 3)


def test_autograd_function_warned_once_with_line(tmp_path, capsys):
    """Each autograd function is reported once, with the line that defines it."""
    module = clika_compile(Quantized(), tracing_inputs=[X, torch.ones(4, 3)], logs_dir=tmp_path)
    assert torch.equal(module(X), 2 * X)
    (log,) = tmp_path.iterdir()
    text = log.read_text()
    warning = (
        "Warning: the compiled module ignores the backward of Round, a torch.autograd.Function defined at "
        "test_gradients.py:20"
    )
    assert text.count(warning) == 1
    assert "write it as operations, such as x + (round(x) - x).detach()" in text
    assert "ignores the backward" in capsys.readouterr().err


def test_autograd_function_bound_before_warned(tmp_path):
    """A function that was bound before the compilation is reported too."""
    clika_compile(Bound(), tracing_inputs=[X], logs_dir=tmp_path)
    assert next(tmp_path.iterdir()).read_text().count("backward of Round, a torch.autograd.Function defined at") == 1


calls = []
"""The calls of `Counted`. The search restores attributes of the model."""


class Counted(nn.Module):
    """Counts its calls."""

    def __init__(self, part=None):
        super().__init__()
        self.part = part or nn.Identity()

    def forward(self, x):
        calls.append(x)
        return self.part(x)


def find_with_own_functions_only(monkeypatch, model):
    """Search for custom gradients in a process where only clika_ref defines an autograd function."""
    monkeypatch.setattr(gradients, "_iterate_subclasses", lambda _: iter([_FakeQuantize]))
    return gradients.find_custom_gradients(make_callable(model), ModelCall((X,), {}))


def test_autograd_function_of_clika_ref_runs_no_model(monkeypatch):
    """The autograd functions of clika_ref cause no further run of a model that cannot call them."""
    calls.clear()
    model = Counted()
    assert find_with_own_functions_only(monkeypatch, model) == []
    assert find_with_own_functions_only(monkeypatch, lambda x: model(x) + 1) == []
    assert not calls


def test_autograd_function_of_clika_ref_in_part_found(monkeypatch):
    """A model that contains a quantized module in training is searched for the autograd functions of clika_ref."""
    settings = {"quantization_settings": QuantizationSettings(), "calibration_inputs": [X, X + 1]}
    part = clika_compile(
        nn.Sequential(nn.Linear(3, 3)), deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(), **settings
    )
    warnings = find_with_own_functions_only(monkeypatch, Counted(part.train()))
    assert any("the backward of _FakeQuantize" in warning for warning in warnings)


class Rounding(Counted):
    """Rounds sequences of at least two samples."""

    def forward(self, x):
        if len(x) < self.minimum:
            raise ValueError(f"{len(x)} samples")
        return super().forward(Round.apply(x))


@pytest.mark.parametrize(("minimum", "sizes"), [(1, [1]), (2, [2])])
def test_autograd_function_searched_with_one_sample(minimum, sizes):
    """The search runs the model on one sample, or on the whole call if the model rejects one sample."""
    calls.clear()
    model = Rounding()
    model.minimum = minimum
    (warning,) = gradients.find_custom_gradients(make_callable(model), ModelCall((X,), {}))
    assert "the backward of Round" in warning
    assert [len(x) for x in calls] == sizes


def test_autograd_function_search_leaves_model_unchanged(tmp_path):
    """The search for autograd functions leaves model and inputs unchanged."""

    class Counting(Quantized):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            x *= 2
            return super().forward(x)

    model, x = Counting(), torch.ones(2, 3)
    clika_compile(model, tracing_inputs=[x], logs_dir=tmp_path, discard_input_model=False)
    assert "ignores the backward" in next(tmp_path.iterdir()).read_text()
    assert (model.calls, model.weight.grad, x.requires_grad) == (0, None, False)
    assert torch.equal(x, torch.ones(2, 3))


def test_autograd_function_nondifferentiable_model_silent(tmp_path):
    """A model that cannot be differentiated gives no warning."""

    def reject_gradients(x):
        if x.requires_grad:
            raise NotImplementedError("no backward")
        return Round.apply(x)

    clika_compile(reject_gradients, tracing_inputs=[X], logs_dir=tmp_path)
    assert "backward of Round" not in next(tmp_path.iterdir()).read_text()


def test_autograd_function_advice_keeps_gradient(tmp_path):
    """The replacement that the warning advises keeps the gradient."""
    module = clika_compile(Written(), tracing_inputs=[X], logs_dir=tmp_path)
    module(X).sum().backward()
    assert torch.equal(module.weight.grad, torch.full((3,), 2.0))
    assert "Warning" not in next(tmp_path.iterdir()).read_text()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_gives_no_warning(tmp_path, reentrant):
    """A checkpoint gives no warning."""

    def checkpoint_sine(x):
        return checkpoint(torch.sin, x, use_reentrant=reentrant)

    clika_compile(checkpoint_sine, tracing_inputs=[X.clone().requires_grad_()], logs_dir=tmp_path)
    assert "Warning" not in next(tmp_path.iterdir()).read_text()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo itself does
def test_dynamo_backend_warns_of_autograd_function(tmp_path):
    """The torch.compile backend warns of autograd functions too."""
    torch._dynamo.reset()
    torch.compile(Quantized(), backend="clika", options={"logs_dir": tmp_path})(X)
    assert (
        "the backward of a class that Dynamo does not name, a torch.autograd.Function: in training"
        in next(tmp_path.iterdir()).read_text()
    )


class Counting(nn.Module):
    """Writes input-dependent values to a buffer and to its own parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x):
        self.total += Round.apply(x * self.weight).sum(0)
        with torch.no_grad():
            self.weight.add_(1)
        return x + self.total


def test_autograd_function_search_undoes_state_writes():
    """The search leaves no gradient on buffers and no write on parameters."""
    net, original = Counting(), Counting()
    module = clika_compile(net, tracing_inputs=[torch.ones(2, 3)])
    assert net.total.is_leaf
    assert not net.total.requires_grad
    assert torch.equal(net.weight, torch.ones(3))
    for _ in range(2):
        torch.testing.assert_close(module(torch.ones(2, 3)), original(torch.ones(2, 3)))


def make_hooked_net(where):
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    if where == "module":
        net[1].register_full_backward_hook(lambda _module, given, _results: (given[0] * 2,))
    elif where == "results":
        net.register_full_backward_pre_hook(lambda _module, results: (results[0] * 2,))
    elif where == "parameter":
        net[0].weight.register_hook(lambda gradient: gradient * 2)
    else:
        net[0].weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", weight.grad * 2))
    return net


@pytest.mark.parametrize(
    ("where", "named"),
    [("module", "1"), ("results", "Sequential"), ("parameter", "0.weight"), ("accumulated", "0.weight")],
)
def test_gradient_hooks_lost_warned(tmp_path, where, named):
    """A module or parameter that loses gradient hooks is named in a warning."""
    clika_compile(make_hooked_net(where), tracing_inputs=[X], logs_dir=tmp_path, discard_input_model=False)
    assert next(tmp_path.iterdir()).read_text().count(f"Warning: Gradient hooks on {named} are lost: in tra") == 1


@pytest.mark.parametrize("where", ["parameter", "accumulated"])
def test_gradient_hooks_of_discarded_parameters_kept(tmp_path, where):
    """Parameters of a discarded model keep their hooks, without a warning."""
    module, original = (
        clika_compile(make_hooked_net(where), tracing_inputs=[X], logs_dir=tmp_path),
        make_hooked_net(where),
    )
    original.load_state_dict(module.state_dict(), strict=False)
    for net in (module, original):
        net(X).sum().backward()
    torch.testing.assert_close(module.get_parameter("0.weight").grad, original[0].weight.grad)
    assert "Warning" not in next(tmp_path.iterdir()).read_text()


def test_gradient_queries_and_hooks_in_forward_warned(tmp_path):
    """Queries of requires_grad and hooks in forward are reported with their lines."""

    def query_and_hook_gradients(x):
        y = x * (2 if x.requires_grad else 3)
        with torch.enable_grad():
            z = torch.sin(x.clone().requires_grad_())
            z.register_hook(lambda gradient: gradient * 2)
            z.register_hook(hook=lambda gradient: gradient * 2)
        return y + z

    clika_compile(query_and_hook_gradients, tracing_inputs=[X], logs_dir=tmp_path)
    text, first = next(tmp_path.iterdir()).read_text(), query_and_hook_gradients.__code__.co_firstlineno
    assert f"Warning: forward checks at test_gradients.py:{first + 1} whether a tensor requires gradients" in text
    assert f"Warning: The gradient hook that forward registers at test_gradients.py:{first + 4} is lost" in text
    assert f"that forward registers at test_gradients.py:{first + 5} is lost" in text


def test_gradient_queries_of_parameters_not_warned(tmp_path):
    """Queries of a parameter give no warning, and patched names are restored."""

    class Frozen(Quantized):
        def forward(self, x):
            return self.weight * x if self.weight.requires_grad else x

    plain, function = torch.Tensor.requires_grad, is_grad_enabled
    clika_compile(Frozen(), tracing_inputs=[X], logs_dir=tmp_path)
    assert "Warning" not in next(tmp_path.iterdir()).read_text()
    assert torch.Tensor.requires_grad is plain
    assert is_grad_enabled is function is torch.is_grad_enabled


def branch_on_requires_grad(x):
    return x * 2 if (x * 1).requires_grad else x * 3


def branch_on_grad_mode(x):
    return x * 2 if torch.is_grad_enabled() else x * 3


ENABLED = "whether gradients are recorded"
INFERENCE = "whether it is called in inference mode"
MADE = "whether a tensor was made in inference mode"
ASKING = [
    ("whether a tensor has a grad_fn", lambda x: x.grad_fn is not None),
    ("whether a tensor is a leaf", lambda x: not x.is_leaf),
    (ENABLED, lambda x: torch.is_grad_enabled() and not x.is_sparse),
    (ENABLED, lambda x: torch._C.is_grad_enabled() and not x.is_sparse),
    (ENABLED, lambda x: is_grad_enabled() and not x.is_sparse),
    (INFERENCE, lambda x: torch.is_inference_mode_enabled() and not x.is_sparse),
    (INFERENCE, lambda x: torch._C.is_inference_mode_enabled() and not x.is_sparse),
    (MADE, lambda x: x.is_inference()),
    (MADE, lambda x: torch.is_inference(input=x)),
]


@pytest.mark.parametrize(("question", "asks"), ASKING)
def test_gradient_query_before_hook_warned(tmp_path, question, asks):
    """A hook that depends on a gradient query, so that eager never reaches it, gives a warning."""

    class Hooking(Written):
        def forward(self, x):
            y = x * self.weight
            if asks(y):
                y.register_hook(lambda gradient: gradient * 0)
            return y

    clika_compile(Hooking(), tracing_inputs=[X], logs_dir=tmp_path)
    line = asks.__code__.co_firstlineno
    warning = f"Warning: forward checks at test_gradients.py:{line} {question}, and the compiled module always uses"
    assert next(tmp_path.iterdir()).read_text().count(warning) == 1


@pytest.mark.parametrize("asking", [branch_on_requires_grad, branch_on_grad_mode])
def test_gradient_query_with_disagreement_names_line(asking):
    """A disagreement with eager after a gradient query raises an error with its line."""

    class Asking(Written):
        def forward(self, x):
            return asking(x * self.weight)

    with pytest.raises(ModelError, match=r"disagrees with eager on input 1") as caught:
        clika_compile(Asking(), tracing_inputs=[X])
    line = asking.__code__.co_firstlineno + 1
    assert f"\nForward checks at test_gradients.py:{line} whether" in str(caught.value)
    assert "Pass it as an argument of forward instead." in str(caught.value)


def test_gradient_queries_of_other_threads_not_warned(tmp_path):
    """Queries of other threads give no warning."""
    with ThreadPoolExecutor() as threads:

        def query_in_other_thread(x):
            threads.submit(lambda: (branch_on_requires_grad(X), branch_on_grad_mode(X), X.mul(2).grad_fn)).result()
            return x * 2

        clika_compile(query_in_other_thread, tracing_inputs=[X], logs_dir=tmp_path)
    assert "Warning" not in next(tmp_path.iterdir()).read_text()


@pytest.mark.parametrize(
    ("net", "inputs"),
    [
        (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (torch.ones(2, 3, 4),)),
        (nn.MultiheadAttention(4, 2, batch_first=True), (torch.ones(2, 3, 4),) * 3),
    ],
    ids=["layer", "attention"],
)
def test_gradient_queries_of_pytorch_modules_not_warned(tmp_path, net, inputs):
    """Queries inside PyTorch's own modules give no warning."""
    clika_compile(net, tracing_inputs=[inputs], logs_dir=tmp_path)
    assert "Warning" not in next(tmp_path.iterdir()).read_text()
