"""The protocols of ``nn.Module`` and of the tools around it, for a module in float, quantized, and in training."""

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from convolution_nets import ConvNormHead
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from clika_ref import (
    ClikaModule,
    DeploymentSettings_ONNXRuntime_ONNX,
    LoraSettings,
    QuantizationSettings,
    clika_compile,
)
from clika_ref.compiled.state import CompiledModule, CompiledState, require_simulation
from clika_ref.core.errors import ModelError

FORMS = ["float", "quantized", "training", "adapted"]


def compile_form(form):
    torch.manual_seed(0)
    data = [torch.randn(n, 3, 8, 8) for n in (4, 4, 3)]
    target = DeploymentSettings_ONNXRuntime_ONNX()
    settings = QuantizationSettings(automatic_skip_quantization=False) if form in {"quantized", "training"} else None
    given = {"calibration_inputs": data, "quantization_settings": settings, "deployment_settings": target}
    module = clika_compile(ConvNormHead(4).eval(), tracing_inputs=data[1:], **(given if settings else {}))
    if form == "adapted":
        module.clika_attach_lora(LoraSettings(rank=2))
    return module.train(form in {"training", "adapted"})


@pytest.fixture(params=FORMS)
def module(request):
    return compile_form(request.param)


@pytest.fixture
def x():
    return torch.randn(4, 3, 8, 8)


def perturb_weights(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return module.train(module.training)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])  # noqa: S301
def test_copy_is_equal_and_independent(module, x, clone):
    """A deep copy or pickle computes the same, and shares neither weights nor state with the module."""
    expected = module(x)
    twin = clone(module)
    assert twin.training is module.training
    assert torch.equal(twin(x), expected)
    perturb_weights(twin)
    assert not torch.equal(twin(x), expected)
    assert torch.equal(module(x), expected)
    assert twin.clika_state is not module.clika_state


def test_shallow_copy_shares_state_and_computes_equally(module, x):
    """``copy.copy`` shares the weights, as it does for any ``nn.Module``."""
    twin = copy.copy(module)
    assert torch.equal(twin(x), module(x))
    assert twin.get_parameter("head.weight") is module.get_parameter("head.weight")


def test_state_dict_round_trip_keeps_outputs(module, x):
    """A state dict rebuilds an empty module, and loads into a module of the same graph."""
    expected, saved = module(x).detach(), io.BytesIO()
    torch.save(module.state_dict(), saved)
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    empty = ClikaModule()
    assert not any(empty.load_state_dict(state))
    assert torch.equal(empty.train(module.training)(x), expected)
    twin = perturb_weights(copy.deepcopy(module))
    twin.load_state_dict(state)
    assert torch.equal(twin.train(module.training)(x), expected)
    assert list(empty.state_dict()) == list(state)


def replicate(module, scale=2.0):
    """Return a replica with weights of its own, made as ``torch.nn.parallel.replicate`` makes one for a device."""
    replica = module._replicate_for_data_parallel()
    replica._former_parameters = {}
    for name, child in module._modules.items():
        replica._modules[name] = replicate(child, 1.0 if name == "clika" else scale)
    for name, parameter in module._parameters.items():
        tensor = scale * parameter.detach()
        setattr(replica, name, tensor)
        replica._former_parameters[name] = tensor
    for name, buffer in module._buffers.items():
        replica._buffers[name] = buffer.clone()
    return replica


@pytest.mark.parametrize("form", ["float", "quantized", "training"])
def test_data_parallel_replicas_use_their_own_weights(form, x):
    """Replicas in several threads share the state of the module, and compute with their own weights."""
    module = compile_form(form)
    doubled = copy.deepcopy(module)
    with torch.no_grad():
        for name, parameter in doubled.named_parameters():
            if not name.startswith("clika."):
                parameter.mul_(2.0)
    expected = [module(x), doubled.train(module.training)(x)]
    assert not torch.allclose(*expected)
    for _ in range(5):  # as each step of DataParallel
        with ThreadPoolExecutor(2) as threads:
            found = threads.map(lambda replica: replica(x), [replicate(module, 1.0), replicate(module)])
        for output, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(output, wanted, atol=1e-5, rtol=1e-5)


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("form", ["training", "adapted"])
def test_ddp_trains_module(form, x, process_group):
    """``DistributedDataParallel`` averages the gradients of all trainable parameters."""
    module = compile_form(form)
    alone = copy.deepcopy(module)
    trained = DistributedDataParallel(module, find_unused_parameters=True)
    torch.manual_seed(0)  # dropout of the adapters
    trained(x).square().sum().backward()
    torch.manual_seed(0)
    alone(x).square().sum().backward()
    for (name, found), wanted in zip(module.named_parameters(), alone.parameters(), strict=True):
        assert (found.grad is None) is (wanted.grad is None), name
        if wanted.grad is not None:
            assert torch.allclose(found.grad, wanted.grad, atol=1e-6), name


def test_replaced_forward_is_called_and_restored(module, x):
    """A ``forward`` that accelerate replaces on the instance is called; without it the graph's own is."""
    original, calls = module.forward, []

    def call_and_record(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    expected = module(x)
    module.forward = call_and_record
    assert torch.equal(module(x), expected)
    assert len(calls) == 1
    del module.forward
    module(x)
    assert len(calls) == 1


@pytest.mark.parametrize("form", ["float", "quantized"])
def test_torch_compile_computes_equally(form, x):
    """``torch.compile(module)`` traces the module in one graph."""
    module = compile_form(form)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(x), module(x), atol=1e-6)


def change_by_loading(module):
    changed = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    changed["head.weight"] *= 1.5
    module.load_state_dict(changed)


@torch.no_grad()
def change_in_place(module):
    module.get_parameter("head.weight").mul_(1.5)


def change_by_assignment(module):
    parameter = module.get_parameter("head.weight")
    module.head.weight = nn.Parameter(1.5 * parameter.detach())


@pytest.mark.parametrize("change", [change_by_loading, change_in_place, change_by_assignment])
def test_torch_compile_quantizes_changed_weights(change, x):
    """``torch.compile`` traces a quantized module with its current weights, without a call or ``.eval()`` between."""
    torch._dynamo.reset()
    module = compile_form("quantized").eval()
    before = module(x)
    change(module)
    found = torch.compile(module, backend="eager", fullgraph=True)(x)
    assert not torch.allclose(found, before, atol=1e-3)
    assert torch.allclose(found, copy.deepcopy(module)(x), atol=1e-6)


def test_torch_compile_traces_copy_that_was_not_called(x):
    """A copy has no quantized weights before its first call, which may be that of ``torch.compile``."""
    torch._dynamo.reset()
    module = compile_form("quantized")
    twin = copy.deepcopy(module)
    found = torch.compile(twin, backend="eager", fullgraph=True)(x)
    assert torch.allclose(found, module(x), atol=1e-6)


def test_torch_compile_compiled_module_follows_eval(x):
    """A compiled module is traced again after ``.eval()`` has quantized changed weights."""
    torch._dynamo.reset()
    module = compile_form("quantized")
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    before = compiled(x)
    change_in_place(module)
    assert torch.equal(compiled(x), before)  # a traced graph does not see writes
    module.eval()
    assert torch.allclose(compiled(x), module(x), atol=1e-6)
    assert not torch.allclose(compiled(x), before, atol=1e-3)


@pytest.mark.slow
@torch.no_grad()
def test_torch_compile_nan_weight_raises(x):
    """Weights that cannot be quantized are named under ``torch.compile`` too."""
    module = compile_form("quantized")
    module.get_parameter("head.weight").fill_(torch.nan)
    torch._dynamo.reset()
    with pytest.raises(ModelError, match=r"cannot quantize the weights: NaN in 'head\.weight'\. Fix"):
        torch.compile(module, backend="eager")(x)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"cannot quantize the weights: NaN in 'head\.weight'"):
        torch.compile(module, backend="eager", fullgraph=True)(x)


def test_torch_compile_without_quantized_weights_raises(x, monkeypatch):
    """A trace that reaches a simulation without quantized weights asks for ``.eval()``, and reads no weight."""
    state = copy.deepcopy(compile_form("quantized")).clika_state
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ModelError, match=r"cannot compile the quantized module .* Call \.eval\(\) first\."):
        require_simulation(state)(state.graph, lambda: pytest.fail("the weights were read"), [x])


def test_gather_keeps_registry():
    """A gathered module knows the same operators and targets as its original."""
    module = compile_form("float")
    module.clika_state.registry = replace(module.clika_state.registry, targets={})
    module.unshard = lambda: None  # as fully_shard adds; its weights are whole
    assert module.clika_gather().clika_state.registry is module.clika_state.registry


def test_class_has_no_base_with_behaviour():
    """The only base between `ClikaModule` and ``nn.Module`` declares the state, and nothing else."""
    assert ClikaModule.__mro__[1:3] == (CompiledModule, nn.Module)
    own = {name for name in vars(CompiledModule) if not name.startswith("__")}
    assert own <= {"clika_state"}
    assert "__getattr__" not in vars(ClikaModule)
    assert isinstance(ClikaModule().clika_state, CompiledState)
