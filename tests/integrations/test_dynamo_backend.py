"""The ``torch.compile`` backend: found by name, one graph for all sizes, its options, and its errors."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from clika_ref import (
    DeploymentSettings_ONNXRuntime_ONNX,
    LayerQuantizationSettings,
    ModelError,
    QuantizationSettings,
    clika_compile,
)
from clika_ref.capture.messages import DATA_DEPENDENT_ADVICE
from clika_ref.integrations.dynamo_backend import translate_options, weight_names


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.rest = nn.Sequential(nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))

    def forward(self, x, n=2):
        return {"y": self.rest(self.first(x)) * x.shape[0] * n}


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
def test_backend_found_without_importing_clika_ref():
    """torch.compile finds the backend by name before `clika_ref` is imported."""
    script = (
        "import sys, torch, torch._dynamo\n"
        "assert 'clika_ref' not in sys.modules\n"
        "assert 'clika' in torch._dynamo.list_backends()\n"
        "compiled = torch.compile(torch.nn.Linear(2, 2), backend='clika')\n"
        "print(tuple(compiled(torch.ones(1, 2)).shape))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip().endswith("(1, 2)"), done.stderr


def test_backend_compiled_module_rejected():
    """A ClikaModule is not compiled again, but a model may contain one."""
    module = clika_compile(nn.Linear(3, 3), tracing_inputs=[torch.ones(2, 3), torch.ones(3, 3)])
    with pytest.raises(Exception, match="with the backend 'clika': it is a ClikaModule already"):
        torch.compile(module, backend="clika")(torch.ones(2, 3))
    x = torch.randn(4, 3)
    torch.testing.assert_close(torch.compile(module, backend="eager")(x), module(x))
    outer = nn.Sequential(module, nn.ReLU())
    torch.testing.assert_close(torch.compile(outer, backend="clika")(x), outer(x))


def test_backend_dynamic_true_compiles_one_graph():
    """With `dynamic=True`, one graph serves every batch size."""
    model = Block().eval()
    compiled = torch.compile(model, backend="clika", dynamic=True)
    for batch in (4, 5, 9, 2, 33):
        x = torch.randn(batch, 3)
        assert torch.equal(compiled(x)["y"], model(x)["y"])
    assert counters["stats"]["unique_graphs"] == 1


def test_backend_automatic_dynamic_compiles_two_graphs():
    """Automatic dynamic shapes compile two graphs and no more."""
    model = Block().eval()
    compiled = torch.compile(model, backend="clika")
    for batch in (4, 5, 9, 3, 33):
        x = torch.randn(batch, 3)
        assert torch.equal(compiled(x)["y"], model(x)["y"])
    assert counters["stats"]["unique_graphs"] == 2


def test_backend_integer_argument_compiles_one_graph():
    """One graph serves all values of an integer argument."""
    model = Block().eval()
    compiled = torch.compile(model, backend="clika", dynamic=True)
    x = torch.randn(4, 3)
    for n in (3, 4, 7, 8):
        assert torch.equal(compiled(x, n)["y"], model(x, n)["y"])
    assert counters["stats"]["unique_graphs"] == 1


def test_backend_changed_weights_used_by_next_call():
    """The next call uses weights that were changed or replaced."""
    model = Block().eval()
    compiled = torch.compile(model, backend="clika", dynamic=True)
    x = torch.randn(4, 3)
    compiled(x)
    with torch.no_grad():
        model.first.weight.mul_(2)
    assert torch.equal(compiled(x)["y"], model(x)["y"])
    model.rest[2].weight = nn.Parameter(torch.ones(2, 3))
    assert torch.equal(compiled(x)["y"], model(x)["y"])


def make_closure():
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    return lambda x: b(a(x))


def make_function_of_modules():
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)

    def compose(half, float, x):  # names of methods, which no part of a module may bear
        return float(half(x))

    return lambda x: compose(a, b, x)


def make_plain_object():
    class Pipe:
        def __init__(self):
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def run(self, x):
            return self.b(self.a(x))

    return Pipe().run


def make_module_containers():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = nn.Linear(3, 3)
            self.listed = [nn.Linear(3, 3)]
            self.named = {1: nn.Linear(3, 3), "1": nn.Linear(3, 3), "weight": nn.Linear(3, 3)}
            self.scale = [nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(3))]

        def forward(self, x):
            x = self.named["weight"](self.listed[0](self.own(x)) * self.scale[0])
            return self.named["1"](self.named[1](x)) + self.scale[1]

    return Holder()


def make_similar_names():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleDict({"a": nn.Linear(3, 3), "a-weight": nn.Linear(3, 3)})
            self.scales = nn.ParameterDict({"x": torch.rand(3), "x-y": torch.rand(3)})

        def forward(self, x):
            return self.layers["a-weight"](self.layers["a"](x)) * self.scales["x"] + self.scales["x-y"]

    return Holder()


HOLDERS = [make_closure, make_function_of_modules, make_plain_object, make_module_containers, make_similar_names]


@pytest.mark.parametrize("make", HOLDERS)
def test_backend_equal_weight_names_not_confused(make):
    """Weights with equal names in several holders are not confused."""
    torch.manual_seed(0)
    model, x = make(), torch.randn(4, 3)
    torch.testing.assert_close(torch.compile(model, backend="clika")(x), model(x))


def test_weight_names_each_source_gets_unique_name():
    """Each source of a weight gets a unique and valid name."""
    sources = ["L['self'].d[1]._parameters['w']", "L['self'].d['1']._parameters['w']", "L['self']._buffers['mean']"]
    assert list(weight_names(sources).values()) == ["d.1.w", "d.1.w_1", "mean"]
    sources = ["G['half']._parameters['weight']", "L['p'].b._modules['0']._parameters['weight']"]
    assert list(weight_names(sources).values()) == ["half_.weight", "p.b.0.weight"]
    sources = ["G['training']._parameters['weight']", "L['b']._parameters['weight']"]
    assert list(weight_names(sources).values()) == ["training_.weight", "b.weight"]


def test_weight_names_no_name_nested_in_another():
    """No weight gets a name below that of another weight."""
    held = [f"L['self']._parameters['{key}']" for key in ("x", "x-y", "x-y-z", "w-v", "w")]
    assert list(weight_names(held).values()) == ["x", "x_1.y", "x_1.y_1.z", "w.v", "w_1"]


def test_backend_changed_module_float_not_constant():
    """A float attribute that changes is not a constant of the graph."""
    model = Block().eval()
    compiled = torch.compile(model, backend="clika", dynamic=True)
    x = torch.randn(4, 3)
    compiled(x)
    model.rest[0].eps = 0.5
    assert torch.equal(compiled(x)["y"], model(x)["y"])


def test_backend_gradients_reach_original_parameters():
    """The backward pass writes gradients to the original parameters."""
    model = Block().eval()
    x = torch.randn(4, 3)
    model(x)["y"].sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.compile(model, backend="clika")(x)["y"].sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-5)  # two orders of one float32 sum


def test_backend_train_mode_updates_running_stats():
    """Training mode updates the running statistics of the original."""
    torch.manual_seed(0)
    model, reference = Block().train(), Block().train()
    reference.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend="clika", dynamic=True)
    for batch in (4, 6):
        x = torch.randn(batch, 3)
        assert torch.equal(compiled(x)["y"], reference(x)["y"])
    assert torch.equal(model.rest[0].running_var, reference.rest[0].running_var)


def print_within(x):
    y = x + 1
    print("here")  # noqa: T201 - the cause of the break
    return y * 2


def test_backend_compiles_each_graph_of_a_broken_model():
    """Dynamo breaks the model, and each graph is compiled."""
    x = torch.randn(3)
    assert torch.equal(torch.compile(print_within, backend="clika")(x), print_within(x))
    assert counters["stats"]["unique_graphs"] == 2


def test_backend_break_with_data_raises_with_line_and_reason():
    """Data for the whole model cannot run through its pieces: the error has the line and the reason of the break."""
    options = {"example_inputs": [torch.randn(3)]}
    with pytest.raises(Exception, match=r"several graphs, at .*test_dynamo_backend\.py:\d+: .*print"):
        torch.compile(print_within, backend="clika", options=options)(torch.randn(3))


def branch_on_data(x):
    return x * 2 if x.sum() > 0 else x * 3


def loop_on_data(x):
    while x.sum() < 9:
        x = x + 1
    return x


def select_by_data(x):
    return x[x > 0]


@pytest.mark.parametrize("asks", [branch_on_data, loop_on_data, select_by_data], ids=lambda f: f.__name__)
def test_backend_data_dependent_break_gives_advice(asks):
    """A break on a tensor's data raises an error with advice for rewriting."""
    options = {"example_inputs": [torch.ones(4)]}
    with pytest.raises(Exception, match=r"several graphs, ") as caught:
        torch.compile(asks, backend="clika", options=options)(torch.ones(3))
    assert DATA_DEPENDENT_ADVICE in str(caught.value)


def test_translate_options_maps_inputs_and_dataloader(tmp_path, unread_inputs):
    """Tracing inputs become example inputs, and a dataloader becomes calibration inputs."""
    options = {"tracing_inputs": ["b"], "example_inputs": ["a"], "train_dataloader": unread_inputs}
    assert translate_options(options) == {"example_inputs": ["a", "b"], "calibration_inputs": unread_inputs}
    options = {"tracing_inputs": [torch.zeros(5, 3)], "train_dataloader": unread_inputs, "logs_dir": tmp_path}
    torch.compile(Block().eval(), backend="clika", options=options)(torch.randn(4, 3))
    (log,) = tmp_path.iterdir()
    assert "calibration_inputs are not read" in log.read_text()
    assert "Dynamic: " in log.read_text(), "the batch is 4 in the call and 5 in the tracing inputs"


def test_backend_layer_settings_name_modules():
    """Layers have the paths of their modules, so that settings can name them."""
    skip = {"2": LayerQuantizationSettings(skip_quantization=True)}
    options = {
        "calibration_inputs": [torch.randn(4, 3)],
        "quantization_settings": QuantizationSettings(),
        "layer_quantization_settings": skip,
        "deployment_settings": DeploymentSettings_ONNXRuntime_ONNX(),
    }
    x, model = torch.randn(4, 3), nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    found = torch.compile(model, backend="clika", options=options)(x)
    torch.testing.assert_close(found, model(x), atol=0.3, rtol=0)


def test_backend_options_reach_compilation(tmp_path):
    """Options of torch.compile reach the compilation."""
    options = {
        "settings": DeploymentSettings_ONNXRuntime_ONNX(),
        "example_inputs": [torch.zeros(4, 3)],
        "apply_on_data_fn": lambda x: x,
        "logs_dir": tmp_path,
        "discard_input_model": False,
    }
    torch.compile(Block().eval(), backend="clika", options=options)(torch.randn(4, 3))
    (log,) = tmp_path.iterdir()
    assert "target_framework = ONNX Runtime" in log.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speed": 11}, r"no option 'speed'\. Choose from deployment_settings.*settings"),
        ({"sparing": "off"}, r"no option 'sparing'\. Did you mean 'mixed_precision'\?"),
        ({"quantization_setings": None}, r"no option 'quantization_setings'\. Did you mean 'quantization_settings'\?"),
        (
            {"settings": 5},
            "settings is 5. Give Settings, the path of a YAML file with them, or deployment settings",
        ),
        ({"settings": "config.yaml"}, "cannot read the settings in config.yaml: No such file"),
        ({"tracing_inputs": 5}, "tracing_inputs are a int. Give a list with one element for each call"),
        ({"example_inputs": torch.ones(2)}, "example_inputs are a Tensor. Give a list with one element for each call"),
        ({"dynamic": True}, "'dynamic': Dynamo decides which dims are dynamic. Pass it to torch.compile itself"),
        ({"fullgraph": True}, "'fullgraph': Dynamo decides where graphs end. Pass it to torch.compile itself"),
        ({"disable": True}, "'disable': Dynamo decides whether to compile. Pass it to torch.compile itself"),
        ({"skip_eval_set_mode": True}, "'skip_eval_set_mode': Dynamo traces the current mode of the model. Call"),
        ({"forward_fn": print}, "'forward_fn': Dynamo traces your call of the model. Call it that way"),
        ({"is_dry_run": True}, r"'is_dry_run': .*\. Use clika_compile\(model, \.\.\., is_dry_run=True\)"),
    ],
)
def test_translate_options_unsupported_option_rejected(options, message):
    """An unsupported option or value raises an error that names it."""
    with pytest.raises(ModelError, match=message):
        translate_options(options)


class OwnRegion(nn.Module):
    def __init__(self, outcome=lambda y: y):
        super().__init__()
        self.layer, self.outcome = nn.Linear(4, 4), outcome

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.outcome(self.layer(x))
        return self.layer(y.float())


def test_backend_autocast_region_matches_eager():
    """The calls in an autocast region of a Dynamo graph are compiled with its casts."""
    model, x = OwnRegion(), torch.randn(2, 4)
    torch.testing.assert_close(torch.compile(model, backend="clika")(x), model(x), rtol=0, atol=0)


def test_backend_no_grad_inside_autocast_blocks_gradients():
    """A no_grad region inside an autocast region stops gradients."""

    class Distilled(OwnRegion):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
                y = self.layer(x).float()
            return self.head(y)

    model = Distilled()
    model.head = nn.Linear(4, 4)
    torch.compile(model, backend="clika")(torch.randn(2, 4)).sum().backward()
    assert model.layer.weight.grad is None


def test_backend_inference_mode_region_blocks_gradients():
    """An inference mode region stops gradients."""

    class Frozen(OwnRegion):
        def forward(self, x):
            with torch.inference_mode():
                y = self.layer(x)
            return self.head(y.clone())

    model, x = Frozen(), torch.randn(2, 4)
    model.head = nn.Linear(4, 4)
    found = torch.compile(model, backend="clika")(x)
    torch.testing.assert_close(found, model(x))
    found.sum().backward()
    assert model.layer.weight.grad is None
    assert model.head.weight.grad is not None


def test_backend_checkpoint_region_compiled():
    """A checkpointed region is compiled and differentiated."""
    model, x = OwnRegion(), torch.randn(2, 4)

    def checkpoint_layer(x):
        return checkpoint(model.layer, x, use_reentrant=False)

    found = torch.compile(checkpoint_layer, backend="clika")(x)
    torch.testing.assert_close(found, model.layer(x), rtol=0, atol=0)
    found.sum().backward()
    assert model.layer.weight.grad is not None


def test_backend_failed_region_restores_autocast():
    """An unsupported call in an autocast region raises and leaves autocast disabled."""
    model = OwnRegion(torch.special.airy_ai)
    with pytest.raises(ModelError, match="airy_ai"):
        torch.compile(model, backend="clika")(torch.randn(2, 4))
    assert not torch.is_autocast_enabled("cpu")
