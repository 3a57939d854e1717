"""Every argument of ``clika_compile``: its effect, and the message for a wrong value."""

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
    PruningSettings,
    QuantizationSettings,
    clika_compile,
)
from clika_ref.core.errors import ModelError, TargetError
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


def take_snapshot(model):
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


def test_clika_compile_signature_matches_reference():
    """The keyword-only parameters and their defaults are those of the published signature."""
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


@pytest.mark.filterwarnings("ignore:.*trains without its 1 dropout:UserWarning")
@pytest.mark.parametrize("mode", [True, False])
def test_clika_compile_kept_model_finetuned_stays_identical(mode):
    """Fine-tuning the compiled module leaves the kept model bit-identical."""
    original = Net().train(mode)
    original.norm.eval()
    original.conv.bias.requires_grad_(False)
    inputs = images()
    before = take_snapshot(original)
    module = clika_compile(original, tracing_inputs=inputs, discard_input_model=False)
    assert_same(before, take_snapshot(original))
    assert not module.conv.bias.requires_grad
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.5)
    module.train()
    module(images()[0]).square().sum().backward()
    optimizer.step()
    module.norm.running_mean.add_(1)
    assert_same(before, {**take_snapshot(original), "random": before["random"]})
    assert not torch.equal(module.head.weight, original.head.weight)


def test_clika_compile_kept_train_mode_keeps_running_stats():
    """Compiling in train mode leaves the running statistics of a kept model unchanged."""
    original = Net().train()
    inputs = images()
    before = take_snapshot(original)
    clika_compile(original, tracing_inputs=inputs, discard_input_model=False, skip_eval_set_mode=True)
    assert_same(before, take_snapshot(original))


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


def test_clika_compile_weight_write_kept_model_unchanged():
    """A kept model that writes to its own weight is captured and stays unchanged."""
    original = Decaying(by_data=False)
    inputs = [torch.ones(2, 3), torch.ones(4, 3)]
    module = clika_compile(original, tracing_inputs=inputs, discard_input_model=False)
    assert torch.equal(original.weight, torch.full((3,), 8.0))
    for _ in range(2):
        assert torch.equal(module(inputs[0]), original(inputs[0]))
        assert torch.equal(module.weight, original.weight)


def test_clika_compile_failed_capture_kept_model_unchanged():
    """A failed capture restores the weights of a kept model."""

    class Choosing(Decaying):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x  # which no tracer follows

    original = Choosing(by_data=True)
    with pytest.raises(ModelError, match="cannot be captured"):
        clika_compile(original, tracing_inputs=[torch.ones(2, 3), torch.ones(4, 3)], discard_input_model=False)
    assert torch.equal(original.weight, torch.full((3,), 8.0))


def test_clika_compile_discarded_model_shares_weights():
    """The module takes over the weight tensors of a discarded model without a copy."""
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
def test_clika_compile_peak_memory_counts_weight_copies():
    """Peak memory grows by one copy of kept weights and by none of discarded ones, in a new process."""
    run = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    discarded, kept = json.loads(run.stdout.splitlines()[-1])
    assert discarded < 0.5
    assert kept > 0.9


def test_clika_compile_dry_run_returns_original(capsys, tmp_path):
    """A dry run prints its report, writes its log only and returns the unchanged model."""
    original = Net().train()
    inputs = images()
    before = take_snapshot(original)
    result = clika_compile(original, tracing_inputs=inputs, is_dry_run=True, logs_dir=tmp_path)
    assert result is original
    assert_same(before, take_snapshot(original))
    text = capsys.readouterr()
    shown = text.out + text.err
    for fact in ("Dry run of Net", "conv2d", "runs in onnxruntime", "Dynamic: batch", "560 bytes of weights"):
        assert fact in shown
    assert [p.suffix for p in tmp_path.iterdir()] == [".log"], "a dry run leaves its log and no artifact"


def test_clika_compile_disable_returns_model_unchanged():
    """`disable=True` returns the model unchanged, without inputs and for any callable."""
    original = Net().train()
    before = take_snapshot(original)
    assert clika_compile(original, disable=True) is original
    assert clika_compile(len, disable=True) is len
    assert_same(before, take_snapshot(original))


def test_clika_compile_graph_name_names_graph():
    """`graph_name` names the graph; the default is the class name of the model."""
    assert clika_compile(Net(), tracing_inputs=images()).graph.name == "Net"
    module = clika_compile(Net(), tracing_inputs=images(), graph_name="tower")
    assert module.graph.name == "tower"
    assert str(module.graph).startswith("graph tower(")


def test_clika_compile_training_mode_matches_tracing():
    """The module is in eval mode, or in the mode of the model with `skip_eval_set_mode`."""
    assert not clika_compile(Net().train(), tracing_inputs=images()).training
    module = clika_compile(Net().train(), tracing_inputs=images(), skip_eval_set_mode=True)
    assert module.training
    assert any(node.op.name == "dropout" for node in module.graph.nodes)
    assert not clika_compile(Net().eval(), tracing_inputs=images(), skip_eval_set_mode=True).training


def test_clika_compile_no_logs_dir_writes_no_file(tmp_path, monkeypatch):
    """Without `logs_dir`, no file is written."""
    monkeypatch.chdir(tmp_path)
    clika_compile(Net(), tracing_inputs=images())
    assert list(tmp_path.iterdir()) == []


def test_clika_compile_logs_dir_receives_full_log(tmp_path):
    """`logs_dir` is created and receives the full log."""
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


def test_clika_compile_is_model_pretrained_logged_only(tmp_path):
    """`is_model_pretrained` is written to the log and does not change the outputs."""
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


def test_clika_compile_unknown_option_lists_known():
    """An unknown extra option raises an error that lists the known options."""
    known = "check_passes, compare_after_export, external_data"
    with pytest.raises(
        ModelError, match=rf"unknown option 'external' = True. Did you mean 'external_data'\? The options are {known}"
    ):
        clika_compile(Net(), tracing_inputs=images(), external=True)


def test_clika_compile_option_wrong_type_reports_type():
    """An extra option of a wrong type raises an error with the type that it takes."""
    with pytest.raises(ModelError, match=r"option 'external_data' is 'yes', a str. Give a bool"):
        clika_compile(Net(), tracing_inputs=images(), external_data="yes")


def test_clika_compile_options_by_name_accepted():
    """Options by name are accepted in addition to `clika_compile_options`."""
    options = ClikaCompileOptions(external_data=True)
    module = clika_compile(Net(), tracing_inputs=images(), clika_compile_options=options, check_passes=True)
    assert isinstance(module, ClikaModule)


def test_clika_compile_quantization_needs_other_arguments():
    """`quantization_settings` needs `deployment_settings` and `calibration_inputs`."""
    with pytest.raises(ValueError, match="quantization_settings are given without deployment_settings"):
        clika_compile(Net(), tracing_inputs=images(), quantization_settings=QuantizationSettings())
    with pytest.raises(ValueError, match="quantization_settings are given without calibration_inputs"):
        clika_compile(
            Net(),
            tracing_inputs=images(),
            deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
            quantization_settings=QuantizationSettings(),
        )


def test_clika_compile_layer_settings_alone_rejected():
    """`layer_quantization_settings` without `quantization_settings` raise an error."""
    layers = {"conv": LayerQuantizationSettings(skip_quantization=True)}
    with pytest.raises(ModelError, match=r"layer_quantization_settings are given without quantization_settings"):
        clika_compile(
            Net(),
            calibration_inputs=images(),
            deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
            layer_quantization_settings=layers,
        )


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("toaster", r"A plugin can add it: docs/example-plugin.md"),
        ("tflite", "It retired before release 25, and is not implemented. A plugin can add it: docs/example-plugin.md"),
        ("QNN", "It retired before release 25, and is not implemented. A plugin can add it: docs/example-plugin.md"),
        (
            "tensorrt-llm",
            r"Run pip install clika-ref-tensorrt \(in a clone: pip install plugins/tensorrt; from wheels: .*\)\.$",
        ),
        (
            "openvino",
            r"Run pip install clika-ref-openvino \(in a clone: pip install plugins/openvino; from wheels: .*\)\.$",
        ),
        ("trt", r"Run pip install clika-ref-tensorrt \(in a clone: pip install plugins/tensorrt; from wheels: .*\)\.$"),
        ("opnvino", r"Did you mean 'openvino'\?$"),
        ("ort", r"Did you mean 'onnxruntime'\?$"),
    ],
)
def test_clika_compile_unknown_target_reports_remedy(name, remedy, monkeypatch):
    """An unknown target raises an error that names the package to install or the near match."""
    monkeypatch.setenv("CLIKA_REF_PLUGINS", "aten,cleanup,onnxruntime")
    settings = type("Mine", (BaseDeploymentSettings,), {"target": name})()
    message = rf"cannot use the target '{name}': no installed plugin provides it \(installed: onnxruntime\)\. {remedy}"
    with pytest.raises(TargetError, match=message):
        clika_compile(Net(), tracing_inputs=images(), deployment_settings=settings)


def test_target_distributions_match_installed_plugins():
    """Each distribution in `TARGET_DISTRIBUTIONS` provides the target that it is listed for."""
    found = {t.name: plugin.distribution for plugin in load_installed_plugins().plugins for t in plugin.targets}
    assert {name: found[name] for name in TARGET_DISTRIBUTIONS} == TARGET_DISTRIBUTIONS


def test_deployment_settings_report_their_target():
    """Deployment settings report their target by `str` and by their `is_...` methods."""
    settings = DeploymentSettings_TensorRT_ONNX()
    assert (str(settings), settings.is_TensorRT_ONNX(), settings.is_OpenVINO_ONNX()) == ("tensorrt", True, False)
    assert (settings.is_TensorRT_LLM_ONNX(), settings.is_ONNXRuntime_ONNX()) == (False, False)
    assert isinstance(settings, BaseDeploymentSettings)


def test_clika_compile_tracing_inputs_take_precedence():
    """Tracing uses `tracing_inputs` if `calibration_inputs` are given too."""
    calibration = [torch.randn(5, 3, 30, 30)]
    module = clika_compile(Net(), tracing_inputs=images(), calibration_inputs=calibration)
    with pytest.raises(ModelError, match="dim 2 must be 8"):
        module(calibration[0])


def test_clika_compile_failure_keeps_training_mode():
    """A failed compilation leaves the model in its training mode."""
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
    "convert_branches",
]


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("value", ["no", 1])
def test_clika_compile_switch_non_bool_rejected(name, value):
    """A switch takes a bool only; "no" and 1 raise an error."""
    with pytest.raises(ModelError, match=rf"{name}'? is {value!r}, a {type(value).__name__}. Give "):
        clika_compile(Net(), tracing_inputs=images(), **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "deployment_settings",
            "onnxruntime",
            r"is 'onnxruntime', a str. .* such as DeploymentSettings_ONNXRuntime_ONN",
        ),
        (
            "clika_compile_options",
            {"check_passes": True},
            r"is {'check_passes': True}, a dict. Give a ClikaCompileO",
        ),
        ("clika_compile_options", "", r"is '', a str. Give a ClikaCompileOptions"),
        ("graph_name", 5, "is 5, a int. Give a str, or None"),
        ("logs_dir", 5, "is 5, a int. Give the path of a folder, or None"),
        (
            "data_transform_fn",
            5,
            r"is 5, a int. Give a function that is called as data_transform_fn\(element\), or None",
        ),
        ("data_transform_fn", lambda: 1, r"takes \(\), but is called as data_transform_fn\(element\): too many"),
        ("forward_fn", 5, r"is 5, a int. Give a function that is called as forward_fn\(model, args, kwargs\)"),
        (
            "forward_fn",
            lambda m, xs: m(*xs),
            r"takes \(m, xs\), but is called as forward_fn\(model, args, kwargs\): too many positional arguments",
        ),
        ("calibration_inputs", 5, "are a int. Give a list with one element for each call"),
        ("calibration_inputs", torch.ones(2), "are a Tensor. Give a list with one element for each call"),
    ],
)
def test_clika_compile_argument_wrong_type_reports_type(name, value, message):
    """An argument of a wrong type or signature raises an error with the accepted type."""
    with pytest.raises(ModelError, match=f"^{name} {message}"):
        clika_compile(Net(), tracing_inputs=images(), **{name: value})


def test_clika_compile_function_without_signature_called():
    """A `data_transform_fn` without an inspectable signature is accepted."""
    with pytest.raises(ValueError, match="no signature found"):
        inspect.signature(torch.relu)
    module = clika_compile(Net(), tracing_inputs=images(), data_transform_fn=torch.relu)
    assert isinstance(module, ClikaModule)


def test_clika_compile_dynamic_none_automatic():
    """`dynamic=None` makes the varying dim dynamic, as in torch.compile."""
    module = clika_compile(Net(), tracing_inputs=images(), dynamic=None)
    assert len(module.graph.symbols) == 1


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_clika_compile_torchscript_rejected():
    """Traced TorchScript modules and functions raise an error with their class name."""
    traced = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    function = torch.jit.trace(lambda x: x + 1, torch.ones(2))
    for scripted, shown in (
        (traced, "'Linear': it is a TopLevelTracedModule"),
        (traced.forward, "'forward': it is a ScriptMethod"),
        (function, "is a ScriptFunction"),
    ):
        with pytest.raises(ModelError, match=f"{shown}, made by torch.jit.trace or .*. Pass the original nn.Module"):
            clika_compile(scripted, tracing_inputs=[torch.ones(1, 2)])


@pytest.mark.parametrize("name", ["data_transform_fn", "forward_fn"])
def test_clika_compile_function_error_names_element(name):
    """An error of a user function is raised unchanged, with a note that names the element."""
    seen = []

    def fail(*_):
        seen.append(1)
        if len(seen) == 2:
            raise KeyError("image")
        return images()[0]

    def fail_before_call(model, args, kwargs):
        fail()
        model(*args)

    with pytest.raises(KeyError, match="image") as caught:
        clika_compile(Net(), tracing_inputs=images(), **{name: fail_before_call if name == "forward_fn" else fail})
    assert caught.value.__notes__ == [f"in {name}, called for tracing input 2"]


def test_clika_compile_unread_calibration_inputs_logged(tmp_path, unread_inputs):
    """Unused `calibration_inputs` stay unread, with a line in the log."""
    clika_compile(Net(), tracing_inputs=images(), calibration_inputs=unread_inputs, logs_dir=tmp_path)
    (log,) = tmp_path.iterdir()
    assert (
        "calibration_inputs are not read: tracing_inputs are given without quantization_settings. clika_init"
        in log.read_text()
    )


def test_clika_compile_inputs_read_by_pruning_not_logged_unread(tmp_path):
    """`calibration_inputs` that pruning reads are not logged as unread."""
    settings = PruningSettings(sparsity=0.5)
    clika_compile(
        Net(), tracing_inputs=images(), calibration_inputs=images(), pruning_settings=settings, logs_dir=tmp_path
    )
    (log,) = tmp_path.iterdir()
    assert "Pruning" in log.read_text()
    assert "calibration_inputs are not read" not in log.read_text()
