"""Adapters in exports: merged into float weights, and separate next to quantized weights, which do not change."""

import copy

import onnx
import pytest
import torch
from adapted_nets import (
    HERE,
    INT4,
    INT8,
    Images,
    Tokens,
    build_net,
    compile_net,
    make_batches,
    make_lora_settings,
    train,
)
from calibrated_nets import sqnr_in_decibels
from clika_ref_cleanup import fold_batch_norm
from clika_ref_onnxruntime.target import OnnxRuntime
from onnx import numpy_helper
from torch import nn

from clika_ref import (
    ClikaModule,
    DeploymentSettings_OpenVINO_ONNX,
    DeploymentSettings_TensorRT_ONNX,
    ModelError,
    PruningSettings,
    QuantizationSettings,
    clika_compile,
)
from clika_ref.compiled.state import log_scales_of

CASES = [(Images, INT8), (Tokens, INT8), (Tokens, INT4)]
IDS = ["images", "tokens", "low-bit"]


def read_op_types(artifact):
    return [node.op_type for node in onnx.load(artifact.path).graph.node]


def read_quantized_weights(artifact):
    """Return the quantized weights by name, INT4 ones unpacked."""
    found = {}
    for tensor in onnx.load(artifact.path).graph.initializer:
        if tensor.data_type in (onnx.TensorProto.INT8, onnx.TensorProto.INT4) and len(tensor.dims) > 1:
            found[tensor.name] = numpy_helper.to_array(tensor).astype("int8")
    return found


def run(artifact, x):
    return OnnxRuntime().load(artifact)([x])[0]


# Float


@pytest.mark.parametrize("kind", [Images, Tokens])
def test_clika_export_float_merges_adapters(kind, tmp_path):
    """A float export merges the adapters into the weights."""
    module, x = train(compile_net(kind, lora=make_lora_settings()), kind), make_batches(kind, 1, seed=5)[0]
    artifact = module.clika_export(tmp_path / "merged.onnx")
    plain = compile_net(kind).clika_export(tmp_path / "plain.onnx")
    assert read_op_types(artifact) == read_op_types(plain)
    torch.testing.assert_close(run(artifact, x), module(x), atol=1e-4, rtol=1e-4)  # 1.3e-6 was seen
    assert sqnr_in_decibels(build_net(kind)(x), module(x)) < 20, "the adapters count"


@pytest.mark.parametrize("kind", [Images, Tokens])
def test_clika_export_merging_off_keeps_adapter_matmuls(kind, tmp_path):
    """With `merging='off'`, adapters are separate layers, and batch norm is still folded."""
    module, x = train(compile_net(kind, lora=make_lora_settings(merging="off")), kind), make_batches(kind, 1, seed=5)[0]
    artifact = module.clika_export(tmp_path / "beside.onnx")
    found, plain = read_op_types(artifact), read_op_types(compile_net(kind).clika_export(tmp_path / "plain.onnx"))
    products = ("Conv", "MatMul", "Gemm")
    added = sum(found.count(p) for p in products) - sum(plain.count(p) for p in products)
    assert added == 2 * 4
    assert "BatchNormalization" not in found
    torch.testing.assert_close(run(artifact, x), module(x), atol=1e-4, rtol=1e-4)


def test_clika_export_equal_weights_keep_own_adapters(tmp_path):
    """Layers with equal weights keep their own adapters."""
    torch.manual_seed(0)
    one = nn.Linear(16, 16)
    model, x = (
        nn.Sequential(one, nn.ReLU(), copy.deepcopy(one), nn.ReLU(), copy.deepcopy(one)).eval(),
        torch.randn(8, 16),
    )
    module = clika_compile(model, tracing_inputs=[x], global_lora_settings=make_lora_settings(merging="off"))
    for name, matrix in module.named_parameters():
        if "lora_B" in name:
            matrix.data.normal_()
    artifact = module.clika_export(tmp_path / "beside.onnx")
    torch.testing.assert_close(run(artifact, x), module(x), atol=1e-3, rtol=1e-4)


# Integers


@pytest.mark.parametrize(("kind", "settings"), CASES, ids=IDS)
def test_clika_attach_lora_quantized_module_keeps_plan(kind, settings, tmp_path):
    """Adapters attached to a quantized module keep its outputs, INT8 weights and plan."""
    module, x = compile_net(kind, settings), make_batches(kind, 1, seed=5)[0]
    before, integers, plan = (
        module(x),
        read_quantized_weights(module.clika_export(tmp_path / "a.onnx")),
        module.clika_state.quantized.plan,
    )
    module.clika_attach_lora(make_lora_settings(dropout_rate=0.3))
    assert torch.equal(module(x), before)
    assert torch.equal(module.train()(x), module.eval()(x))
    train(module, kind)
    assert sqnr_in_decibels(before, module(x)) < 30, "the adapters count"
    artifact = module.clika_export(tmp_path / "b.onnx")
    after = read_quantized_weights(artifact)
    assert after.keys() == integers.keys()
    assert all((after[name] == integers[name]).all() for name in integers)
    assert sqnr_in_decibels(module(x), run(artifact, x)) > 30
    assert module.clika_state.quantized.plan.weights.keys() == plan.weights.keys()
    assert not any(p.requires_grad for p in log_scales_of(module).values())


@pytest.mark.parametrize(("kind", "settings"), CASES, ids=IDS)
def test_adapters_quantized_train_matches_eval(kind, settings):
    """The training graph of a quantized module with adapters equals its eval mode."""
    module, x = train(compile_net(kind, settings, make_lora_settings()), kind), make_batches(kind, 1, seed=5)[0]
    found = module.train()(x)
    assert (found - module.eval()(x)).abs().max() <= 1e-5 * found.abs().max()  # as of training without adapters


@pytest.mark.parametrize(("kind", "settings"), CASES, ids=IDS)
def test_adapters_quantized_add_same_as_float(kind, settings):
    """Adapters add nearly the same to a quantized module, with SmoothQuant, as to the float module."""
    module, x = compile_net(kind, settings, smooth_quant="on", equalization="on"), make_batches(kind, 1, seed=5)[0]
    assert module.clika_state.quantized.plan.smoothing, "factors are followed, too"
    module.clika_attach_lora(make_lora_settings())
    plain = compile_net(kind, lora=make_lora_settings())
    with torch.no_grad():
        for name, matrix in module.named_parameters():
            if name.startswith("clika.adapters"):
                matrix.normal_(std=0.05)
                plain.get_parameter(name).copy_(matrix)
    wanted = plain(x) - compile_net(kind)(x)
    assert sqnr_in_decibels(plain(x), module(x)) > 15, "INT4 reaches 20 dB"
    assert sqnr_in_decibels(plain(x), compile_net(kind)(x)) < sqnr_in_decibels(plain(x), module(x)) - 6
    assert wanted.any()


@pytest.mark.parametrize(("kind", "settings"), CASES, ids=IDS)
def test_quantize_with_adapters_observes_adapted_outputs(kind, settings, tmp_path):
    """Quantization after attaching covers the adapted outputs and keeps adapters in float."""
    module, x = train(compile_net(kind, lora=make_lora_settings()), kind), make_batches(kind, 1, seed=5)[0]
    wanted = module(x)
    module.clika_initialize_algorithms(settings, calibration_inputs=make_batches(kind), deployment_settings=HERE)
    assert sqnr_in_decibels(wanted, module(x)) > 15
    plan = module.clika_state.quantized.plan
    assert kind is Tokens or "conv2d" in plan.activations, "the result of a layer has a range of its own"
    assert (settings is INT4) is bool(plan.packed_weights)
    assert not any("adapt" in name for name in (*plan.weights, *plan.packed_weights)), "adapters stay float"
    assert not any(p.requires_grad for p in log_scales_of(module).values())
    artifact = module.clika_export(tmp_path / "integers.onnx")
    assert sqnr_in_decibels(module(x), run(artifact, x)) > 30
    with pytest.raises(ModelError, match=r"query: its layer is quantized|stem: its layer is quantized"):
        module.clika_merge_lora()


@pytest.mark.parametrize(("kind", "settings"), CASES, ids=IDS)
def test_clika_export_merging_on_quantizes_merged_weights(kind, settings, tmp_path):
    """With `merging='on'`, adapters are rounded together with the quantized weights."""
    module, x = compile_net(kind, settings), make_batches(kind, 1, seed=5)[0]
    plain = module.clika_export(tmp_path / "plain.onnx")
    module.clika_attach_lora(make_lora_settings(merging="on"))
    train(module, kind)
    artifact = module.clika_export(tmp_path / "merged.onnx")
    assert read_op_types(artifact) == read_op_types(plain)
    before, after = read_quantized_weights(plain), read_quantized_weights(artifact)
    assert any((one != other).any() for one, other in zip(before.values(), after.values(), strict=True))
    found = module.train()(x)
    assert (found - module.eval()(x)).abs().max() <= 1e-5 * found.abs().max()
    assert sqnr_in_decibels(module(x), run(artifact, x)) > 30
    integers = module(x)
    module.clika_merge_lora()
    torch.testing.assert_close(module(x), integers)
    assert not any(name.startswith("clika.adapters") for name in module.state_dict())


def test_clika_attach_lora_loaded_module_needs_no_data():
    """A loaded quantized module is adapted without calibration data."""
    module, loaded = compile_net(Tokens, INT4), ClikaModule()
    loaded.load_state_dict(module.state_dict())
    x = make_batches(Tokens, 1)[0]
    before = loaded.eval()(x)
    loaded.clika_attach_lora(make_lora_settings())
    assert torch.equal(loaded(x), before)
    assert sqnr_in_decibels(before, train(loaded, Tokens)(x)) < 30


def test_clika_attach_lora_keeps_learned_scales():
    """Attaching adapters keeps learned scales."""
    module, x = compile_net(Images, INT8), make_batches(Images, 1)[0]
    for log in log_scales_of(module).values():
        log.data.fill_(0.2)
    before = module.eval()(x)
    module.clika_attach_lora(make_lora_settings())
    assert torch.equal(module(x), before)


def test_clika_attach_lora_updates_scale_sources():
    """A scale source that the plan takes from a layer moves to the adapted layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3)).eval()
    data = [torch.randn(4, 3, 12, 12) for _ in range(3)]
    module = clika_compile(model, calibration_inputs=data, quantization_settings=INT8, deployment_settings=HERE)
    assert module.clika_state.quantized.plan.scale_sources == {"max_pool2d": "conv2d"}
    before = module(data[0])
    module.clika_attach_lora(make_lora_settings(target_layers=["0"]))
    assert module.clika_state.quantized.plan.scale_sources == {"max_pool2d": "conv2d_adapted"}
    assert {"conv2d", "conv2d_adapted"} <= module.clika_state.quantized.plan.activations.keys(), "both in INT8"
    assert torch.equal(module(data[0]), before)
    assert torch.equal(module.train()(data[0]), before)


def test_clika_attach_lora_masked_weights_stay_masked(tmp_path):
    """Masked weights stay masked with adapters; merging into them raises an error."""
    module, x = compile_net(Tokens, pruning_settings=PruningSettings("2:4", None)), make_batches(Tokens, 1)[0]
    with pytest.raises(ModelError, match=r"merging='on' would overwrite the masked elements of 'query.weight'"):
        module.clika_attach_lora(make_lora_settings(merging="on"))
    module.clika_attach_lora(make_lora_settings())
    train(module, Tokens)
    artifact = module.clika_export(tmp_path / "float.onnx")
    torch.testing.assert_close(run(artifact, x), module(x), atol=1e-4, rtol=1e-4)
    weights = {t.name: numpy_helper.to_array(t) for t in onnx.load(artifact.path).graph.initializer}
    assert any((w == 0).mean() == 0.5 for w in weights.values() if w.shape == (32, 32))
    with pytest.raises(ModelError, match="query: its weight is masked"):
        module.clika_merge_lora()
    module.clika_initialize_algorithms(INT8, calibration_inputs=make_batches(Tokens), deployment_settings=HERE)
    artifact = module.clika_export(tmp_path / "integers.onnx")
    assert sqnr_in_decibels(module(x), run(artifact, x)) > 30


def test_clika_export_untraceable_weight_change_raises(monkeypatch, tmp_path):
    """A pass with a weight change that an adapter cannot follow raises an error."""

    def ignore_norm(weight, gamma, var, **_):
        return weight

    monkeypatch.setattr(fold_batch_norm, "fold_weight", ignore_norm)
    module = compile_net(Images, lora=make_lora_settings(merging="off"))
    with pytest.raises(
        ModelError, match=r"cannot keep the adapter of 'stem.weight' in stem.*ignore_norm.*merging='on'"
    ):
        module.clika_export(tmp_path / "beside.onnx")


@pytest.mark.parametrize(
    "deployment", [DeploymentSettings_OpenVINO_ONNX(), DeploymentSettings_TensorRT_ONNX()], ids=str
)
@pytest.mark.parametrize("settings", [None, QuantizationSettings()], ids=["float", "integers"])
@pytest.mark.parametrize("kind", [Images, Tokens])
def test_clika_export_other_targets_run_adapters(kind, settings, deployment, tmp_path):
    """OpenVINO and TensorRT run adapters; each export is compared with the module."""
    module = compile_net(
        kind, settings, make_lora_settings(merging="auto" if settings else "off"), deployment_settings=deployment
    )
    train(module, kind).clika_export(tmp_path / "model.onnx", deployment_settings=deployment)


@pytest.mark.parametrize("settings", [INT8, INT4], ids=["int8", "int4"])
@pytest.mark.parametrize("is_loaded", [False, True], ids=["trained", "loaded"])
def test_clika_export_nan_adapters_named_and_not_written(settings, is_loaded, tmp_path):
    """Adapters with NaN are named in the error, and no file is written."""
    module = compile_net(Tokens, settings, make_lora_settings()).train()
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    (module(make_batches(Tokens, 1)[0]).sum() * torch.nan).backward()
    optimizer.step()
    if is_loaded:
        module = ClikaModule.clika_from_serialized(module.clika_serialize())
    with pytest.raises(ModelError, match=r"NaN in 'clika\.adapters\.query\.lora_A\.weight', NaN in"):
        module.clika_export(tmp_path / "adapted.onnx")
    assert not (tmp_path / "adapted.onnx").exists()
