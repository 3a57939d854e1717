"""Errors in training, and the calls that report them."""

import copy
import math
import pickle

import pytest
import torch
from calibrated_nets import sqnr_in_decibels
from convolution_nets import ConvNormHead
from loaded_copies import load_copy
from seeded_tensors import randn
from torch import nn

from clika_ref import (
    DeploymentSettings_ONNXRuntime_ONNX,
    ModelError,
    QuantizationSettings,
    clika_compile,
)

HERE = DeploymentSettings_ONNXRuntime_ONNX()
ALL = QuantizationSettings(quantization_sensitivity_threshold=1e9)


def make_data(size=8, seed=0):
    return randn(size, 3, 8, 8, seed=seed)


def build_net():
    torch.manual_seed(0)
    model = ConvNormHead(5, bias=False).train()
    for seed in range(20):
        model(make_data(seed=seed))
    return model.eval()


def compile_net(model=None, **options):
    options = {"deployment_settings": HERE, "quantization_settings": ALL, **options}
    return clika_compile(model or build_net(), calibration_inputs=[make_data(), make_data(4)], **options)


# Scales


def test_qat_nan_loss_step_names_scales_and_layers():
    """After a step with a NaN loss, the error names the scales and layers."""
    module = compile_net().train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    (module(make_data()).sum() * math.nan).backward()
    optimizer.step()
    assert module.get_parameter("conv.weight").isnan().any(), "weights contain NaN as well"
    said = (
        r"the scale of the activation '\w+' is nan, .*that of the weight of 'conv2d' is nan.*: training has diverged. "
        r"Load an earlier state dict,"
    )
    for call in (lambda: module(make_data()), module.eval):
        with pytest.raises(ModelError, match=said):
            call()
    assert module.training, "no mode is entered in which nothing can be computed"
    for keeps in (False, True):
        with pytest.raises(ModelError, match=said):
            module.clika_serialize(keep_float_weights=keeps)


@pytest.mark.parametrize(("number", "found"), [(-200.0, "0.0"), (100.0, "inf")])
def test_qat_scale_out_of_range_named_before_nan(number, found):
    """A scale of zero or infinity is named before it causes NaN."""
    module = compile_net().train()
    before = copy.deepcopy(module.state_dict())
    with torch.no_grad():
        module.get_parameter("clika.log_weight_scales.conv2d")[1] = number
    with pytest.raises(
        ModelError,
        match=rf"the scale of the weight of 'conv2d' is {found}: training has diverged. Load an earlier state dict,",
    ):
        module(make_data())
    module.load_state_dict(before)
    assert module(make_data()).isfinite().all()


def test_clika_export_diverged_float_module_warns(tmp_path, capsys):
    """An export of a diverged float module warns."""
    module = compile_net(quantization_settings=None)
    (module.train()(make_data()).sum() * math.nan).backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    capsys.readouterr()
    module.eval().clika_export(tmp_path / "net.onnx")
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "NaN in the weights conv.weight, norm.weight, norm.bias, head.weight, head.bias: all results that depend on "
        "them are NaN."
    ) in said


# Weights


def test_quantized_forward_follows_assigned_data():
    """INT8 weights follow tensors that are assigned to `.data`."""
    module = compile_net().eval()
    before = module(make_data())
    kept = [p.detach().clone() for p in module.parameters()]
    head = module.get_parameter("head.weight")
    torch.nn.utils.vector_to_parameters(head.detach().flatten() * 2, [head])
    assert not torch.allclose(module(make_data()), before, atol=0.01)
    for parameter, old in zip(module.parameters(), kept, strict=True):
        parameter.data = old
    assert torch.equal(module(make_data()), before)


def test_quantized_forward_of_untrained_norm_records_gradients():
    """A norm after ReLU whose statistics equal its weight and bias runs in eval mode, with gradients enabled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval()
    module = compile_net(model, discard_input_model=False)
    assert torch.is_grad_enabled()
    assert sqnr_in_decibels(model(make_data()), module(make_data())) > 20


@pytest.mark.parametrize("settings", [ALL, None])
def test_forward_replaced_weight_named_with_remedy(settings):
    """A replaced parameter is named, with the remedy."""
    module = compile_net(quantization_settings=settings).eval()
    nn.utils.parametrizations.weight_norm(module.get_submodule("head"), "weight")
    said = "no longer has 'head.weight', .*: a parametrization or torch.nn.utils.prune may have replaced it"
    for call in (lambda: module(make_data()), module.clika_serialize, lambda: module.clika_export("net.onnx")):
        with pytest.raises(ModelError, match=said):
            call()


# Norms


def test_live_norms_of_float_module_match_original(tmp_path):
    """Live batch norm of a float module equals the original."""
    options = {"quantization_settings": None, "deployment_settings": None, "batch_norm": "live"}
    module, original = compile_net(**options).train(), build_net().train()
    pickled = pickle.loads(pickle.dumps(module))  # noqa: S301 - our own bytes
    loaded = load_copy(module)
    for twin in (module, pickled, loaded.train()):
        fresh = copy.deepcopy(original)
        for seed in (30, 31):
            found, wanted = twin(make_data(seed=seed)), fresh(make_data(seed=seed))
            assert torch.allclose(found, wanted, atol=1e-5)
        found.square().sum().backward()
        wanted.square().sum().backward()
        for name, parameter in fresh.named_parameters():
            assert torch.allclose(twin.get_parameter(name).grad, parameter.grad, atol=1e-4), name
        assert torch.allclose(twin.get_buffer("norm.running_var"), fresh.norm.running_var)
        assert torch.allclose(twin.eval()(make_data()), fresh.eval()(make_data()), atol=1e-5)


@pytest.mark.parametrize("settings", [ALL, None], ids=["integers", "float"])
def test_live_norm_single_value_per_channel_raises(settings):
    """One value per channel raises an error, and the statistics stay."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).eval()
    rows = [torch.randn(16, 6), torch.randn(8, 6)]
    deployment = HERE if settings else None
    module = clika_compile(
        model,
        calibration_inputs=rows,
        quantization_settings=settings,
        deployment_settings=deployment,
        batch_norm="live",
    ).train()
    module(rows[0])
    before = module.get_buffer("1.running_var").clone()
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        module(rows[0][:1])
    assert torch.equal(module.get_buffer("1.running_var"), before)


def train_steps(module, count):
    optimizer = torch.optim.AdamW(module.train().parameters(), lr=3e-3)
    for seed in range(count):
        optimizer.zero_grad()
        module(make_data(seed=seed)).square().sum().backward()
        optimizer.step()


def test_clika_set_batch_norm_freezes_and_unfreezes():
    """Batch norm can be frozen and made live again, with the same INT8 outputs."""
    module = compile_net(batch_norm="live")
    train_steps(module, 8)
    learned, statistics = module.eval()(make_data()), module.get_buffer("norm.running_mean").clone()
    module.train().clika_set_batch_norm("frozen")
    assert torch.allclose(module(make_data()), learned, atol=1e-5)
    assert torch.equal(module.eval()(make_data()), learned)
    train_steps(module, 4)
    assert torch.equal(module.get_buffer("norm.running_mean"), statistics)
    loaded = load_copy(module)
    for twin in (module, copy.deepcopy(module), loaded):
        assert torch.allclose(twin.train()(make_data()), twin.eval()(make_data()), atol=1e-5)
    module.clika_set_batch_norm("live")
    train_steps(module, 1)
    assert not torch.equal(module.get_buffer("norm.running_mean"), statistics)


def test_clika_set_batch_norm_invalid_value_raises():
    """An invalid value raises an error and changes nothing."""
    module = compile_net().train()
    with pytest.raises(ModelError, match=r"option 'batch_norm' is 'thawed'. Choose one of 'frozen', 'live'"):
        module.clika_set_batch_norm("thawed")
    assert module.clika_state.training_executor is not None


# torch.compile


def compile_full_graph(module):
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, backend="aot_eager")(make_data())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by dynamo itself
def test_torch_compile_copies_traced_whole_in_training():
    """Copies and loaded modules are traced as one graph in train mode."""
    module = compile_net().train()
    expected = module(make_data())
    loaded = load_copy(module)
    loaded.train().load_state_dict(module.state_dict())
    pickled = pickle.loads(pickle.dumps(module))  # noqa: S301 - our own bytes
    for twin in (copy.deepcopy(module), pickled, loaded):
        assert torch.allclose(compile_full_graph(twin), expected, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by dynamo itself
def test_torch_compile_eval_without_graph_breaks():
    """A quantized module in eval mode has no graph breaks."""
    torch._dynamo.reset()
    module = compile_net().eval()
    expected = module(make_data())
    torch._dynamo.utils.counters.clear()
    found = torch.compile(module, backend="aot_eager")(make_data())
    assert torch.allclose(found, expected, atol=1e-5)
    assert not torch._dynamo.utils.counters["graph_break"]


# Modes


@pytest.mark.parametrize("settings", [ALL, None], ids=["integers", "float"])
def test_train_without_traced_dropouts_warns_once(settings):
    """Training without the original's dropouts warns once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.3), nn.Linear(4, 4), nn.Dropout(0.0), nn.Dropout1d(0.1))
    rows = [torch.randn(16, 6), torch.randn(8, 6)]
    deployment = HERE if settings else None
    module = clika_compile(
        model, calibration_inputs=rows, quantization_settings=settings, deployment_settings=deployment
    )
    module.eval()
    with pytest.warns(UserWarning, match=r"was traced in eval mode, and trains without its 2 dropouts"):
        module.train()
    module.train()
    assert torch.allclose(module(rows[0]), module.eval()(rows[0]), atol=1e-5)
