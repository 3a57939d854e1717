"""Dynamic activations: OpenVINO rounds the inputs of layers with 8-bit weights, as each file asks it to."""

import copy
import json
import shutil

import pytest
import torch
from clika_ref_openvino import explaining
from clika_ref_openvino.core import core
from clika_ref_openvino.runtime_properties import GROUP_SIZE_KEY
from clika_ref_openvino.target import OpenVino
from torch import nn

from clika_ref import (
    ClikaModule,
    DeploymentSettings_ONNXRuntime_ONNX,
    DeploymentSettings_OpenVINO_ONNX,
    DeploymentSettings_TensorRT_ONNX,
    LayerQuantizationSettings,
    QuantizationSettings,
    clika_compile,
    export_configuration,
)
from clika_ref.compiled import latency
from clika_ref.compiled.stateful_runners import load_stateful_runner
from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import ModelError
from clika_ref.core.quantization_scheme import QuantizationScheme, QuantizedType
from clika_ref.quantization.qdq.packed_weights import round_in_blocks
from clika_ref.targets import cpu

DYNAMIC = QuantizationSettings(dynamic_activations=True)

GROUP_SIZE = OpenVino().scheme.weights_only.block_size

NEEDS_VNNI = pytest.mark.skipif(
    not cpu.cpu_flags() & explaining.ROUNDING_FLAGS, reason="OpenVINO rounds no inputs without VNNI"
)


class Scorer(nn.Module):
    """A table, a convolution, and linear layers with and without a bias; the last one has few inputs."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(600, 64)
        self.convolution = nn.Conv1d(64, 96, 3, padding=1)
        self.hidden = nn.Linear(96, 128)
        self.narrow = nn.Linear(128, 12, bias=False)
        self.head = nn.Linear(12, 5)

    def forward(self, ids):
        x = self.convolution(self.table(ids).transpose(1, 2)).relu().transpose(1, 2)
        return self.head(self.narrow(self.hidden(x).relu()).relu())


def draw_ids(*shape):
    """Return ids of tokens."""
    return torch.randint(600, shape, generator=torch.Generator().manual_seed(len(shape)))


def compile_scorer(model, settings=DYNAMIC, deployment=None, **options):
    """Return the quantized module of a scorer, by its tracing inputs alone."""
    return clika_compile(
        model,
        tracing_inputs=[draw_ids(2, 7), draw_ids(3, 9)],
        quantization_settings=settings,
        deployment_settings=deployment or DeploymentSettings_OpenVINO_ONNX(),
        discard_input_model=False,
        **options,
    )


@pytest.fixture
def scorer():
    """Return a scorer; all its tests have the same weights."""
    torch.manual_seed(0)
    return Scorer().eval()


def read_group_size(runner):
    """Return the group size that the runtime uses."""
    return int(runner.model.get_property(GROUP_SIZE_KEY))


def mean_square(x):
    """Return the mean square of a tensor."""
    return x.double().square().mean()


@NEEDS_VNNI
@pytest.mark.parametrize("suffix", ["onnx", "xml"])
def test_file_rounds_inputs_within_bound(scorer, suffix, tmp_path):
    """No data is needed; the module computes in float, the file rounds, and both are near the float model."""
    module = compile_scorer(scorer)
    bits = {layer.scope: layer.bits for layer in module.clika_summary().layers}
    assert bits == {"table": (8, 32), "convolution": (32, 32), "hidden": (8, 8), "narrow": (8, 8), "head": (32, 32)}
    artifact = module.clika_export(tmp_path / f"scorer.{suffix}")
    runner = OpenVino().load(artifact)
    assert read_group_size(runner) == GROUP_SIZE
    for shape in ((1, 4), (5, 20)):
        (found,), expected, ids = runner([draw_ids(*shape)]), scorer(draw_ids(*shape)), draw_ids(*shape)
        difference = mean_square(found - module(ids)) / mean_square(expected)
        assert 1e-9 < difference < 1e-4  # rounding to 8 bits, and no rounding would be 1e-13
        assert mean_square(found - expected) < 1e-3 * mean_square(expected)


@NEEDS_VNNI
def test_rounding_equals_simulation_in_blocks(tmp_path):
    """The runtime computes as `round_in_blocks`: the comparison after an export simulates it exactly."""
    torch.manual_seed(0)
    layer = nn.Linear(144, 16)
    module = clika_compile(
        layer,
        tracing_inputs=[torch.randn(2, 144), torch.randn(3, 144)],
        quantization_settings=DYNAMIC,
        deployment_settings=DeploymentSettings_OpenVINO_ONNX(),
        logs_dir=tmp_path / "logs",
    )
    run = OpenVino().load(module.clika_export(tmp_path / "linear.onnx"))
    x = torch.randn(5, 144)
    torch.testing.assert_close(run([x])[0], module(round_in_blocks(x, GROUP_SIZE)), atol=1e-5, rtol=1e-5)
    assert (run([x])[0] - module(x)).abs().max() > 1e-3
    log = "".join(path.read_text() for path in (tmp_path / "logs").glob("*.log"))
    assert "dB without rounding of layer inputs" in log
    assert "other programs must set the properties in linear.onnx.openvino.json" in log


@pytest.mark.parametrize("suffix", ["onnx", "xml"])
def test_config_file_has_properties_for_others(scorer, suffix, tmp_path):
    """The file next to the artifact has the form that benchmark_app loads; a weight-only file has none."""
    artifact = compile_scorer(scorer).clika_export(tmp_path / f"scorer.{suffix}")
    config = tmp_path / artifact.facts["config_file"]
    properties = json.loads(config.read_text())
    assert properties == {"CPU": {"INFERENCE_PRECISION_HINT": "f32", GROUP_SIZE_KEY: str(GROUP_SIZE)}}
    model = core().compile_model(str(artifact.path), "CPU", properties["CPU"])
    ids = draw_ids(4, 6)
    (expected,) = OpenVino().load(artifact)([ids])
    torch.testing.assert_close(torch.from_numpy(model([ids.numpy()])[0]), expected, atol=1e-6, rtol=1e-5)
    weight_only = QuantizationSettings(prefer_weights_only_quantization=True)
    plain = compile_scorer(scorer, weight_only, calibration_inputs=[draw_ids(2, 7), draw_ids(3, 9)])
    other = plain.clika_export(tmp_path / f"other.{suffix}")
    assert "config_file" not in other.facts
    assert not [*tmp_path.glob("other*.json")]
    assert read_group_size(OpenVino().load(other)) == 0


def test_own_format_sets_property_for_any_program(scorer, tmp_path):
    """The runtime itself applies the property of a file in its own format, and a copy for reports keeps it."""
    artifact = compile_scorer(scorer).clika_export(tmp_path / "scorer.xml")
    assert int(core().compile_model(str(artifact.path), "CPU").get_property(GROUP_SIZE_KEY)) == GROUP_SIZE
    folder = tmp_path / "copy"
    folder.mkdir()
    opened = OpenVino().open_file(artifact.path, folder)
    assert read_group_size(OpenVino().load(opened.artifact)) == GROUP_SIZE


@pytest.mark.parametrize("form", ["export_fp16", "export_bf16"])
def test_half_file_is_within_bound(scorer, form, tmp_path):
    """Files in FP16 and BF16 have the property, and are compared with the module."""
    module = compile_scorer(scorer)
    with export_configuration(**{form: True}):
        artifact = module.clika_export(tmp_path / "scorer.onnx")
    assert read_group_size(OpenVino().load(artifact)) == GROUP_SIZE


@pytest.mark.parametrize("suffix", ["onnx", "xml"])
def test_copied_file_keeps_property(scorer, suffix, tmp_path):
    """A file that is copied without the one next to it computes the same; a later float file has no property."""
    module = compile_scorer(scorer)
    artifact = module.clika_export(tmp_path / f"scorer.{suffix}")
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    for part in tmp_path.glob("scorer.*"):
        if part.suffix != ".json":
            shutil.copy(part, folder)
    known = Artifact(folder / artifact.path.name, artifact.target, artifact.input_names, artifact.output_names)
    runner, ids = OpenVino().load(known), draw_ids(4, 6)
    assert read_group_size(runner) == GROUP_SIZE
    assert torch.equal(runner([ids])[0], OpenVino().load(artifact)([ids])[0])
    plain = clika_compile(scorer, tracing_inputs=[ids], discard_input_model=False)
    again = plain.clika_export(artifact.path, deployment_settings=DeploymentSettings_OpenVINO_ONNX())
    assert read_group_size(OpenVino().load(again)) == 0


class Counter(nn.Module):
    """A linear layer on an input and a state, which it returns for the next call."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(96, 48)

    def forward(self, x, past):
        state = self.layer(torch.cat([x, past], -1))
        return state.sin(), state


@NEEDS_VNNI
def test_stateful_runner_rounds_inputs(tmp_path):
    """The runner that keeps the state in the runtime has the property of the file."""
    torch.manual_seed(0)
    samples = [(torch.randn(n, 48), torch.randn(n, 48)) for n in (2, 3)]
    module = clika_compile(
        Counter(),
        tracing_inputs=samples,
        quantization_settings=DYNAMIC,
        deployment_settings=DeploymentSettings_OpenVINO_ONNX(),
    )
    names = ["x", "past_key_values.0"], ["y", "present.0"]
    artifact = module.clika_export(tmp_path / "counter.onnx", input_names=names[0], output_names=names[1])
    kept, passed = load_stateful_runner(OpenVino(), artifact), OpenVino().load(artifact)
    assert read_group_size(kept) == GROUP_SIZE
    x, state = samples[0]
    kept.start([state])
    for _ in range(3):
        expected, state = passed([x, state])
        torch.testing.assert_close(kept([x])[0], expected, atol=1e-6, rtol=1e-5)


@NEEDS_VNNI
def test_explanation_reports_rounded_layers(scorer, monkeypatch):
    """Rounded layers are planned in INT8 and run in it; without VNNI, they are weight-only."""
    module = compile_scorer(scorer)
    rows = {fact.scope: (fact.planned, fact.runs) for fact in module.clika_explain().nodes if fact.macs}
    assert rows == {
        "convolution": ("float", "float"),
        "hidden": ("int8", "int8"),
        "narrow": ("int8", "int8"),
        "head": ("float", "float"),
    }
    assert module.clika_explain().table
    monkeypatch.setattr(cpu, "cpu_flags", frozenset)
    rows = {fact.scope: (fact.planned, fact.runs) for fact in module.clika_explain().nodes if fact.macs}
    assert rows["hidden"] == ("int8", "int8 weights")


def test_short_and_half_rows_stay_in_float(scorer):
    """The runtime rounds no rows shorter than a group; other dtypes and convolutions stay in float, too."""
    reasons = {layer.scope: layer.reason for layer in compile_scorer(scorer).clika_summary().layers}
    assert reasons["head"] == f"its 12 inputs are fewer than the {GROUP_SIZE} that share a scale at run time"
    assert reasons["convolution"] == "the target computes conv1d with float weights"
    half = clika_compile(
        nn.Linear(64, 8).half(),
        tracing_inputs=[torch.randn(n, 64).half() for n in (2, 3)],
        quantization_settings=DYNAMIC,
        deployment_settings=DeploymentSettings_OpenVINO_ONNX(),
    )
    assert half.clika_summary().layers[0].reason == "its weight is torch.float16"


def test_sensitivity_counts_rounded_inputs(scorer):
    """The error of rounding inputs counts: a single threshold below it keeps the layer in float."""
    rows = {layer.scope: layer for layer in compile_scorer(scorer).clika_summary().layers}
    weight_only = QuantizationSettings(prefer_weights_only_quantization=True, weights_only_quantization_block_size=0)
    alone = compile_scorer(scorer, weight_only, calibration_inputs=[draw_ids(2, 7), draw_ids(3, 9)])
    of_weights = {layer.scope: layer.sensitivity for layer in alone.clika_summary().layers}
    assert rows["hidden"].sensitivity > of_weights["hidden"]
    strict = QuantizationSettings(
        dynamic_activations=True, quantization_sensitivity_threshold=rows["hidden"].sensitivity / 2
    )
    (kept,) = [layer for layer in compile_scorer(scorer, strict).clika_summary().layers if layer.scope == "hidden"]
    assert kept.reason.startswith("too sensitive")


def test_layer_settings_select_layers(scorer):
    """Single layers can be kept in float, but not in 4 bits."""
    kept = {"hidden": LayerQuantizationSettings(skip_quantization=True)}
    rows = compile_scorer(scorer, layer_quantization_settings=kept).clika_summary().layers
    assert {row.scope: row.bits for row in rows}["hidden"] == (32, 32)
    small = {"hidden": LayerQuantizationSettings(weights_num_bits=4)}
    with pytest.raises(ModelError, match=r"4 bits are requested for .*, but the target supports 8"):
        compile_scorer(scorer, layer_quantization_settings=small)


def test_slow_layers_stay_in_float_for_latency(scorer, monkeypatch):
    """Each layer is timed in a file that rounds its input; slower ones stay in float."""
    timed = []

    def measure(target, small, given, plain, given_plain):
        timed.append((target.dynamic_group_size, [node.op_type for node in small.nodes]))
        return 1.3 if "matmul" in timed[-1][1][:2] else 0.9

    monkeypatch.setattr(latency, "_measure_ratio_of_graphs", measure)
    module = compile_scorer(scorer, optimize_for="latency")
    assert {size for size, _ in timed} == {GROUP_SIZE}
    reasons = {layer.scope: layer.reason for layer in module.clika_summary().layers}
    assert all("1.30x the time of float" in reasons[scope] for scope in ("hidden", "narrow"))


@pytest.mark.parametrize("form", ["saved", "state dict", "copy"])
def test_restored_module_writes_same_file(scorer, form, tmp_path):
    """The plan of a module keeps the rounding of inputs."""
    module = compile_scorer(scorer)
    if form == "saved":
        module.clika_save(tmp_path / "scorer.clika")
        other = ClikaModule.clika_load(tmp_path / "scorer.clika")
    elif form == "state dict":
        other = ClikaModule()
        other.load_state_dict(module.state_dict())
    else:
        other = copy.deepcopy(module)
    files = [
        m.clika_export(tmp_path / f"{i}.onnx", deployment_settings=DeploymentSettings_OpenVINO_ONNX())
        for i, m in enumerate((module, other))
    ]
    assert files[0].path.read_bytes() == files[1].path.read_bytes()
    assert "config_file" in files[1].facts


def test_other_targets_decide_from_same_module(scorer, tmp_path):
    """A module of ONNX Runtime is exported for OpenVINO and back; TensorRT has a row with the reason."""
    module = compile_scorer(scorer, deployment=DeploymentSettings_ONNXRuntime_ONNX())
    openvino = module.clika_export(tmp_path / "a.onnx", deployment_settings=DeploymentSettings_OpenVINO_ONNX())
    assert read_group_size(OpenVino().load(openvino)) == GROUP_SIZE
    module = compile_scorer(scorer)
    here = module.clika_export(tmp_path / "b.onnx", deployment_settings=DeploymentSettings_ONNXRuntime_ONNX())
    assert b"MatMulInteger" in here.path.read_bytes()
    rows = module.clika_compare_targets(DeploymentSettings_OpenVINO_ONNX(), DeploymentSettings_TensorRT_ONNX()).rows
    assert (rows[0].layers, rows[0].unsupported_reason) == (3, "")
    assert "it does not round the inputs of INT8 layers at run time" in rows[1].unsupported_reason


class Tied(nn.Module):
    """A table that is also the weight of the last layer."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(600, 64), nn.Linear(64, 600, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.table(ids).sin())


@NEEDS_VNNI
def test_tied_table_is_stored_once_and_rounds(tmp_path):
    """A table and the layer with its weight share their integers, and the layer rounds its input."""
    torch.manual_seed(0)
    module = compile_scorer(Tied().eval())
    assert [layer.bits for layer in module.clika_summary().layers] == [(8, 32), (8, 8)]
    artifact = module.clika_export(tmp_path / "tied.onnx")
    assert artifact.path.stat().st_size < 1.3 * 600 * 64
    ids = draw_ids(3, 5)
    (found,) = OpenVino().load(artifact)([ids])
    assert 1e-9 < mean_square(found - module(ids)) / mean_square(found) < 1e-4


def test_training_continues_from_rounded_layers(scorer, tmp_path):
    """Training lowers the loss, and the file follows."""
    module, ids = compile_scorer(scorer), draw_ids(4, 6)
    module.train()
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1), []
    for _ in range(4):
        optimizer.zero_grad()
        loss = module(ids).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < losses[0]
    module.eval()
    (found,) = OpenVino().load(module.clika_export(tmp_path / "scorer.onnx"))([ids])
    assert mean_square(found - module(ids)) < 1e-3 * mean_square(found)


def test_target_without_weight_only_is_unchanged():
    """A target without weight-only support, or without a scheme, has no variant that rounds inputs."""
    assert OpenVino(scheme=None).with_rounded_inputs(32) == OpenVino(scheme=None)
    scheme = QuantizationScheme(QuantizedType(), QuantizedType())
    assert OpenVino(scheme=scheme).with_rounded_inputs(32).dynamic_group_size == 0
