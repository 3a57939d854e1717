"""Saved modules: what is loaded computes, exports, trains and is quantized as what was saved, in few bytes."""

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
from calibrated_nets import told
from saved_nets import ALL, FEW_BITS, HERE, Convolutions, Tokens, batches, compiled, made, trained
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
    "tokens": (Tokens, ALL, {"smoothing": "on"}),
    "few bits": (Tokens, FEW_BITS, {"smoothing": "on"}),
    "rounded": (Convolutions, ALL, {"weight_rounding": "on"}),
    "few bits, rounded": (Tokens, FEW_BITS, {"weight_rounding": "on"}),
    "equalized": (Convolutions, ALL, {"equalization": "on"}),
}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    kind, settings, options = CASES[request.param]
    return kind, compiled(kind, settings, **options)


@pytest.fixture(scope="module")
def quantized():
    return compiled()


@pytest.fixture
def own(quantized):
    """A copy that a test may change."""
    return again(quantized, keep_float_weights=True, keep_calibration_inputs=True)


def again(module, **options):
    return ClikaModule.clika_from_serialized(module.clika_serialize(**options))


def results(module, kind):
    with torch.no_grad():
        return [module(x) for x in batches(kind, 2)]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def stored(serialized):
    """Return the dtype of each tensor of a file, and its document."""
    length = int.from_bytes(serialized[:8], "little")
    header = json.loads(serialized[8 : 8 + length])
    return {n: e["dtype"] for n, e in header.items() if n != "__metadata__"}, unpack_file(serialized)[0]


# What is loaded


def test_what_is_loaded_computes_the_same_bit_for_bit(case, tmp_path):
    kind, module = case
    module.clika_save(tmp_path / "saved")
    loaded = ClikaModule.clika_load(tmp_path / "saved")
    assert not loaded.training
    assert same(results(module, kind), results(loaded, kind))
    assert str(loaded.graph) == str(module.graph)


def test_what_is_loaded_exports_the_same_bytes(case, tmp_path):
    kind, module = case
    inputs = batches(kind, 1)[0]
    for name, exported in (("before", module), ("after", again(module))):
        (tmp_path / name).mkdir()
        exported.clika_export(tmp_path / name / "model.onnx", inputs)
    assert (tmp_path / "before/model.onnx").read_bytes() == (tmp_path / "after/model.onnx").read_bytes()


class Positions(nn.Module):
    """A sum that is gone before anything is written, whose name a sum of the written layer may bear."""

    def __init__(self):
        super().__init__()
        self.one = transformers.pytorch_utils.Conv1D(32, 32)

    def forward(self, x):
        return torch.relu(self.one(x)) * (torch.arange(32) + 1)


def test_names_that_nothing_bears_any_more_make_no_difference_to_what_is_written(tmp_path):
    module = clika_compile(
        Positions().eval(),
        calibration_inputs=[torch.randn(16, 32)],
        quantization_settings=FEW_BITS,
        deployment_settings=HERE,
    )
    for name, exported in (("before", module), ("after", again(module))):
        (tmp_path / name).mkdir()
        exported.clika_export(tmp_path / name / "model.onnx")
    assert (tmp_path / "before/model.onnx").read_bytes() == (tmp_path / "after/model.onnx").read_bytes()


def test_what_is_loaded_is_saved_as_it_was(case):
    _, module = case
    serialized = module.clika_serialize()
    assert ClikaModule.clika_from_serialized(serialized).clika_serialize() == serialized


def test_weights_that_become_integers_are_stored_as_these(case):
    _, module = case
    plan = module.clika_state.quantized and module.clika_state.quantized.plan
    kinds, document = stored(module.clika_serialize())
    if plan is None:
        assert document["integers"] == {}
        return
    expected = {"stem.0.weight", "deep.0.weight", "last.weight"}
    expected = expected if "stem.0.weight" in kinds else {"one.weight", "two.weight"}
    assert expected == document["integers"].keys()  # a computed and a tied one stay
    assert {kinds[name] for name in expected} == {"U8" if plan.packed_weights else "I8"}
    assert {kinds[name] for name in ("table.weight", "head.weight", "scale") if name in kinds} == {"F32"}


def test_loaded_weights_are_what_their_integers_stand_for(quantized):
    loaded, plan = again(quantized), quantized.clika_state.quantized.plan
    norm = quantized.get_parameter("stem.1.weight") / (quantized.get_buffer("stem.1.running_var") + 1e-5).sqrt()
    (scales,) = [
        plan.weights[n.name] for n in quantized.graph.nodes if n.inputs[1:2] and n.inputs[1].name == "stem.0.weight"
    ]
    steps = (loaded.get_parameter("stem.0.weight") * (norm / scales).reshape(-1, 1, 1, 1)).detach()
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-3)  # of float32, which 128 steps are products of
    missed = (loaded.get_parameter("stem.0.weight") - quantized.get_parameter("stem.0.weight")).detach()
    assert bool((missed.abs() <= (scales / norm.abs() * 0.501).reshape(-1, 1, 1, 1)).all())
    assert missed.any()


def test_all_weights_stay_as_they_are_where_that_is_asked_for(quantized):
    loaded = again(quantized, keep_float_weights=True)
    state, found = quantized.state_dict(), loaded.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items() if name != "_extra_state")
    assert same(results(quantized, Convolutions), results(loaded, Convolutions))
    assert quantized.clika_state.quantized.plan.moved.keys() == loaded.clika_state.quantized.plan.moved.keys() != set()


def test_tied_weights_are_stored_once_and_tied_again():
    module = compiled(Tokens)
    kinds, document = stored(module.clika_serialize())
    (pair,) = document["graph"]["aliases"].items()
    assert {*pair} == {"table.weight", "last.weight"}
    assert len(kinds.keys() & {*pair}) == 1
    loaded = again(module)
    assert loaded.get_parameter("table.weight") is loaded.get_parameter("last.weight")


def test_masks_stay_and_take_an_eighth_of_a_byte():
    module = compiled(settings=None, weight_rounding="on")
    module.clika_prune(PruningSettings("2:4", None), calibration_inputs=batches(Convolutions))
    module.clika_initialize_algorithms(ALL, calibration_inputs=batches(Convolutions), deployment_settings=HERE)
    serialized = module.clika_serialize()
    kinds, document = stored(serialized)
    masks = {name: kind for name, kind in kinds.items() if name.startswith("clika.masks.")}
    assert masks
    assert {*masks.values()} == {"U8"}
    assert "last.weight" in document["integers"]
    loaded = ClikaModule.clika_from_serialized(serialized)
    assert same(results(module, Convolutions), results(loaded, Convolutions))
    assert same([module.get_buffer(name) for name in masks], [loaded.get_buffer(name) for name in masks])


def test_what_does_not_come_back_bit_for_bit_stays_float():
    module = compiled(settings=None)
    module.clika_prune(PruningSettings("2:4", None), calibration_inputs=batches(Convolutions))
    module.clika_initialize_algorithms(ALL, calibration_inputs=batches(Convolutions), deployment_settings=HERE)
    mask, plan = module.get_buffer("clika.masks.last.weight"), module.clika_state.quantized.plan
    plan.moved["conv2d_2"] = torch.where(mask, 0, 1).to(torch.int8)  # what is masked, rounded away from 0
    assert plan.weights.keys() >= {"conv2d_2"}
    assert "last.weight" not in stored(module.clika_serialize())[1]["integers"]
    assert same(results(module, Convolutions), results(again(module), Convolutions))


def test_a_channel_that_its_norm_multiplies_by_zero_keeps_its_weights(own):
    with torch.no_grad():
        own.get_parameter("stem.1.weight")[2] = 0
    own.eval()
    loaded = again(own)
    assert torch.equal(loaded.get_parameter("stem.0.weight"), own.get_parameter("stem.0.weight"))
    assert not torch.equal(loaded.get_parameter("last.weight"), own.get_parameter("last.weight"))
    assert same(results(own, Convolutions), results(loaded, Convolutions))


def test_numbers_that_training_has_spoiled_stay_what_they_are(own):
    with torch.no_grad():
        own.get_parameter("last.weight")[0, 0] = torch.nan
    assert bool(again(own).get_parameter("last.weight").isnan().any())


def test_a_file_is_hardly_larger_than_its_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).eval()
    sizes = {}
    for settings in (ALL, FEW_BITS):
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


def test_a_deep_model_of_few_weights_takes_hardly_more_than_these():
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
def test_what_was_learned_of_scales_is_saved(options):
    module = trained(compiled(**options), Convolutions)
    for loaded in (again(module), again(module, keep_float_weights=True)):
        assert same(results(module, Convolutions), results(loaded, Convolutions))
        assert any(log.any() for log in log_scales_of(loaded).values())
        assert trained(loaded, Convolutions, 1).clika_state.options.batch_norm == options.get("batch_norm", "frozen")


def test_few_bits_that_were_trained_are_saved():
    module = trained(compiled(Tokens, FEW_BITS), Tokens)
    assert same(results(module, Tokens), results(again(module), Tokens))


def test_training_goes_on_from_float_weights_as_it_would_have(own):
    own = trained(own, Convolutions)
    loaded = again(own, keep_float_weights=True)
    ours, theirs = (trained(m, Convolutions).state_dict() for m in (own, loaded))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if name != "_extra_state")


def from_state_dict(module):
    loaded = ClikaModule()
    loaded.load_state_dict(module.state_dict())
    return loaded


@pytest.mark.parametrize("load", [again, from_state_dict])
def test_what_is_loaded_in_inference_mode_can_be_trained(quantized, load):
    with torch.inference_mode():
        loaded = load(quantized)
    trained(loaded, Convolutions, 1)


@pytest.mark.parametrize("load", [again, from_state_dict])
def test_what_is_loaded_beside_another_default_device_is_on_the_cpu(quantized, load):
    with torch.device("meta"):
        loaded = load(quantized)
        loaded.load_state_dict(quantized.state_dict())
    assert same(results(quantized, Convolutions), results(loaded.eval(), Convolutions))


def test_what_is_frozen_and_the_mode_stay(own):
    own.get_parameter("stem.0.weight").requires_grad_(False)
    name = next(iter(log_scales_of(own)))
    own.get_parameter(name).requires_grad_(False)
    own.train()
    loaded = again(own)
    assert loaded.training
    assert [n for n, p in loaded.named_parameters() if not p.requires_grad] == [
        n for n, p in own.named_parameters() if not p.requires_grad
    ]


# Ranges and settings


def test_another_target_is_decided_for_as_before_with_the_inputs_that_were_kept(quantized, tmp_path):
    loaded = again(quantized, keep_float_weights=True, keep_calibration_inputs=True)
    for other in (DeploymentSettings_OpenVINO_ONNX(), DeploymentSettings_TensorRT_ONNX()):
        for name, exported in (("before.onnx", quantized), ("after.onnx", loaded)):
            exported.clika_export(tmp_path / name, deployment_settings=other)
        assert (tmp_path / "before.onnx").read_bytes() == (tmp_path / "after.onnx").read_bytes()
    again(quantized, keep_calibration_inputs=True).clika_export(tmp_path / "third.onnx", deployment_settings=other)


def test_without_inputs_ranges_wait_for_the_same_data_which_is_not_run_again(quantized, tmp_path):
    data = batches(Convolutions)
    loaded = again(quantized)
    with pytest.raises(ModelError, match=r"saved with the ranges of 5 batches, but without inputs. Pass the same cal"):
        loaded.clika_initialize_algorithms(ALL)
    with pytest.raises(ModelError, match=r"or it is a copy or was loaded without them. Pass data: clika_in"):
        loaded.clika_export(tmp_path / "other.onnx", deployment_settings=DeploymentSettings_OpenVINO_ONNX())
    loaded.clika_state.logs_dir = tmp_path
    loaded.clika_initialize_algorithms(ALL, calibration_inputs=data[:1])
    assert "5 batches, 5 of them from before" in told(tmp_path)
    assert loaded.clika_state.calibration.table.batches == 5
    loaded.clika_export(tmp_path / "other.onnx", deployment_settings=DeploymentSettings_OpenVINO_ONNX())


def test_a_strict_load_names_the_scale_that_is_missing_but_takes_the_original(own):
    state = own.state_dict()
    name = next(n for n in state if n.startswith("clika.log_weight_scales"))
    del state[name]
    for module in (ClikaModule(), own):
        with pytest.raises(RuntimeError, match=f"Missing key.*{name}"):
            module.load_state_dict(dict(state))
    assert own.load_state_dict(made(Convolutions).state_dict()).missing_keys == []
    weights = {n: t + 1.0 for n, t in own.state_dict().items() if n != "_extra_state"}
    own.load_state_dict(weights)
    assert torch.equal(own.state_dict()[name], weights[name]), "of what is given nothing keeps its value"


def test_ranges_of_weights_that_were_trained_since_are_known_as_such(own, tmp_path):
    with torch.no_grad():
        own.get_parameter("last.weight").mul_(1.5)
    loaded = again(own)
    loaded.clika_state.logs_dir = tmp_path
    loaded.clika_export(tmp_path / "model.onnx", batches(Convolutions, 1)[0])
    assert "The weights have changed since their scales were computed" in told(tmp_path)
    loaded.clika_initialize_algorithms(ALL, calibration_inputs=batches(Convolutions))
    assert "its 5 batches are run again" in told(tmp_path)


def test_settings_are_those_that_were_chosen(tmp_path):
    deployment = DeploymentSettings_TensorRT_ONNX(shapes={"n": (1, 4, 16)})
    settings = QuantizationSettings(weights_num_bits=[8], quantization_sensitivity_threshold=0.5)
    layers = {"stem.0": LayerQuantizationSettings(skip_quantization=True)}
    module = compiled(
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
    assert again(module, keep_calibration_inputs=True).clika_state.sizes == module.clika_state.sizes


# Processes


SCRIPT = """
import hashlib, sys
sys.path.insert(0, {tests!r})
from saved_nets import compiled
print(hashlib.sha256(compiled(weight_rounding="on").clika_serialize(keep_calibration_inputs=True)).hexdigest())
"""


@pytest.mark.slow
def test_the_same_model_gives_the_same_bytes_in_every_process(tmp_path, request):
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
def test_a_module_is_loaded_without_the_source_of_the_original(tmp_path):
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
    """Run code in a new interpreter and a folder; return what it prints."""
    paths = os.environ.get("PYTHONPATH", "")
    environment = {**os.environ, "PYTHONPATH": f"{also}:{paths}" if also else paths, **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_safetensors_reads_the_file_by_itself(quantized, tmp_path):
    quantized.clika_save(tmp_path / "saved")
    with safetensors.safe_open(tmp_path / "saved", framework="pt") as file:
        assert "stem.0.weight" in file.keys()  # noqa: SIM118 - no mapping
        assert file.get_tensor("stem.0.weight").dtype == torch.int8
        document = json.loads(zlib.decompress(file.get_tensor("clika/document").numpy()))
    assert document["graph"]["name"] == quantized.graph.name
