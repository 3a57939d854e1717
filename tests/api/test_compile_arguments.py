"""Every argument of ``clika_compile``: what it changes, and what a wrong value is told."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from clika_ref_cli.plugin_facts import load_installed_plugins
from torch import nn

from clika_ref import (
    BaseDeploymentSettings,
    ClikaCompileOptions,
    ClikaModule,
    DeploymentSettings_ONNXRuntime_ONNX,
    DeploymentSettings_TensorRT_ONNX,
    LayerQuantizationSettings,
    QuantizationSettings,
    clika_compile,
)
from clika_ref.core.errors import ClikaError, ModelError, TargetError
from clika_ref.settings.compile_options import TARGET_DISTRIBUTIONS


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.drop(self.norm(self.conv(x)).mean((2, 3))))


def images():
    return [torch.randn(2, 3, 8, 8), torch.randn(3, 3, 8, 8)]


def snapshot(model):
    return {
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "training": [m.training for m in model.modules()],
        "gradients": [(p.requires_grad, p.grad) for p in model.parameters()],
        "places": [p.data_ptr() for p in [*model.parameters(), *model.buffers()]],
        "own": [sorted(vars(m)) for m in model.modules()],
        "random": torch.random.get_rng_state(),
    }


def assert_same(before, after):
    assert before.keys() == after.keys()
    for name, value in before["state"].items():
        assert torch.equal(value, after["state"][name]), f"{name} is no longer bit-identical"
    assert torch.equal(before["random"], after["random"]), "random numbers were drawn"
    for part in ("training", "gradients", "places", "own"):
        assert before[part] == after[part], f"{part} changed"


def test_the_signature_is_the_published_one():
    parameters = inspect.signature(clika_compile).parameters
    assert {n: p.default for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY} == {
        "tracing_inputs": None,
        "calibration_inputs": None,
        "deployment_settings": None,
        "data_transform_fn": None,
        "forward_fn": None,
        "quantization_settings": None,
        "layer_quantization_settings": None,
        "pruning_settings": None,  # of 25.4
        "layer_pruning_settings": None,
        "distributed_training_settings": None,  # of the YAML of 24.x
        "logs_dir": None,
        "clika_compile_options": None,
        "discard_input_model": True,
        "is_model_pretrained": True,
        "is_dry_run": False,
        "skip_eval_set_mode": False,
        "graph_name": None,
        "fullgraph": True,
        "dynamic": True,
        "disable": False,
    }
    assert next(iter(parameters)) == "module_or_func"


@pytest.mark.filterwarnings("ignore:.*trains without its dropouts:UserWarning")
@pytest.mark.parametrize("mode", [True, False])
def test_a_kept_model_stays_bit_identical_even_when_the_copy_is_fine_tuned(mode):
    original = Net().train(mode)
    original.norm.eval()
    original.conv.bias.requires_grad_(False)
    inputs = images()
    before = snapshot(original)
    module = clika_compile(original, tracing_inputs=inputs, discard_input_model=False)
    assert_same(before, snapshot(original))
    assert not module.conv.bias.requires_grad
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.5)
    module.train()
    module(images()[0]).square().sum().backward()
    optimizer.step()
    module.norm.running_mean.add_(1)
    assert_same(before, {**snapshot(original), "random": before["random"]})
    assert not torch.equal(module.head.weight, original.head.weight)


def test_a_kept_model_in_train_mode_keeps_its_running_statistics():
    original = Net().train()
    inputs = images()
    before = snapshot(original)
    clika_compile(original, tracing_inputs=inputs, discard_input_model=False, skip_eval_set_mode=True)
    assert_same(before, snapshot(original))


class Decaying(nn.Module):
    """Writes to its own weight in each call, as some do to clamp it."""

    def __init__(self, *, by_data):
        super().__init__()
        self.by_data = by_data
        self.weight = nn.Parameter(torch.full((3,), 8.0))

    def forward(self, x):
        with torch.no_grad():
            (self.weight.data if self.by_data else self.weight).mul_(0.5)
        return x * self.weight


def test_a_kept_model_that_writes_to_its_own_weight_stays_and_is_captured():
    original = Decaying(by_data=False)
    inputs = [torch.ones(2, 3), torch.ones(4, 3)]
    module = clika_compile(original, tracing_inputs=inputs, discard_input_model=False)
    assert torch.equal(original.weight, torch.full((3,), 8.0))
    for _ in range(2):
        assert torch.equal(module(inputs[0]), original(inputs[0]))
        assert torch.equal(module.weight, original.weight)


def test_a_kept_model_that_cannot_be_captured_stays_as_it_was():
    class Choosing(Decaying):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x  # which no tracer follows

    original = Choosing(by_data=True)
    with pytest.raises(ModelError, match="cannot be captured"):
        clika_compile(original, tracing_inputs=[torch.ones(2, 3), torch.ones(4, 3)], discard_input_model=False)
    assert torch.equal(original.weight, torch.full((3,), 8.0))


def test_a_discarded_model_hands_its_weights_over():
    original = Net()
    places = {n: t.data_ptr() for n, t in original.state_dict().items()}
    module = clika_compile(original, tracing_inputs=images())
    assert {n: t.data_ptr() for n, t in module.state_dict().items() if n in places} == places
    assert module.head.weight is original.head.weight


PEAK = """
import json, torch
from clika_ref import clika_compile

def peak():  # not getrusage: it counts what the parent held when it forked
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

def compiled(model, width, **options):
    before = peak()
    module = clika_compile(model, tracing_inputs=[torch.randn(2, width), torch.randn(3, width)], **options)
    return (peak() - before) / sum(p.nbytes for p in module.parameters())

model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(6)])
compiled(torch.nn.Linear(4, 4), 4)  # what the first compilation imports is no copy of weights
print(json.dumps([compiled(model, 2048, discard_input_model=keep) for keep in (True, False)]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux's /proc")
def test_peak_memory_holds_one_copy_of_discarded_weights_and_two_of_kept_ones():
    """In a process of its own: the peak is read as a share of the weights, 100 MB, by which it grew."""
    run = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    discarded, kept = json.loads(run.stdout.splitlines()[-1])
    assert discarded < 0.5
    assert kept > 0.9


def test_a_dry_run_reports_and_returns_the_original(capsys, tmp_path):
    original = Net().train()
    inputs = images()
    before = snapshot(original)
    result = clika_compile(original, tracing_inputs=inputs, is_dry_run=True, logs_dir=tmp_path)
    assert result is original
    assert_same(before, snapshot(original))
    text = capsys.readouterr()
    shown = text.out + text.err
    for fact in ("Dry run of Net", "conv2d", "runs in onnxruntime", "Dynamic: batch", "560 bytes of weights"):
        assert fact in shown
    assert [p.suffix for p in tmp_path.iterdir()] == [".log"], "a dry run leaves its log and no artifact"


def test_disable_returns_the_model_untouched_whatever_else_is_given():
    original = Net().train()
    before = snapshot(original)
    assert clika_compile(original, disable=True) is original
    assert clika_compile(len, disable=True) is len
    assert_same(before, snapshot(original))


def test_graph_name_names_the_graph():
    assert clika_compile(Net(), tracing_inputs=images()).graph.name == "Net"
    module = clika_compile(Net(), tracing_inputs=images(), graph_name="tower")
    assert module.graph.name == "tower"
    assert str(module.graph).startswith("graph tower(")


def test_the_module_is_in_the_mode_of_tracing():
    assert not clika_compile(Net().train(), tracing_inputs=images()).training
    module = clika_compile(Net().train(), tracing_inputs=images(), skip_eval_set_mode=True)
    assert module.training
    assert any(node.op.name == "dropout" for node in module.graph.nodes)
    assert not clika_compile(Net().eval(), tracing_inputs=images(), skip_eval_set_mode=True).training


def test_no_logs_dir_writes_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    clika_compile(Net(), tracing_inputs=images())
    assert list(tmp_path.iterdir()) == []


def test_a_logs_dir_receives_the_full_log(tmp_path):
    clika_compile(Net(), tracing_inputs=images(), logs_dir=str(tmp_path / "deep" / "logs"))
    (log,) = (tmp_path / "deep" / "logs").iterdir()
    assert log.name.startswith("clika_")
    text = log.read_text()
    for fact in (
        "discard_input_model",
        "Parsing node: 'conv2d'",
        "Parsed to -> 'conv2d' (Subgraph: 'Net/conv')",
        "Dynamic",
    ):
        assert fact in text


def test_is_model_pretrained_is_recorded_and_changes_no_number(tmp_path):
    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(2, 3, 8, 8)
    modules = [
        clika_compile(
            net, tracing_inputs=[x], is_model_pretrained=flag, discard_input_model=False, logs_dir=tmp_path / str(flag)
        )
        for flag in (True, False)
    ]
    assert torch.equal(modules[0](x), modules[1](x))
    text = next((tmp_path / "False").iterdir()).read_text()
    assert "is_model_pretrained" in text


def test_an_unknown_extra_option_names_the_known_ones():
    known = "check_passes, compare_after_export, external_data"
    with pytest.raises(ModelError, match=f"unknown option 'external' = True; the options are {known}"):
        clika_compile(Net(), tracing_inputs=images(), external=True)


def test_an_option_of_another_type_says_which_it_takes():
    with pytest.raises(ModelError, match="option 'external_data' is 'yes', a str; it takes a bool"):
        clika_compile(Net(), tracing_inputs=images(), external_data="yes")


def test_options_by_name_override_those_of_the_dataclass():
    options = ClikaCompileOptions(external_data=True)
    module = clika_compile(Net(), tracing_inputs=images(), clika_compile_options=options, check_passes=True)
    assert isinstance(module, ClikaModule)


def test_quantization_settings_need_deployment_settings_and_calibration_inputs():
    with pytest.raises(ValueError, match="quantization_settings needs deployment_settings as well"):
        clika_compile(Net(), tracing_inputs=images(), quantization_settings=QuantizationSettings())
    with pytest.raises(ValueError, match="quantization_settings needs calibration_inputs as well"):
        clika_compile(
            Net(),
            tracing_inputs=images(),
            deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
            quantization_settings=QuantizationSettings(),
        )


def test_settings_of_layers_alone_are_refused_and_not_ignored():
    layers = {"conv": LayerQuantizationSettings(skip_quantization=True)}
    with pytest.raises(ModelError, match=r"layer_quantization_settings are given without quantization_settings"):
        clika_compile(
            Net(),
            calibration_inputs=images(),
            deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
            layer_quantization_settings=layers,
        )


def test_partial_graphs_are_refused_and_not_ignored():
    with pytest.raises(ClikaError, match=r"fullgraph=False \(partial graphs\) is not available in this version"):
        clika_compile(Net(), tracing_inputs=images(), fullgraph=False)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("toaster", r"a plugin may add it: docs/example-plugin.md"),
        ("tflite", "it retired before release 25, and is not implemented; a plugin may add it: docs/example-plugin.md"),
        ("QNN", "it retired before release 25, and is not implemented; a plugin may add it: docs/example-plugin.md"),
        (
            "tensorrt-llm",
            r"pip install clika-ref-tensorrt \(in a clone: pip install plugins/tensorrt; from wheels: .*\)$",
        ),
        ("openvino", r"pip install clika-ref-openvino \(in a clone: pip install plugins/openvino; from wheels: .*\)$"),
        ("trt", r"pip install clika-ref-tensorrt \(in a clone: pip install plugins/tensorrt; from wheels: .*\)$"),
        ("opnvino", r"did you mean 'openvino'\?$"),
        ("ort", r"did you mean 'onnxruntime'\?$"),
    ],
)
def test_a_target_that_no_plugin_provides_says_what_to_do(name, remedy, monkeypatch):
    monkeypatch.setenv("CLIKA_REF_PLUGINS", "aten,cleanup,onnxruntime")
    settings = type("Mine", (BaseDeploymentSettings,), {"target": name})()
    message = rf"no installed plugin provides the target '{name}' \(installed: onnxruntime\); {remedy}"
    with pytest.raises(TargetError, match=message):
        clika_compile(Net(), tracing_inputs=images(), deployment_settings=settings)


def test_what_is_said_to_provide_our_targets_provides_them():
    found = {t.name: plugin.distribution for plugin in load_installed_plugins().plugins for t in plugin.targets}
    assert {name: found[name] for name in TARGET_DISTRIBUTIONS} == TARGET_DISTRIBUTIONS


def test_deployment_settings_say_what_they_are_for():
    settings = DeploymentSettings_TensorRT_ONNX()
    assert (str(settings), settings.is_TensorRT_ONNX(), settings.is_OpenVINO_ONNX()) == ("tensorrt", True, False)
    assert (settings.is_TensorRT_LLM_ONNX(), settings.is_ONNXRuntime_ONNX()) == (False, False)
    assert isinstance(settings, BaseDeploymentSettings)


def test_tracing_inputs_win_over_calibration_inputs():
    calibration = [torch.randn(5, 3, 30, 30)]
    module = clika_compile(Net(), tracing_inputs=images(), calibration_inputs=calibration)
    with pytest.raises(ModelError, match="dim 2 must be 8"):
        module(calibration[0])


def test_a_failure_leaves_the_model_in_the_mode_it_was_in():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    with pytest.raises(ModelError):
        clika_compile(model, tracing_inputs=[torch.zeros(1, 3)])
    assert all(module.training for module in model.modules())


SWITCHES = [
    "discard_input_model",
    "is_model_pretrained",
    "is_dry_run",
    "skip_eval_set_mode",
    "fullgraph",
    "dynamic",
    "disable",
    "check_passes",
]


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("value", ["no", 1])
def test_a_switch_takes_a_bool_and_nothing_that_counts_as_one(name, value):
    with pytest.raises(ModelError, match=rf"{name}'? is {value!r}, a {type(value).__name__}; it takes "):
        clika_compile(Net(), tracing_inputs=images(), **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "deployment_settings",
            "onnxruntime",
            r"is 'onnxruntime', a str; .* such as DeploymentSettings_ONNXRuntime_ONN",
        ),
        (
            "clika_compile_options",
            {"check_passes": True},
            r"is {'check_passes': True}, a dict; it takes a ClikaCompileO",
        ),
        ("clika_compile_options", "", r"is '', a str; it takes a ClikaCompileOptions"),
        ("graph_name", 5, "is 5, a int; it takes a str, or None"),
        ("logs_dir", 5, "is 5, a int; it takes the path of a folder, or None"),
        (
            "data_transform_fn",
            5,
            r"is 5, a int; it takes a function that is called as data_transform_fn\(element\), or None",
        ),
        ("data_transform_fn", lambda: 1, r"takes \(\), but is called as data_transform_fn\(element\): too many"),
        ("forward_fn", 5, r"is 5, a int; it takes a function that is called as forward_fn\(model, args, kwargs\)"),
        (
            "forward_fn",
            lambda m, xs: m(*xs),
            r"takes \(m, xs\), but is called as forward_fn\(model, args, kwargs\): too many positional arguments",
        ),
        ("calibration_inputs", 5, "are a int. Give a list with one element for each call"),
        ("calibration_inputs", torch.ones(2), "are a Tensor. Give a list with one element for each call"),
    ],
)
def test_an_argument_of_another_kind_is_told_what_it_takes(name, value, message):
    with pytest.raises(ModelError, match=f"^{name} {message}"):
        clika_compile(Net(), tracing_inputs=images(), **{name: value})


def test_a_function_whose_parameters_python_cannot_tell_is_called():
    with pytest.raises(ValueError, match="no signature found"):
        inspect.signature(torch.relu)
    module = clika_compile(Net(), tracing_inputs=images(), data_transform_fn=torch.relu)
    assert isinstance(module, ClikaModule)


def test_dynamic_none_is_what_torch_compile_calls_automatic():
    module = clika_compile(Net(), tracing_inputs=images(), dynamic=None)
    assert len(module.graph.symbols) == 1


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_what_torchscript_made_is_refused_by_name():
    traced = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    function = torch.jit.trace(lambda x: x + 1, torch.ones(2))
    for scripted, shown in (
        (traced, "'Linear' is a TopLevelTracedModule"),
        (traced.forward, "'forward' is a ScriptMethod"),
        (function, "is a ScriptFunction"),
    ):
        with pytest.raises(ModelError, match=f"{shown}, made by torch.jit.trace or .*; pass the original nn.Module"):
            clika_compile(scripted, tracing_inputs=[torch.ones(1, 2)])


@pytest.mark.parametrize("name", ["data_transform_fn", "forward_fn"])
def test_a_function_that_raises_keeps_its_error_and_names_its_element(name):
    seen = []

    def fail(*_):
        seen.append(1)
        if len(seen) == 2:
            raise KeyError("image")
        return images()[0]

    def feed(model, args, kwargs):
        fail()
        model(*args)

    with pytest.raises(KeyError, match="image") as caught:
        clika_compile(Net(), tracing_inputs=images(), **{name: feed if name == "forward_fn" else fail})
    assert caught.value.__notes__ == [f"in {name}, called for element 2 of the inputs"]


def test_calibration_inputs_beside_tracing_inputs_are_logged_as_not_read_yet(tmp_path):
    def never():
        pytest.fail("the calibration inputs were read")
        yield

    clika_compile(Net(), tracing_inputs=images(), calibration_inputs=never(), logs_dir=tmp_path)
    (log,) = tmp_path.iterdir()
    assert "not read yet, as tracing_inputs are given and quantization_settings are not: clika_init" in log.read_text()
