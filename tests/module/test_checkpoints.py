"""Checkpoints: the loaded module computes, exports, trains and is quantized like the saved one, from a small file."""

import json
import os
import subprocess
import sys
import textwrap
import zlib

import pytest
import safetensors
import torch
import torchvision
import transformers
from adapted_nets import INT4
from loaded_copies import load_copy
from log_files import read_logs
from saved_nets import ALL, HERE, Convolutions, Tokens, build_net, compile_net, make_batches, train
from torch import nn

from clika_ref import (
    ClikaModule,
    DeploymentSettings_OpenVINO_ONNX,
    DeploymentSettings_TensorRT_ONNX,
    LayerQuantizationSettings,
    ModelError,
    PruningSettings,
    QuantizationSettings,
    clika_compile,
)
from clika_ref.compiled.state import log_scales_of
from clika_ref.serialization.container import unpack_file

CASES = {
    "float": (Convolutions, None, {}),
    "convolutions": (Convolutions, ALL, {}),
    "tokens": (Tokens, ALL, {"smooth_quant": "on"}),
    "int4": (Tokens, INT4, {"smooth_quant": "on"}),
    "rounded": (Convolutions, ALL, {"gptq": "on"}),
    "int4, GPTQ": (Tokens, INT4, {"gptq": "on"}),
    "equalized": (Convolutions, ALL, {"equalization": "on"}),
}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    kind, settings, options = CASES[request.param]
    return kind, compile_net(kind, settings, **options)


@pytest.fixture(scope="module")
def quantized_module():
    return compile_net()


@pytest.fixture
def own_copy(quantized_module):
    """A copy that a test may change."""
    return reload(quantized_module, keep_float_weights=True, keep_calibration_inputs=True)


def reload(module, **options):
    return ClikaModule.clika_from_serialized(module.clika_serialize(**options))


def run_batches(module, kind):
    with torch.no_grad():
        return [module(x) for x in make_batches(kind, 2)]


def is_equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def read_stored_dtypes(serialized):
    """Return the dtype of each tensor of a file, and its document."""
    length = int.from_bytes(serialized[:8], "little")
    header = json.loads(serialized[8 : 8 + length])
    return {n: e["dtype"] for n, e in header.items() if n != "__metadata__"}, unpack_file(serialized)[0]


# What is loaded


def test_clika_load_outputs_bit_identical(case, tmp_path):
    """A loaded module has bit-identical outputs and the same graph."""
    kind, module = case
    module.clika_save(tmp_path / "saved")
    loaded = ClikaModule.clika_load(tmp_path / "saved")
    assert not loaded.training
    assert is_equal(run_batches(module, kind), run_batches(loaded, kind))
    assert str(loaded.graph) == str(module.graph)


def test_clika_load_exports_same_bytes(case, tmp_path):
    """A loaded module exports the same bytes."""
    kind, module = case
    inputs = make_batches(kind, 1)[0]
    for name, exported in (("before", module), ("after", reload(module))):
        (tmp_path / name).mkdir()
        exported.clika_export(tmp_path / name / "model.onnx", inputs)
    assert (tmp_path / "before/model.onnx").read_bytes() == (tmp_path / "after/model.onnx").read_bytes()


class Positions(nn.Module):
    """A sum that a pass removes before the export; a sum in the lowered layer may get its name."""

    def __init__(self):
        super().__init__()
        self.one = transformers.pytorch_utils.Conv1D(32, 32)

    def forward(self, x):
        return torch.relu(self.one(x)) * (torch.arange(32) + 1)


def test_clika_load_removed_names_do_not_change_export(tmp_path):
    """Names of removed nodes do not change the exported file of a loaded module."""
    module = clika_compile(
        Positions().eval(),
        calibration_inputs=[torch.randn(16, 32)],
        quantization_settings=INT4,
        deployment_settings=HERE,
    )
    for name, exported in (("before", module), ("after", reload(module))):
        (tmp_path / name).mkdir()
        exported.clika_export(tmp_path / name / "model.onnx")
    assert (tmp_path / "before/model.onnx").read_bytes() == (tmp_path / "after/model.onnx").read_bytes()


def test_clika_load_and_serialize_same_bytes(case):
    """A loaded module is serialized as the same bytes."""
    _, module = case
    serialized = module.clika_serialize()
    assert ClikaModule.clika_from_serialized(serialized).clika_serialize() == serialized


def test_clika_serialize_stores_quantized_weights_as_int8(case):
    """Quantized weights are stored in INT8 or INT4, others in float."""
    _, module = case
    plan = module.clika_state.quantized and module.clika_state.quantized.plan
    kinds, document = read_stored_dtypes(module.clika_serialize())
    if plan is None:
        assert document["quantized_weights"] == {}
        return
    expected = {"stem.0.weight", "deep.0.weight", "last.weight"}
    expected = expected if "stem.0.weight" in kinds else {"one.weight", "two.weight"}
    assert expected == document["quantized_weights"].keys()  # a computed and a tied one stay
    assert {kinds[name] for name in expected} == {"U8" if plan.packed_weights else "I8"}
    assert {kinds[name] for name in ("table.weight", "head.weight", "scale") if name in kinds} == {"F32"}


def test_clika_load_weights_equal_dequantized_ones(quantized_module):
    """Loaded weights are the dequantized ones, within half a step of the originals."""
    loaded, plan = reload(quantized_module), quantized_module.clika_state.quantized.plan
    norm = (
        quantized_module.get_parameter("stem.1.weight")
        / (quantized_module.get_buffer("stem.1.running_var") + 1e-5).sqrt()
    )
    (scales,) = [
        plan.weights[n.name]
        for n in quantized_module.graph.nodes
        if n.inputs[1:2] and n.inputs[1].name == "stem.0.weight"
    ]
    steps = (loaded.get_parameter("stem.0.weight") * (norm / scales).reshape(-1, 1, 1, 1)).detach()
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-3)  # of float32, which 128 steps are products of
    missed = (loaded.get_parameter("stem.0.weight") - quantized_module.get_parameter("stem.0.weight")).detach()
    assert bool((missed.abs() <= (scales / norm.abs() * 0.501).reshape(-1, 1, 1, 1)).all())
    assert missed.any()


def test_clika_serialize_keep_float_weights_restores_state(quantized_module):
    """With `keep_float_weights`, all weights are restored as float."""
    loaded = reload(quantized_module, keep_float_weights=True)
    state, found = quantized_module.state_dict(), loaded.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items() if name != "_extra_state")
    assert is_equal(run_batches(quantized_module, Convolutions), run_batches(loaded, Convolutions))
    assert (
        quantized_module.clika_state.quantized.plan.offsets.keys() == loaded.clika_state.quantized.plan.offsets.keys()
    )


def test_clika_serialize_tied_weights_stored_once():
    """Tied weights are stored once and are tied after loading."""
    module = compile_net(Tokens)
    kinds, document = read_stored_dtypes(module.clika_serialize())
    (pair,) = document["graph"]["aliases"].items()
    assert {*pair} == {"table.weight", "last.weight"}
    assert len(kinds.keys() & {*pair}) == 1
    loaded = reload(module)
    assert loaded.get_parameter("table.weight") is loaded.get_parameter("last.weight")


def test_clika_serialize_masks_take_one_bit_per_element():
    """Pruning masks are restored and take one bit per element."""
    module = compile_net(settings=None, gptq="on")
    module.clika_prune(PruningSettings("2:4", None), calibration_inputs=make_batches(Convolutions))
    module.clika_initialize_algorithms(ALL, calibration_inputs=make_batches(Convolutions), deployment_settings=HERE)
    serialized = module.clika_serialize()
    kinds, document = read_stored_dtypes(serialized)
    masks = {name: kind for name, kind in kinds.items() if name.startswith("clika.masks.")}
    assert masks
    assert {*masks.values()} == {"U8"}
    assert "last.weight" in document["quantized_weights"]
    loaded = ClikaModule.clika_from_serialized(serialized)
    assert is_equal(run_batches(module, Convolutions), run_batches(loaded, Convolutions))
    assert is_equal([module.get_buffer(name) for name in masks], [loaded.get_buffer(name) for name in masks])


def test_clika_serialize_lossy_int8_weight_stays_float():
    """A weight that INT8 would not restore exactly is stored in float."""
    module = compile_net(settings=None)
    module.clika_prune(PruningSettings("2:4", None), calibration_inputs=make_batches(Convolutions))
    module.clika_initialize_algorithms(ALL, calibration_inputs=make_batches(Convolutions), deployment_settings=HERE)
    mask, plan = module.get_buffer("clika.masks.last.weight"), module.clika_state.quantized.plan
    plan.offsets["conv2d_2"] = torch.where(mask, 0, 1).to(torch.int8)  # what is masked, rounded away from 0
    assert plan.weights.keys() >= {"conv2d_2"}
    assert "last.weight" not in read_stored_dtypes(module.clika_serialize())[1]["quantized_weights"]
    assert is_equal(run_batches(module, Convolutions), run_batches(reload(module), Convolutions))


def test_clika_serialize_zero_batch_norm_channel_keeps_weights(own_copy):
    """A layer with a channel that batch norm multiplies by zero keeps its float weights."""
    with torch.no_grad():
        own_copy.get_parameter("stem.1.weight")[2] = 0
    own_copy.eval()
    loaded = reload(own_copy)
    assert torch.equal(loaded.get_parameter("stem.0.weight"), own_copy.get_parameter("stem.0.weight"))
    assert not torch.equal(loaded.get_parameter("last.weight"), own_copy.get_parameter("last.weight"))
    assert is_equal(run_batches(own_copy, Convolutions), run_batches(loaded, Convolutions))


def test_clika_serialize_nan_weight_kept(own_copy):
    """NaN in a weight is kept."""
    with torch.no_grad():
        own_copy.get_parameter("last.weight")[0, 0] = torch.nan
    assert bool(reload(own_copy).get_parameter("last.weight").isnan().any())


@pytest.mark.slow
def test_clika_serialize_size_close_to_weights():
    """A file is at most 2 % and 200 kB larger than its weights, in INT8 and INT4."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).eval()
    sizes = {}
    for settings in (ALL, INT4):
        module = clika_compile(
            model,
            calibration_inputs=[torch.randn(8, 512)],
            quantization_settings=settings,
            deployment_settings=HERE,
            discard_input_model=False,
        )
        sizes[settings is ALL] = len(module.clika_serialize())
    elements, floats = 2 * 512 * 1024, 4 * (512 + 1024)
    assert sizes[True] <= 1.02 * (elements + 2 * floats) + 200e3  # a scale for each bias
    assert sizes[False] <= 1.02 * (elements / 2 + elements / 16 * 4 + floats) + 200e3


@pytest.mark.slow
def test_clika_serialize_deep_model_size_close_to_weights():
    """A deep model with few weights has little overhead."""
    torch.manual_seed(0)
    module = clika_compile(
        torchvision.models.mobilenet_v3_small().eval(),
        calibration_inputs=[torch.randn(4, 3, 64, 64)],
        quantization_settings=ALL,
        deployment_settings=HERE,
    )
    serialized, plan = module.clika_serialize(), module.clika_state.quantized.plan
    constants = unpack_file(serialized)[0]["graph"]["constants"]
    table = json.loads(serialized[8 : 8 + int.from_bytes(serialized[:8], "little")])
    places = [table[name]["data_offsets"] for name in constants]
    needed = sum(end - begin for begin, end in places) + sum(scales.nbytes for scales in plan.weights.values())
    assert len(serialized) <= 1.02 * needed + 200e3


# Training


@pytest.mark.parametrize("options", [{}, {"batch_norm": "live"}], ids=["frozen", "live"])
def test_clika_serialize_learned_scales_restored(options):
    """Learned scales are restored, with frozen and live batch norm."""
    module = train(compile_net(**options), Convolutions)
    for loaded in (reload(module), reload(module, keep_float_weights=True)):
        assert is_equal(run_batches(module, Convolutions), run_batches(loaded, Convolutions))
        assert any(log.any() for log in log_scales_of(loaded).values())
        assert train(loaded, Convolutions, 1).clika_state.options.batch_norm == options.get("batch_norm", "frozen")


def test_clika_serialize_trained_int4_restored():
    """A trained INT4 module is restored."""
    module = train(compile_net(Tokens, INT4), Tokens)
    assert is_equal(run_batches(module, Tokens), run_batches(reload(module), Tokens))


def test_clika_load_float_weights_continue_training_equally(own_copy):
    """Training continues from float weights as without saving."""
    own_copy = train(own_copy, Convolutions)
    loaded = reload(own_copy, keep_float_weights=True)
    ours, theirs = (train(m, Convolutions).state_dict() for m in (own_copy, loaded))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if name != "_extra_state")


@pytest.mark.parametrize("load", [reload, load_copy])
def test_clika_load_in_inference_mode_trains(quantized_module, load):
    """A module that is loaded in inference mode can be trained."""
    with torch.inference_mode():
        loaded = load(quantized_module)
    before = [parameter.detach().clone() for parameter in loaded.parameters()]
    trained = train(loaded, Convolutions, 1).parameters()
    assert not all(torch.equal(old, new) for old, new in zip(before, trained, strict=True))


@pytest.mark.parametrize("load", [reload, load_copy])
def test_clika_load_with_other_default_device_uses_cpu(quantized_module, load):
    """A module is loaded to the CPU with any default device."""
    with torch.device("meta"):
        loaded = load(quantized_module)
        loaded.load_state_dict(quantized_module.state_dict())
    assert is_equal(run_batches(quantized_module, Convolutions), run_batches(loaded.eval(), Convolutions))


def test_clika_load_keeps_requires_grad_and_mode(own_copy):
    """Frozen parameters and the mode are restored."""
    own_copy.get_parameter("stem.0.weight").requires_grad_(False)
    name = next(iter(log_scales_of(own_copy)))
    own_copy.get_parameter(name).requires_grad_(False)
    own_copy.train()
    loaded = reload(own_copy)
    assert loaded.training
    assert [n for n, p in loaded.named_parameters() if not p.requires_grad] == [
        n for n, p in own_copy.named_parameters() if not p.requires_grad
    ]


# Ranges and settings


def test_clika_load_kept_inputs_quantize_other_targets(quantized_module, tmp_path):
    """With kept inputs, a loaded module exports the same bytes for other targets."""
    loaded = reload(quantized_module, keep_float_weights=True, keep_calibration_inputs=True)
    for other in (DeploymentSettings_OpenVINO_ONNX(), DeploymentSettings_TensorRT_ONNX()):
        for name, exported in (("before.onnx", quantized_module), ("after.onnx", loaded)):
            exported.clika_export(tmp_path / name, deployment_settings=other)
        assert (tmp_path / "before.onnx").read_bytes() == (tmp_path / "after.onnx").read_bytes()
    reload(quantized_module, keep_calibration_inputs=True).clika_export(
        tmp_path / "third.onnx", deployment_settings=other
    )


def test_clika_load_without_inputs_reuses_ranges_of_same_data(quantized_module, tmp_path):
    """Without inputs, the saved ranges are used once the same data is given, without running it again."""
    data = make_batches(Convolutions)
    loaded = reload(quantized_module)
    with pytest.raises(ModelError, match=r"saved with the ranges of 5 batches, but without inputs. Pass the same cal"):
        loaded.clika_initialize_algorithms(ALL)
    with pytest.raises(ModelError, match=r"or it is a copy or was loaded without them. Pass data: clika_in"):
        loaded.clika_export(tmp_path / "other.onnx", deployment_settings=DeploymentSettings_OpenVINO_ONNX())
    loaded.clika_state.logs_dir = tmp_path
    loaded.clika_initialize_algorithms(ALL, calibration_inputs=data[:1])
    assert "5 batches, 5 of them from an earlier pass" in read_logs(tmp_path)
    assert loaded.clika_state.calibration.table.batches == 5
    loaded.clika_export(tmp_path / "other.onnx", deployment_settings=DeploymentSettings_OpenVINO_ONNX())


def test_load_state_dict_strict_missing_scale_named(own_copy):
    """A strict load names a missing scale, but accepts a state dict of the original."""
    state = own_copy.state_dict()
    name = next(n for n in state if n.startswith("clika.log_weight_scales"))
    del state[name]
    for module in (ClikaModule(), own_copy):
        with pytest.raises(RuntimeError, match=f"Missing key.*{name}"):
            module.load_state_dict(dict(state))
    assert own_copy.load_state_dict(build_net(Convolutions).state_dict()).missing_keys == []
    weights = {n: t + 1.0 for n, t in own_copy.state_dict().items() if n != "_extra_state"}
    own_copy.load_state_dict(weights)
    assert torch.equal(own_copy.state_dict()[name], weights[name]), "of what is given nothing keeps its value"


def test_clika_load_detects_weights_trained_after_calibration(own_copy, tmp_path):
    """Ranges of weights that were trained later are recognized, and the data runs again."""
    with torch.no_grad():
        own_copy.get_parameter("last.weight").mul_(1.5)
    loaded = reload(own_copy)
    loaded.clika_state.logs_dir = tmp_path
    loaded.clika_export(tmp_path / "model.onnx", make_batches(Convolutions, 1)[0])
    assert "The weights have changed since their scales were computed" in read_logs(tmp_path)
    loaded.clika_initialize_algorithms(ALL, calibration_inputs=make_batches(Convolutions))
    assert "its 5 batches must run again" in read_logs(tmp_path)


def test_clika_load_restores_settings(tmp_path):
    """The settings are restored, without local paths."""
    deployment = DeploymentSettings_TensorRT_ONNX(shapes={"n": (1, 4, 16)})
    settings = QuantizationSettings(weights_num_bits=[8], quantization_sensitivity_threshold=0.5)
    layers = {"stem.0": LayerQuantizationSettings(skip_quantization=True)}
    module = compile_net(
        settings=settings,
        deployment_settings=deployment,
        layer_quantization_settings=layers,
        ranges_file=tmp_path / "ranges",
        observer="min-max",
    )
    serialized = module.clika_serialize()
    assert str(tmp_path).encode() not in serialized
    loaded = ClikaModule.clika_from_serialized(serialized)
    assert loaded.clika_state.deployment == deployment
    assert (loaded.clika_state.request.given, loaded.clika_state.request.layers) == (settings, layers)
    assert loaded.clika_state.request.options == loaded.clika_state.options
    assert (loaded.clika_state.options.observer, loaded.clika_state.options.ranges_file) == ("min-max", "")
    assert loaded.clika_state.sizes == module.clika_state.sizes
    assert reload(module, keep_calibration_inputs=True).clika_state.sizes == module.clika_state.sizes


# Processes


SCRIPT = """
import hashlib, sys
sys.path.insert(0, {tests!r})
from saved_nets import compile_net
print(hashlib.sha256(compile_net(gptq="on").clika_serialize(keep_calibration_inputs=True)).hexdigest())
"""


@pytest.mark.slow
def test_clika_serialize_same_bytes_in_every_process(tmp_path, request):
    """The same model gives the same bytes in every process."""
    script = SCRIPT.format(tests=str(request.path.parents[1]))
    found = set()
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        found.add(run(script, folder, PYTHONHASHSEED=seed))
    assert len(found) == 1


SOURCE = """
import torch
from torch import nn

class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x, *, scale=2.0):
        return {"out": torch.relu(self.layer(x)) * scale}
"""

LOADING = """
import sys, torch
from clika_ref import ClikaModule
loaded = ClikaModule.clika_load("saved")
print(loaded(torch.ones(3, 8))["out"].double().sum().item(), "hidden" in sys.modules)
"""


@pytest.mark.slow
def test_clika_load_without_source_of_model(tmp_path):
    """A module is loaded without the source of the original model."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source/hidden.py").write_text(SOURCE)
    saving = """
        import torch
        from hidden import Hidden
        from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile
        torch.manual_seed(0)
        data = [torch.randn(n, 8) for n in (2, 3)]
        module = clika_compile(
            Hidden().eval(),
            calibration_inputs=data,
            quantization_settings=QuantizationSettings(quantization_sensitivity_threshold=1e9),
            deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
        )
        module.clika_save("saved")
        print(module(torch.ones(3, 8))["out"].double().sum().item(), False)
    """
    saved = run(textwrap.dedent(saving), tmp_path, also=tmp_path / "source")
    assert run(LOADING, tmp_path) == saved


def run(code, folder, also=None, **environment):
    """Run code in a new interpreter and a folder; return its output."""
    paths = os.environ.get("PYTHONPATH", "")
    environment = {**os.environ, "PYTHONPATH": f"{also}:{paths}" if also else paths, **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_clika_save_file_readable_by_safetensors(quantized_module, tmp_path):
    """safetensors reads the file."""
    quantized_module.clika_save(tmp_path / "saved")
    with safetensors.safe_open(tmp_path / "saved", framework="pt") as file:
        assert "stem.0.weight" in file.keys()  # noqa: SIM118 - no mapping
        assert file.get_tensor("stem.0.weight").dtype == torch.int8
        document = json.loads(zlib.decompress(file.get_tensor("clika/document").numpy()))
    assert document["graph"]["name"] == quantized_module.graph.name
