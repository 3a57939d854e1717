"""A quantized module: compiled, run, exported, saved, trained, and quantized again."""

import copy
import pickle
from dataclasses import replace

import onnx
import onnxruntime as ort
import pytest
import torch
from calibrated_nets import sqnr_in_decibels
from clika_ref_onnxruntime.target import OnnxRuntime
from loaded_copies import load_copy
from quantized_nets import HERE, build_net, compile_net, make_batches
from torch import nn

from clika_ref import LayerQuantizationSettings, ModelError, QuantizationSettings, TargetError, clika_compile
from clika_ref.compiled.simulation import Simulation
from clika_ref.core.registry import load_registry
from clika_ref.export import quantized_check


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
    assert torch.equal(twin(x), before), "or a call sees it too, unlike ARCHITECTURE.md"
    twin.eval() if renews == "eval" else twin.clika_export(tmp_path / "net.onnx")
    assert sqnr_in_decibels(before - build_net().head.bias, 2 * (twin(x) - build_net().head.bias)) > 25


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_simulation_missing_target_names_distribution(module):
    """A target that is not installed raises an error that names its distribution."""
    nothing = replace(load_registry(), targets={})
    message = (
        r"for the target 'tensorrt-llm', which no .*\. Run pip install clika-ref-tensorrt \(in a clone: pip install "
        r"plugins/tensorrt; .*\)\. Or quantize it for another"
    )
    with pytest.raises(TargetError, match=message):
        Simulation(replace(module.clika_state.quantized, target="tensorrt-llm"), nothing)
