"""Quantization-aware training: initial results, trained and fixed parameters, and training loops of other tools."""

import copy
import pickle

import onnx
import pytest
import torch
import transformers
from adapted_nets import INT4
from calibrated_nets import sqnr_in_decibels
from clika_ref_cleanup import fold_constants
from clika_ref_onnxruntime.target import OnnxRuntime
from loaded_copies import load_copy
from onnx import numpy_helper
from seeded_tensors import draw_batches
from torch import nn

from clika_ref import (
    ClikaModule,
    DeploymentSettings_ONNXRuntime_ONNX,
    ModelError,
    QuantizationSettings,
    clika_compile,
)
from clika_ref.compiled.state import learned_quantization, set_quantization
from clika_ref.quantization.qat import fake_quantization
from clika_ref.quantization.qat.learned_scales import LOG_SCALE_SCOPES

HERE = DeploymentSettings_ONNXRuntime_ONNX()
ALL = QuantizationSettings(quantization_sensitivity_threshold=1e9)


class Convolutions(nn.Module):
    """Batch norm after convolutions of all types, and before one; sums, pools and a computed weight."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU6())
        self.wide = nn.Sequential(nn.ConvTranspose2d(8, 8, 2, groups=2), nn.BatchNorm2d(8))
        self.before = nn.BatchNorm2d(8)
        self.pool, self.last = nn.MaxPool2d(2), nn.Conv2d(8, 8, 3)
        self.head, self.scale = nn.Linear(8, 5), nn.Parameter(torch.ones(5, 1))

    def forward(self, x):
        x = self.stem(x)
        x = x + self.wide(self.deep(x))[:, :, 1:, 1:]
        x = torch.relu(self.last(torch.relu(self.before(self.pool(x)))))
        return nn.functional.linear(x.mean((2, 3)), self.head.weight * self.scale, self.head.bias)


class Tokens(nn.Module):
    """Attention with one weight for all its inputs, a norm that SmoothQuant folds into, and sliced positions."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(9, 32) * 0.1)
        self.norm, self.back = nn.LayerNorm(32), transformers.pytorch_utils.Conv1D(32, 32)
        self.norm.weight.data[3] = 40
        self.whole = nn.Linear(32, 96)
        self.whole.weight.data[:, 3] /= 40

    def forward(self, x):
        x = x + self.positions[1 : 1 + x.shape[1]]
        y = self.norm(x)
        parts = zip(self.whole.weight.chunk(3), self.whole.bias.chunk(3), strict=True)
        q, k, v = (nn.functional.linear(y, weight, bias) for weight, bias in parts)
        return x + self.back(nn.functional.scaled_dot_product_attention(q, k, v))


INPUT_SHAPES = {Convolutions: (3, 12, 12), Tokens: (8, 32)}


def make_batches(kind, count=4, size=8, seed=0):
    return draw_batches(count, size, *INPUT_SHAPES[kind], seed=seed)


def build_net(kind):
    torch.manual_seed(0)
    model = kind().train()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.5, 2)
                module.bias.uniform_(-0.5, 0.5)
        if kind is Uneven:
            model.norm.weight[0] *= 40
            model.two.weight[:, 0] /= 40
        for x in make_batches(kind, 40, 16, seed=9):  # until statistics have settled
            model(x)
    return model.eval()


def compile_net(kind=Convolutions, settings=ALL, **options):
    options = {
        "deployment_settings": HERE,
        "calibration_inputs": [*make_batches(kind), make_batches(kind, 1, 4)[0]],
        **options,
    }
    return clika_compile(build_net(kind), quantization_settings=settings, **options)


CASES = [(Convolutions, ALL), (Tokens, ALL), (Tokens, INT4)]


@pytest.fixture(scope="module", params=CASES, ids=["convolutions", "tokens", "int4"])
def case(request):
    kind, settings = request.param
    return kind, compile_net(kind, settings)


def train(module, kind=Convolutions, steps=12, rate=3e-3):
    """Train towards another output, so that weights and scales move."""
    original = build_net(kind)
    optimizer = torch.optim.Adam(module.parameters(), lr=rate)
    module.train()
    for number in range(steps):
        x = make_batches(kind, 1, seed=number)[0]
        optimizer.zero_grad()
        (module(x) - 1.1 * original(x).detach()).square().mean().backward()
        optimizer.step()
    return module


def list_log_scales(module):
    return {name: p for name, p in module.named_parameters() if name.startswith(LOG_SCALE_SCOPES)}


# What it starts from


def test_qat_train_mode_matches_eval_at_start(case):
    """Train mode starts from the outputs of eval mode."""
    kind, module = case
    x, twin = make_batches(kind, 1, seed=5)[0], copy.deepcopy(module)
    integers = twin.eval()(x)
    found = twin.train()(x)
    assert (found - integers).abs().max() <= 1e-5 * integers.abs().max(), "issue 6: to 1e-5"
    assert torch.equal(twin(x), found)


def test_qat_gradients_close_to_original(case):
    """Every parameter gets nearly the gradient of the original."""
    kind, module = case
    x, twin, original = make_batches(kind, 1, seed=5)[0], copy.deepcopy(module).train(), build_net(kind)
    if twin.clika_state.quantized.plan.packed_weights:
        original.load_state_dict({n: p for n, p in twin.state_dict().items() if n in original.state_dict()})
    twin(x).square().sum().backward()
    original(x).square().sum().backward()
    for name, parameter in original.named_parameters():
        found = twin.get_parameter(name).grad
        assert sqnr_in_decibels(parameter.grad, found) > (3 if "clika" in name or kind is Tokens else 10), name


def test_qat_state_dict_has_original_keys_and_scales(case):
    """The state dict has the original's keys and the log scales, and these start at zero."""
    kind, module = case
    added = module.state_dict().keys() - build_net(kind).state_dict().keys() - {"_extra_state"}
    assert added == list_log_scales(module).keys()
    assert not any(p.any() for p in list_log_scales(module).values()), "they are relative to those that were planned"


def test_qat_shared_qparams_learn_one_scale():
    """Activations with shared qparams learn one scale."""
    x = make_batches(Convolutions, 1)[0]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3), nn.Flatten())
    module = clika_compile(
        model.eval(), calibration_inputs=[x], quantization_settings=ALL, deployment_settings=HERE
    ).train()
    planned = module.clika_state.quantized.plan
    assert planned.scale_sources == {"max_pool2d": "relu"}
    assert {name.rpartition(".")[2] for name in list_log_scales(module)} == {"input", "relu", "conv2d", "conv2d_1"}
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    module(x).square().sum().backward()
    optimizer.step()
    learned = learned_quantization(module).plan.activations
    assert learned["max_pool2d"] == learned["relu"] != planned.activations["relu"]


class Joined(nn.Module):
    """A parameter that is concatenated with the result of a layer."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(16, 4, 3)
        self.table = nn.Parameter(torch.randn(8, 8, 12, 12))

    def forward(self, x):
        return self.two(torch.cat([torch.relu(self.one(x)), self.table], 1))


def test_qat_parameter_in_concat_quantized_and_trained():
    """A parameter in a concatenation is quantized and trained."""
    data = make_batches(Convolutions)
    module = clika_compile(
        Joined().eval(), calibration_inputs=data, quantization_settings=ALL, deployment_settings=HERE
    )
    integers = module(data[0])
    found = module.train()(data[0])
    assert torch.equal(found, integers)
    found.square().sum().backward()
    assert module.get_parameter("table").grad.any()


def test_qat_equal_parameters_trained_separately():
    """Parameters that are equal at the start get separate gradients."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    for layer in (model[0], model[2]):
        nn.init.zeros_(layer.bias)
    module = clika_compile(
        model, calibration_inputs=[torch.randn(16, 8)], quantization_settings=ALL, deployment_settings=HERE
    )
    module.train()(torch.randn(16, 8)).square().sum().backward()
    one, other = (module.get_parameter(f"{i}.bias").grad for i in (0, 2))
    assert one.any()
    assert other.any()
    assert not torch.equal(one, other)


def test_train_float_module_matches_eval():
    """A float module trains as before, without scales."""
    kind = Convolutions
    module, x = clika_compile(build_net(kind), tracing_inputs=make_batches(kind, 1)), make_batches(kind, 1)[0]
    assert not list_log_scales(module)
    assert torch.equal(module.train()(x), module.eval()(x))
    module.train()(x).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


# What it leaves


def test_qat_eval_and_artifact_match_trained_module(case, tmp_path):
    """After training, eval mode and the artifact match train mode."""
    kind, module = case
    twin, x = train(copy.deepcopy(module), kind), make_batches(kind, 1, seed=5)[0]
    found = twin(x)
    assert all(p.any() for p in list_log_scales(twin).values()), "each scale has moved"
    integers = twin.eval()(x)
    assert (found - integers).abs().max() <= 1e-5 * integers.abs().max()
    artifact = twin.clika_export(tmp_path / "trained.onnx")
    (exported,) = OnnxRuntime().load(artifact)([x])
    assert sqnr_in_decibels(integers, exported) > 30
    if kind is Convolutions:
        planned, learned = twin.clika_state.quantized.plan.activations, learned_quantization(twin).plan.activations
        constants = {i.name: numpy_helper.to_array(i) for i in onnx.load(artifact.path).graph.initializer}
        written = {float(c) for c in constants.values() if c.dtype == "float32" and not c.ndim}
        assert {s.scale for s in learned.values()} <= written
        assert not {s.scale for s in planned.values()} & written


def test_clika_export_in_train_mode_uses_learned_scales(tmp_path):
    """An export in train mode uses the learned scales and does not warn."""
    module = train(compile_net(logs_dir=tmp_path))
    module.clika_export(tmp_path / "one.onnx")
    assert module.training
    module.eval().clika_export(tmp_path / "two.onnx")
    assert (tmp_path / "one.onnx").read_bytes() == (tmp_path / "two.onnx").read_bytes()
    assert not any("weights have changed since" in log.read_text() for log in tmp_path.glob("*.log"))


def test_qat_copies_keep_learned_scales(case):
    """Copies, pickles and state dicts keep the learned scales."""
    kind, module = case
    twin, x = train(copy.deepcopy(module), kind).eval(), make_batches(kind, 1)[0]
    loaded, beside = ClikaModule(), copy.deepcopy(module)
    list_log_scales(twin)[next(iter(list_log_scales(twin)))].requires_grad_(requires_grad=False)
    loaded.load_state_dict(twin.state_dict())
    beside.load_state_dict(twin.state_dict())
    pickled = pickle.loads(pickle.dumps(twin))  # noqa: S301 - our own bytes
    for other in (copy.deepcopy(twin), pickled, loaded.eval(), beside.eval()):
        assert torch.equal(other(x), twin(x))
        assert torch.allclose(other.train()(x), twin(x), atol=1e-5)
    assert [p.requires_grad for p in list_log_scales(loaded).values()] == [
        p.requires_grad for p in list_log_scales(twin).values()
    ]


def test_qat_new_quantization_resets_learned_scales():
    """A new quantization resets the learned scales and keeps their parameters."""
    module = train(compile_net())
    held = list_log_scales(module)
    before = learned_quantization(module).plan.weights
    module.clika_initialize_algorithms(ALL)
    assert all(module.get_parameter(name) is p and not p.any() for name, p in held.items())
    assert any(
        not torch.equal(module.clika_state.quantized.plan.weights[name], scales) for name, scales in before.items()
    )
    set_quantization(module, None, None)
    assert not list_log_scales(module)


def test_qat_eval_sees_scale_written_to_data():
    """`eval` sees scales that are written to `.data`."""
    module, x = compile_net().eval(), make_batches(Convolutions, 1)[0]
    before = module(x)
    for log in list_log_scales(module).values():
        log.data.add_(0.5)
    assert not torch.equal(module.eval()(x), before)


# Batch norm


def copy_statistics(module):
    return {name: b.clone() for name, b in module.named_buffers() if "running" in name}


@pytest.mark.slow
def test_qat_frozen_norms_keep_statistics_live_update():
    """Frozen batch norm keeps its statistics; live batch norm updates them."""
    frozen, live = compile_net(), compile_net(batch_norm="live")
    before = copy_statistics(frozen)
    assert all(torch.equal(b, before[name]) for name, b in copy_statistics(train(frozen)).items())
    assert not any(torch.equal(b, before[name]) for name, b in copy_statistics(train(live)).items())


def test_qat_live_norms_match_original(tmp_path):
    """Live batch norm computes and learns as the original."""
    module, original = compile_net(batch_norm="live").train(), build_net(Convolutions).train()
    for x in make_batches(Convolutions, 12, 16, seed=3):
        module(x)
        wanted = original(x)
    assert sqnr_in_decibels(wanted, module(x)) > 20
    found, learned = copy_statistics(module), copy_statistics(original)
    for name in [
        name for name in found if name.endswith("mean")
    ]:  # a mean near 0 is compared together with its variance
        pair = name, name.replace("mean", "var")
        assert sqnr_in_decibels(*(torch.cat([of[n] for n in pair]) for of in (learned, found))) > 30, name
    assert sqnr_in_decibels(original.eval()(x), module.eval()(x)) > 20
    artifact = train(module).eval().clika_export(tmp_path / "live.onnx")
    assert sqnr_in_decibels(module(x), OnnxRuntime().load(artifact)([x])[0]) > 30


class Unrounded:
    """In place of the function that rounds."""

    @staticmethod
    def apply(x, *_):
        return x


class Uneven(nn.Module):
    """Two layers with norms; the first layer has a few channels that are much larger than the others."""

    def __init__(self):
        super().__init__()
        self.one, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.two, self.last = nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8)

    def forward(self, x):
        return self.last(self.two(torch.relu(self.norm(self.one(x)))))


INPUT_SHAPES[Uneven] = INPUT_SHAPES[Convolutions]


@pytest.mark.parametrize("norms", ["frozen", "live"])
@pytest.mark.parametrize("kind", [Convolutions, Uneven])
def test_qat_without_rounding_matches_original(monkeypatch, kind, norms):
    """Without rounding, outputs and gradients equal those of the original."""
    monkeypatch.setattr(fake_quantization, "_FakeQuantize", Unrounded)
    monkeypatch.setattr(fake_quantization, "_FakeQuantizeBias", Unrounded)
    module = compile_net(kind, batch_norm=norms, bias_correction="off").train()
    original, x = build_net(kind), make_batches(kind, 1)[0]
    assert bool(module.clika_state.quantized.plan.smoothing) is (kind is Uneven)
    original.train(norms == "live")
    for model in (module, original):
        model(x).square().sum().backward()
    assert sqnr_in_decibels(original(x), module(x)) > 60
    for name, parameter in original.named_parameters():
        found = module.get_parameter(name).grad
        assert sqnr_in_decibels(parameter.grad, found) > 40 or max(parameter.grad.norm(), found.norm()) < 1e-3, (
            name
        )  # at kinks


def test_qat_scales_follow_live_norm(tmp_path):
    """Scales follow changed statistics of a live batch norm, also after loading."""
    module = compile_net(batch_norm="live").train()
    loaded = load_copy(module)
    for twin in (module, loaded):
        before = read_int8_weights(twin.eval().clika_export(tmp_path / "before.onnx"))
        with torch.no_grad():
            twin.get_buffer("stem.1.running_var").mul_(0.04)
            twin.get_parameter("wide.1.weight").mul_(3)
        after = read_int8_weights(twin.eval().clika_export(tmp_path / "after.onnx"))
        assert before.keys() == after.keys()
        assert all((before[name].astype("int") - after[name]).__abs__().max() <= 1 for name in before), "cut off"
        assert twin.train().clika_state.options.batch_norm == "live"


def read_int8_weights(artifact):
    found = onnx.load(artifact.path).graph.initializer
    return {i.name: numpy_helper.to_array(i) for i in found if i.data_type == onnx.TensorProto.INT8 and len(i.dims) > 1}


def test_batch_norm_option_invalid_raises():
    """An invalid option for batch norm raises an error."""
    with pytest.raises(ModelError, match=r"option 'batch_norm' is 'thawed'. Choose one of 'frozen', 'live'"):
        compile_net(batch_norm="thawed")


# In whose loops it fits


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by dynamo itself
@pytest.mark.parametrize("norms", ["frozen", "live"])
@pytest.mark.parametrize("kind", [Convolutions, Tokens])
def test_torch_compile_quantized_single_graph_in_both_modes(kind, norms):
    """`torch.compile` traces the module as one graph, in both modes."""
    torch._dynamo.reset()  # which counts how often it compiled a function for any module
    module, x = compile_net(kind, batch_norm=norms), make_batches(kind, 1)[0]
    for training in (True, False):
        module.train(training)
        expected = copy.deepcopy(module)(x)
        found = torch.compile(module, fullgraph=True, backend="aot_eager")(x)
        assert torch.allclose(found, expected, atol=1e-5)
        if training:
            found.sum().backward()
            assert all(p.grad is not None for p in module.parameters())


def test_qat_autocast_close_to_float32_and_trains(case):
    """Under autocast, outputs stay close to float32, and all gradients are finite."""
    kind, module = case
    twin, x = copy.deepcopy(module).train(), make_batches(kind, 1)[0]
    expected = twin(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = twin(x)
    assert sqnr_in_decibels(expected, found.float()) > 20
    found.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype and p.grad.isfinite().all() for p in twin.parameters())


def test_qat_accumulated_gradients_match_whole_batch(case):
    """Accumulated gradients equal those of the whole batch."""
    kind, module = case
    (x,) = make_batches(kind, 1)
    whole, parts = (copy.deepcopy(module).train() for _ in range(2))
    whole(x).square().sum().backward()
    for part in x.chunk(2):
        parts(part).square().sum().backward()
    for (name, one), other in zip(whole.named_parameters(), parts.parameters(), strict=True):
        assert sqnr_in_decibels(one.grad, other.grad) > 60, name


def test_qat_optimizers_and_schedulers_train_scales():
    """Optimizers, schedulers and gradient clipping train the scales."""
    module, x = compile_net().train(), make_batches(Convolutions, 1)[0]
    optimizer = torch.optim.AdamW(module.parameters(), lr=5e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    losses = []
    for _ in range(4):
        optimizer.zero_grad(set_to_none=True)
        loss = module(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    assert losses == sorted(losses, reverse=True)
    assert all(0 < float(p.detach().abs().max()) < 0.02 for p in list_log_scales(module).values()), (
        "a share of what was planned"
    )


# What goes wrong


@pytest.mark.parametrize(("number", "found"), [(float("nan"), "nan"), (float("inf"), "inf"), (-200.0, "0.0")])
def test_qat_diverged_scales_named_by_eval_and_export(number, found, tmp_path):
    """Diverged scales are named by `eval` and by an export."""
    module = compile_net().train()
    with torch.no_grad():
        module.get_parameter("clika.log_scales.relu").fill_(number)
        module.get_parameter("clika.log_weight_scales.conv2d")[1] = number
    said = (
        rf"the scale of the activation 'relu' is {found}, that of the weight of 'conv2d' is {found}: training has "
        r"diverged. Load an earlier state dict, and train with a smaller learning rate."
    )
    with pytest.raises(ModelError, match=said):
        module.clika_export(tmp_path / "spoiled.onnx")
    with pytest.raises(ModelError, match=said):
        module.eval()
    assert not (tmp_path / "spoiled.onnx").exists()


def test_qat_nan_weights_named_by_eval():
    """Weights with NaN are named by `eval`."""
    module = compile_net().train()
    with torch.no_grad():
        module.get_parameter("last.weight")[0] = float("nan")
    with pytest.raises(ModelError, match=r"NaN in 'last.weight'. Fix these weights"):
        module.eval()


def test_qat_untraceable_parameter_named(monkeypatch):
    """A parameter that a pass does not trace is named, unless it is frozen."""
    module = compile_net().eval()
    monkeypatch.setattr(fold_constants._Folding, "states", False)
    monkeypatch.setattr(fold_constants._Folding, "_data", lambda self, value: self.known[value])
    said = r"'scale', 'head.weight' would not be trained: a pass computes with it without a .*requires_grad_"
    with pytest.raises(ModelError, match=said):
        module.train()
    for name in ("head.weight", "scale"):
        module.get_parameter(name).requires_grad_(requires_grad=False)
    assert module.train().training


def test_qat_frozen_parameters_unchanged():
    """Frozen parameters stay unchanged."""
    module = compile_net()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("last" in name)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    train(module)
    changed = {name for name, p in module.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if "last" in name}
