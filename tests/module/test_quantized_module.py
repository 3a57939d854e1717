"""A quantized module: compiled, run, exported, saved, trained, and quantized again."""

import copy
import pickle
from dataclasses import replace

import onnx
import onnxruntime as ort
import pytest
import torch
from calibrated_nets import sqnr_in_decibels
from clika_ref_conformance.targets.identity import Identity
from clika_ref_onnxruntime.target import OnnxRuntime
from interrupted_data import interrupt_after
from loaded_copies import load_copy
from log_files import read_logs
from seeded_tensors import draw_batches, randn
from torch import nn

from clika_ref import (
    DeploymentSettings_ONNXRuntime_ONNX,
    LayerQuantizationSettings,
    ModelError,
    QuantizationSettings,
    TargetError,
    clika_compile,
)
from clika_ref.capture.calibration_inputs import STREAM_EXAMPLE_COUNT
from clika_ref.compiled.simulation import Simulation
from clika_ref.core.registry import load_registry
from clika_ref.export import quantized_check
from clika_ref.quantization.request import QuantizationRequest

HERE = DeploymentSettings_ONNXRuntime_ONNX()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Conv2d(8, 8, 3, stride=2)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(torch.relu(self.body(self.stem(x))).mean((2, 3)))


def make_batches(count=4, size=4, seed=0):
    return draw_batches(count, size, 3, 10, 10, seed=seed)


def build_net():
    model = Net().train()
    with torch.no_grad():
        for x in make_batches(3, 16, seed=9):
            model(x)
    return model.eval()


def compile_net(settings=None, data=None, **options):
    options = {"deployment_settings": HERE, "calibration_inputs": data or make_batches(), **options}
    return clika_compile(build_net(), quantization_settings=settings or QuantizationSettings(), **options)


NAN, INFINITE = (torch.full((4, 3, 10, 10), number) for number in (float("nan"), float("inf")))


@pytest.fixture(scope="module")
def module():
    return compile_net()


def test_forward_quantized_close_to_model(module):
    """The outputs are close to those of the model, but not equal."""
    x = make_batches(1, seed=5)[0]
    found = sqnr_in_decibels(build_net()(x), module(x))
    assert 20 < found < 60


def test_clika_export_int8_weights_match_module(module, tmp_path):
    """The artifact has INT8 weights only and matches the module."""
    artifact = module.clika_export(tmp_path / "net.onnx")
    weights = [i.data_type for i in onnx.load(artifact.path).graph.initializer if len(i.dims) > 1]
    assert weights == [onnx.TensorProto.INT8] * 3, "and no float ones, which nothing reads"
    x = make_batches(1, seed=5)[0]
    (found,) = OnnxRuntime().load(artifact)([x])
    assert sqnr_in_decibels(module(x), found) > 30


def test_clika_export_artifact_worse_than_graph_raises(module, tmp_path, monkeypatch):
    """An artifact that is worse than its graph raises an error, and no file is kept."""
    monkeypatch.setattr(quantized_check, "MARGIN_DB", -0.5)
    message = r"reaches [\d.]+ dB, but its simulation [\d.]+ dB, over 16 samples.* Each layer is correct alone"
    with pytest.raises(TargetError, match=message):
        module.clika_export(tmp_path / "net.onnx")
    assert not (tmp_path / "net.onnx").exists()


class Faulty(OnnxRuntime):
    """ONNX Runtime, which negates the weights of one layer."""

    def compile(self, graph, path, **options):
        graph = graph.clone()
        for name, value in graph.constants.items():
            if name.startswith("body.weight") and name.endswith("_integers"):
                value.data = -value.data
        return super().compile(graph, path, **options)


def test_clika_export_names_first_wrong_layer(tmp_path):
    """The first layer that a runtime computes differently is named."""
    twin = compile_net()
    registry = load_registry()
    twin.clika_state.registry = replace(registry, targets={**registry.targets, "onnxruntime": Faulty()})
    message = (
        r"first layer that differs alone is conv2d \(\S+\) in body at .*: [\d,]+ of [\d,]+ quantized elements differ"
    )
    with pytest.raises(TargetError, match=message):
        twin.clika_export(tmp_path / "net.onnx")


def test_train_mode_matches_eval_with_gradients(module):
    """Train mode has the same outputs as eval mode, and gradients for all parameters."""
    x, twin = make_batches(1)[0], copy.deepcopy(module)
    assert torch.equal(twin.train()(x), module(x))
    twin(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in twin.parameters())


def test_forward_follows_changed_weights(module):
    """Changed and loaded weights change the outputs."""
    x, twin = make_batches(1)[0], copy.deepcopy(module)
    before = twin(x)
    assert torch.equal(twin(x), before)
    with torch.no_grad():
        twin.get_parameter("head.weight").mul_(0.5)
    assert sqnr_in_decibels(before - build_net().head.bias, 2 * (twin(x) - build_net().head.bias)) > 25
    twin.load_state_dict(module.state_dict())
    assert torch.equal(twin(x), before)


@pytest.mark.parametrize("renews", ["eval", "export"])
def test_eval_and_export_see_weights_written_to_data(module, tmp_path, renews):
    """Weights that are written to `.data` are seen by `eval` and by an export."""
    x, twin = make_batches(1)[0], copy.deepcopy(module).eval()
    before = twin(x)
    twin.get_parameter("head.weight").data.mul_(0.5)
    assert torch.equal(twin(x), before), "a call reads the changed weight: correct ARCHITECTURE.md"
    twin.eval() if renews == "eval" else twin.clika_export(tmp_path / "net.onnx")
    assert sqnr_in_decibels(before - build_net().head.bias, 2 * (twin(x) - build_net().head.bias)) > 25


def test_torch_onnx_export_runs_in_int8(module, tmp_path):
    """`torch.onnx.export` gives an INT8 model that matches the module."""
    x, twin = make_batches(1, seed=5)[0], copy.deepcopy(module).eval()
    dynamic_shapes = ({0: torch.export.Dim.DYNAMIC},)
    program = torch.onnx.export(twin, (x,), dynamo=True, verbose=False, dynamic_shapes=dynamic_shapes)
    program.save(tmp_path / "net.onnx")
    weights = [i.data_type for i in onnx.load(tmp_path / "net.onnx").graph.initializer if len(i.dims) > 1]
    assert weights == [onnx.TensorProto.INT8] * 3
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    session = ort.InferenceSession(tmp_path / "net.onnx", options, providers=["CPUExecutionProvider"])
    kinds = [n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert [kinds.count(kind) for kind in ("QLinearConv", "QGemm", "Conv", "Gemm")] == [2, 1, 0, 0]
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert sqnr_in_decibels(module(x), torch.from_numpy(found)) > 30


def test_torch_export_changed_weights_require_eval(module):
    """`torch.export` after a weight change requires another call of `eval`."""
    x, twin = make_batches(1)[0], copy.deepcopy(module).eval()
    with torch.no_grad():
        twin.get_parameter("head.weight").mul_(0.5)
    message = r"its weights changed since they were quantized.* Call \.eval\(\) again before the export"
    with pytest.raises(ModelError, match=message):
        torch.export.export(twin, (x,), strict=False)
    torch.export.export(twin.eval(), (x,), strict=False)
    before = twin(x)
    twin.get_parameter("head.weight").data.mul_(0.5)
    found = torch.export.export(twin, (x,), strict=False).module()(x)
    assert torch.equal(found, before), "the export reads a write to .data: correct README.md"
    renewed = torch.export.export(twin.eval(), (x,), strict=False).module()(x)
    assert not torch.equal(renewed, before)


def test_copies_keep_quantization(module):
    """Copies, pickles and loaded modules keep the quantization."""
    x = make_batches(1)[0]
    loaded = load_copy(module)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded.eval()):  # noqa: S301 - our own bytes
        assert torch.equal(twin(x), module(x))


def test_load_state_dict_without_quantization_loads_float(module):
    """A float state dict loads into a quantized module as float."""
    plain = clika_compile(build_net(), tracing_inputs=make_batches(1))
    twin = copy.deepcopy(module)
    twin.load_state_dict(plain.state_dict())
    assert torch.allclose(twin(make_batches(1)[0]), plain(make_batches(1)[0]))


def test_layer_settings_original_name_of_folded_layer():
    """A layer keeps its name in the model although batch norm is folded into it."""
    module = compile_net(layer_quantization_settings={"stem.0": LayerQuantizationSettings(skip_quantization=True)})
    found = module.clika_initialize_algorithms()
    assert [(row[0], row[-1]) for row in found.table.cells()] == [
        ("stem.0", "quantized"),
        ("body", "quantized"),
        ("head", "quantized"),
    ]
    again = {"stem.0": LayerQuantizationSettings(skip_quantization=True)}
    found = module.clika_initialize_algorithms(layer_quantization_settings=again)
    assert [layer.scope for layer in found.layers if layer.reason] == ["stem.0"]


def test_clika_compile_batch_norm_mean_equal_to_bias():
    """A mean that equals the bias does not get its gradient, although equal constants are stored once."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    found = clika_compile(
        model, calibration_inputs=make_batches(), quantization_settings=QuantizationSettings(), deployment_settings=HERE
    )
    assert found.clika_state.quantized.plan.weights


def test_calibration_data_read_once_and_reused():
    """Data is read once, and another threshold reads none."""
    read = []

    def yield_and_count():
        for x in make_batches(6):
            read.append(len(read))
            yield x

    module = compile_net(data=yield_and_count())
    assert read == [*range(6)]
    assert module.clika_state.calibration.table.batches == 6
    found = module.clika_initialize_algorithms(QuantizationSettings(quantization_sensitivity_threshold=0))
    assert [bool(layer.reason) for layer in found.layers] == [True] * 3
    x = make_batches(1)[0]
    assert torch.allclose(module(x), build_net()(x), atol=1e-6)


def test_clika_initialize_algorithms_on_float_module():
    """A float module is quantized later."""
    module = clika_compile(build_net(), tracing_inputs=make_batches(1))
    x = make_batches(1)[0]
    before = module(x)
    found = module.clika_initialize_algorithms(calibration_inputs=make_batches())
    assert sum(not layer.reason for layer in found.layers) == 3
    assert 20 < sqnr_in_decibels(before, module(x)) < 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layer_quantization_settings": {"bdoy": LayerQuantizationSettings()}}, "Near matches: 'body'"),
        (
            {"layer_quantization_settings": {"stem.1": LayerQuantizationSettings()}},
            "is folded into other layers.*'conv2d'",
        ),
        (
            {"quantization_settings": QuantizationSettings(weights_num_bits=3)},
            "weights_num_bits: 3 bits are requested for",
        ),
        (
            {"quantization_settings": QuantizationSettings(weights_num_bits=3, prefer_weights_only_quantization=True)},
            "weights_num_bits: 3 bits are requested for",
        ),
    ],
)
def test_layer_settings_invalid_key_raises_before_data(arguments, message):
    """Invalid keys and bit widths raise an error before data is read."""

    def read_once():
        for x in make_batches(6):
            read.append(1)
            yield x

    read = []
    module = clika_compile(build_net(), tracing_inputs=make_batches(1), calibration_inputs=read_once())
    with pytest.raises(ModelError, match=message):
        module.clika_initialize_algorithms(**arguments)
    assert not read
    settings = {"settings": arguments.get("quantization_settings"), **arguments}
    settings.pop("quantization_settings", None)
    with pytest.raises(ModelError, match=message):
        compile_net(**settings, data=read_once(), tracing_inputs=make_batches(1))
    assert len(read) <= STREAM_EXAMPLE_COUNT, "no more than to trace with"
    with pytest.raises(ModelError, match=message):
        compile_net(**settings, data=read_once())
    assert len(read) <= 2 * STREAM_EXAMPLE_COUNT
    module.clika_initialize_algorithms()
    assert module.clika_state.calibration.table.batches == 6


@pytest.mark.parametrize("transform", [None, torch.neg])
def test_clika_initialize_algorithms_reads_unread_data(tmp_path, transform):
    """Data that compiling did not read is read later."""
    data = iter([x.neg() if transform else x for x in make_batches()])
    module = clika_compile(
        build_net(), tracing_inputs=make_batches(1, seed=9), calibration_inputs=data, data_transform_fn=transform
    ).eval()
    found = module.clika_initialize_algorithms(deployment_settings=HERE)
    assert sum(not layer.reason for layer in found.layers) == 3
    assert torch.equal(module(make_batches(1)[0]), compile_net()(make_batches(1)[0]))
    module.clika_initialize_algorithms()  # with the ranges that there are now
    assert torch.equal(module(make_batches(1)[0]), compile_net()(make_batches(1)[0]))


def test_calibration_interrupted_asks_for_data_again():
    """After an interrupted calibration, the kept data must be given again."""
    module = clika_compile(
        build_net(), tracing_inputs=make_batches(1), calibration_inputs=interrupt_after(make_batches(6)[:5])
    )
    with pytest.raises(KeyboardInterrupt):
        module.clika_initialize_algorithms()
    with pytest.raises(ModelError, match=r"interrupted after 5 batches. Pass the same calibration_inputs to resume"):
        module.clika_initialize_algorithms()
    module.clika_initialize_algorithms(calibration_inputs=make_batches(6))
    assert module.clika_state.calibration.table.batches == 6


@pytest.mark.parametrize("traced", ["tracing_inputs", "calibration_inputs"])
def test_tracing_inputs_used_for_calibration_warn(tmp_path, traced):
    """Calibrating on tracing inputs warns."""
    module = clika_compile(build_net(), **{traced: make_batches()}, logs_dir=tmp_path)
    module.clika_initialize_algorithms()
    warned = "Calibration uses the 4 tracing inputs, which may differ" in "".join(
        p.read_text() for p in tmp_path.iterdir()
    )
    assert warned is (traced == "tracing_inputs")


def test_copy_without_inputs_asks_for_data():
    """A copy keeps no inputs and asks for data."""
    copied = copy.deepcopy(
        clika_compile(build_net(), tracing_inputs=make_batches(1), calibration_inputs=make_batches())
    )
    with pytest.raises(ModelError, match=r"cannot calibrate: the module is a copy or was loaded, .* Pass cal"):
        copied.clika_initialize_algorithms()


def test_calibration_interrupt_keeps_module_and_resumes():
    """After an interrupt, the module is unchanged and the calibration resumes."""
    module = clika_compile(build_net(), tracing_inputs=make_batches(1))
    x = make_batches(1)[0]
    before = module(x)

    with pytest.raises(KeyboardInterrupt):
        module.clika_initialize_algorithms(calibration_inputs=interrupt_after(make_batches(6)[:5]))
    assert torch.equal(module(x), before)
    with pytest.raises(ModelError, match=r"interrupted after 5 batches. Pass the same calibration_inputs to resume"):
        module.clika_initialize_algorithms()
    module.clika_initialize_algorithms(calibration_inputs=make_batches(6))
    assert module.clika_state.calibration.table.batches == 6
    assert torch.equal(module(x), compile_net(data=make_batches(6))(x))


@pytest.mark.parametrize("broken", [NAN, None], ids=["NaN", "an interrupt"])
def test_calibration_failure_keeps_previous_ranges(tmp_path, broken):
    """A failed calibration keeps the previous ranges."""

    def yield_then_fail():
        yield from make_batches(5, seed=7)
        if broken is None:
            raise KeyboardInterrupt
        yield broken

    module, x = compile_net(logs_dir=tmp_path), make_batches(1)[0]
    before = module(x)
    for _ in range(2):
        with pytest.raises((ModelError, KeyboardInterrupt)):
            module.clika_initialize_algorithms(calibration_inputs=yield_then_fail())
    assert torch.equal(module(x), before)
    assert module.clika_compare_targets(HERE).rows[0].layers == 3
    module.clika_initialize_algorithms(calibration_inputs=make_batches(6, seed=7))
    assert torch.equal(module(x), compile_net(data=make_batches(6, seed=7))(x))
    assert "6 batches, 5 of them from an earlier pass" in read_logs(tmp_path)
    with pytest.raises((ModelError, KeyboardInterrupt)):
        module.clika_initialize_algorithms(calibration_inputs=yield_then_fail())
    module.clika_initialize_algorithms()
    assert torch.equal(module(x), compile_net(data=make_batches(6, seed=7))(x))


def test_ranges_file_saved_on_interrupt_and_resumed(tmp_path):
    """Ranges are saved on an interrupt and used later; those of another model raise an error."""
    file = str(tmp_path / "ranges.safetensors")

    def yield_data(fails):
        for number, x in enumerate(make_batches(6)):
            if fails and number == 5:
                raise KeyboardInterrupt
            yield x

    with pytest.raises(KeyboardInterrupt):
        compile_net(data=yield_data(fails=True), tracing_inputs=make_batches(1), ranges_file=file)
    found = compile_net(
        data=yield_data(fails=False), tracing_inputs=make_batches(1), ranges_file=file, logs_dir=tmp_path
    )
    (runs,) = (path.read_text() for path in tmp_path.glob("*.log"))
    assert "6 batches, 5 of them from an earlier pass" in runs
    assert torch.equal(found(make_batches(1)[0]), compile_net(data=make_batches(6))(make_batches(1)[0]))
    others = build_net()
    with torch.no_grad():
        others.body.weight += 0.01
    for other, x in ((nn.Linear(3, 3), torch.randn(2, 3)), (others, make_batches(1)[0])):
        with pytest.raises(ModelError, match=r"they are of another model, or of other weights"):
            clika_compile(
                other,
                calibration_inputs=[x],
                quantization_settings=QuantizationSettings(),
                deployment_settings=HERE,
                ranges_file=file,
            )


def test_clika_export_warns_of_weights_trained_after_calibration(tmp_path):
    """An export warns if weights were trained after their scales were computed."""
    module = compile_net(logs_dir=tmp_path)

    def count_warnings():
        module.clika_export(tmp_path / "model.onnx")
        return sum("weights have changed since their scales" in log.read_text() for log in tmp_path.glob("*.log"))

    assert not count_warnings()
    with torch.no_grad():
        module.get_parameter("body.weight").mul_(1.5)
    assert count_warnings() == 1
    module.clika_initialize_algorithms()
    assert count_warnings() == 1


def test_ranges_file_saved_by_later_quantization(tmp_path):
    """Ranges are also saved if quantization comes later."""
    file = tmp_path / "ranges.safetensors"
    module = clika_compile(build_net(), tracing_inputs=make_batches(1), ranges_file=file).eval()
    module.clika_initialize_algorithms(calibration_inputs=make_batches(), deployment_settings=HERE)
    assert file.exists()


def test_layer_settings_accept_node_name_of_folded_layer():
    """A layer can be named as in the printed graph although batch norm is folded into it."""
    names = [node.name for node in clika_compile(build_net(), tracing_inputs=make_batches(1)).graph.nodes]
    assert names[:2] == ["conv2d", "batch_norm"]
    layers = {"conv2d": LayerQuantizationSettings(skip_quantization=True)}
    found = compile_net(layer_quantization_settings=layers).clika_initialize_algorithms(
        layer_quantization_settings=layers
    )
    assert {x.scope: x.reason for x in found.layers if x.reason} == {"stem.0": "skip_quantization of 'conv2d'"}


def test_clika_quantize_to_goal_float_layers_kept_for_targets():
    """Layers that the goal leaves in float stay float for other targets, and the evaluation may train."""
    module = compile_net()
    scores = iter([1.0, 0.0, *[0.0] * 20])

    def evaluate(candidate):
        assert not candidate.training
        candidate.train()
        return next(scores)

    search = module.clika_quantize_to_goal(evaluate, 0.5)
    assert search.best is None
    (row,) = module.clika_compare_targets(HERE).rows
    assert row.layers == 0


def test_calibration_smaller_last_batch_dropped_with_warning(tmp_path):
    """A smaller last batch is left out, with a warning."""
    data = [*make_batches(5), make_batches(1, 2)[0]]
    compile_net(data=iter(data), logs_dir=tmp_path)
    (log,) = (path.read_text() for path in tmp_path.glob("*.log"))
    assert "Warning: calibration batch 6: input 'x': float32[2, 3, 10, 10]" in log
    assert "The last batch is skipped." in log


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "has no elements"),
        (iter([]), "has no elements"),
        (
            iter([*make_batches(5), make_batches(1, 2)[0], make_batches(1)[0]]),
            r"calibration batch 6: input 'x': .* dim 0 must be 4",
        ),
        ([*make_batches(2), NAN], r"batch 3: the input 'x' contains NaN"),
        ([*make_batches(2), INFINITE], r"batch 3: the input 'x' contains infinity"),
    ],
)
def test_calibration_bad_data_names_batch(data, message):
    """Bad data raises an error that names the batch."""
    settings = {"quantization_settings": QuantizationSettings(), "deployment_settings": HERE}
    with pytest.raises(ModelError, match=message):
        clika_compile(build_net(), calibration_inputs=data, **settings)


@pytest.mark.parametrize("is_trained", [True, False])
def test_is_model_pretrained_false_warns(tmp_path, is_trained):
    """`is_model_pretrained=False` warns that it does not change the decisions."""
    compile_net(is_model_pretrained=is_trained, logs_dir=tmp_path)
    (log,) = (path.read_text() for path in tmp_path.glob("*.log"))
    assert ("is_model_pretrained=False has no effect" in log) is not is_trained


@pytest.mark.parametrize("only_weights", [True, False])
@pytest.mark.parametrize(
    ("name", "number", "message"),
    [
        ("head.weight", float("nan"), r"cannot quantize the weights: NaN in 'head.weight'. Fix these weights first."),
        ("stem.1.running_var", float("nan"), r"NaN in 'stem.1.running_var'"),
        ("body.weight", float("inf"), r"infinity in 'body.weight'. Fix"),
        ("head.weight", float("-inf"), r"infinity in 'head.weight'"),
        ("stem.1.weight", float("inf"), r"infinity in 'stem.1.weight'. Fix"),
    ],
)
def test_quantize_nan_or_inf_weights_named(name, number, message, only_weights):
    """Weights with NaN or inf are named in the error."""

    def set_weight(module):
        with torch.no_grad():
            module.state_dict(keep_vars=True)[name].view(-1)[0] = number
        return module

    settings = QuantizationSettings(prefer_weights_only_quantization=only_weights)
    with pytest.raises(ModelError, match=message):
        clika_compile(
            set_weight(build_net()),
            calibration_inputs=make_batches(),
            quantization_settings=settings,
            deployment_settings=HERE,
        )
    with pytest.raises(ModelError, match=message):
        set_weight(compile_net(settings)).clika_initialize_algorithms(settings)


def test_quantize_bias_of_minus_infinity_accepted():
    """A bias of minus infinity is accepted."""
    model = build_net()
    model.head.bias.data[0] = -torch.inf
    module = clika_compile(
        model, calibration_inputs=make_batches(), quantization_settings=QuantizationSettings(), deployment_settings=HERE
    )
    assert set(module.clika_state.quantized.plan.weights) >= {"conv2d", "conv2d_1"}


def test_clika_compile_dry_run_prints_summary(capsys):
    """A dry run prints the summary and returns the model."""
    model = build_net()
    same = clika_compile(
        model,
        calibration_inputs=make_batches(),
        quantization_settings=QuantizationSettings(),
        deployment_settings=HERE,
        is_dry_run=True,
    )
    shown = capsys.readouterr().out
    assert same is model
    assert "Predicted quantization" in shown
    assert all(name in shown for name in ("stem.0", "body", "head", "predicted SQNR"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_prediction_table_bytes_match_file(tmp_path, dtype):
    """The predicted bytes match the exported file."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).to(dtype).eval()
    module = clika_compile(model, tracing_inputs=[torch.randn(16, 512, dtype=dtype)]).eval()
    settings = QuantizationSettings(
        automatic_skip_quantization=False,
        prefer_weights_only_quantization=dtype == torch.float16,
        weights_only_quantization_block_size=0,
    )
    found = module.clika_initialize_algorithms(settings, deployment_settings=HERE)
    size = module.clika_export(tmp_path / "model.onnx").path.stat().st_size
    assert found.what_if[-1].bytes == pytest.approx(size, rel=0.05)
    assert found.what_if[0].bytes == pytest.approx(512 * 512 * (1 + dtype.itemsize), rel=0.02), "one of two layers"


class Tied(nn.Module):
    """Three layers with one weight; the last output is by far the most sensitive. On request an embedding shares it."""

    def __init__(self, *, embeds=False):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three = (nn.Linear(256, 256) for _ in range(3))
        self.two.weight = self.three.weight = self.one.weight
        self.embeds = embeds

    def forward(self, x):
        x = self.two(torch.relu(self.one(x)))
        x = self.three(torch.tanh(50 * x))
        return x + nn.functional.embedding(torch.arange(4), self.one.weight).sum() if self.embeds else x


@pytest.mark.parametrize("embeds", [False, True])
def test_prediction_table_shared_weight_counted_once(tmp_path, embeds):
    """A weight that several layers read is counted as in the file."""
    data = [randn(16, 256, seed=i) for i in range(3)]
    module = clika_compile(Tied(embeds=embeds).eval(), tracing_inputs=data[:1], smoothing="off").eval()
    found = module.clika_initialize_algorithms(
        QuantizationSettings(automatic_skip_quantization=False), calibration_inputs=data, deployment_settings=HERE
    )
    thresholds = [row.threshold for row in found.what_if]
    sizes = []
    for threshold in thresholds:
        part = module.clika_initialize_algorithms(QuantizationSettings(quantization_sensitivity_threshold=threshold))
        sizes.append(module.clika_export(tmp_path / "model.onnx").path.stat().st_size)
        assert part.bytes == found.what_if[len(sizes) - 1].bytes
    assert [row.bytes for row in found.what_if] == pytest.approx(sizes, rel=0.06)
    goal = module.clika_quantize_to_goal(lambda _: 0.0, 1.0)
    assert goal.best.bytes == found.what_if[-1].bytes


def test_log_contains_lines_of_reference(tmp_path):
    """The log contains the lines of clika-ace."""
    compile_net(logs_dir=tmp_path)
    (log,) = (path.read_text() for path in tmp_path.glob("*.log"))
    for line in (
        "Global Quantization Settings:",
        "+ quantization_sensitivity_threshold = 0.005",
        "Processing Quantization statistics 1/",
        "Quantization: Processed 3/3 - 'linear'",
        "Quantization: done",
        "Summary:",
        "Predictions for other values of quantization_sensitivity_threshold:",
    ):
        assert line in log


def test_clika_compile_no_quantized_layer_warns_once(capsys):
    """A model without any quantized layer warns once, with the reason."""
    half = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).half().eval()
    data = [torch.randn(4, 8).half() for _ in range(3)]
    settings = QuantizationSettings()
    clika_compile(half, calibration_inputs=data, quantization_settings=settings, deployment_settings=HERE)
    message = capsys.readouterr().err
    assert message.count("Warning: No layer is quantized; 2 of 2 because: its weight is torch.float16, and") == 1
    assert "Quantized 0/2 layers, weights 0.2 -> 0.2 KB" in message
    compile_net()
    assert "No layer is quantized" not in capsys.readouterr().err


def test_clika_summary_shown_on_request_without_log(tmp_path, capsys):
    """Without a log, the console names `clika_summary`, and its text lists the decisions."""
    module = compile_net()
    assert "print(module.clika_summary()) shows the decision for each layer" in capsys.readouterr().err
    lines = str(module.clika_summary()).splitlines()
    assert lines[0].split()[:5] == ["layer", "operator", "weights", "activations", "QS"]
    assert [line.split()[0] for line in lines[1:4]] == ["stem.0", "body", "head"]
    assert lines[5] == "Predictions for other values of quantization_sensitivity_threshold:"
    assert str(copy.deepcopy(module).clika_summary()) == str(module.clika_summary())
    module.clika_initialize_algorithms(
        layer_quantization_settings={"body": LayerQuantizationSettings(skip_quantization=True)}
    )
    assert "skip_quantization" in str(module.clika_summary())
    compile_net(logs_dir=tmp_path)
    assert "module.clika_summary()" not in capsys.readouterr().err


def test_clika_summary_without_decisions_raises(module):
    """A module without known decisions raises an error."""
    loaded = load_copy(module)
    for one in (loaded, clika_compile(build_net(), tracing_inputs=make_batches(1))):
        with pytest.raises(ModelError, match=r"no decisions are known.* clika_initialize_algorithms"):
            one.clika_summary()


def test_quantization_missing_arguments_raise_before_data():
    """Missing settings, data or schemes raise an error before data is read."""

    def raise_if_read():
        raise AssertionError
        yield

    with pytest.raises(TargetError, match="identity: it computes in float and declares no scheme"):
        QuantizationRequest(Identity(), QuantizationSettings())
    with pytest.raises(ValueError, match="quantization_settings are given without deployment_settings"):
        clika_compile(build_net(), calibration_inputs=raise_if_read(), quantization_settings=QuantizationSettings())
    with pytest.raises(ValueError, match="quantization_settings are given without calibration_inputs"):
        clika_compile(build_net(), deployment_settings=HERE, quantization_settings=QuantizationSettings())


def test_simulation_missing_target_names_distribution(module):
    """A target that is not installed raises an error that names its distribution."""
    nothing = replace(load_registry(), targets={})
    message = (
        r"for the target 'tensorrt-llm', which no .*\. Run pip install clika-ref-tensorrt \(in a clone: pip install "
        r"plugins/tensorrt; .*\)\. Or quantize it for another"
    )
    with pytest.raises(TargetError, match=message):
        Simulation(replace(module.clika_state.quantized, target="tensorrt-llm"), nothing)
