"""The device of a module: a GPU if there is one, otherwise the CPU; and an emulated device.

The emulated one rejects operators that mix its tensors with those of the CPU, as a GPU does:
see ``emulated_device.py``.
"""

import copy
import os
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
import torch.distributed as dist
from adapted_nets import INT4, make_lora_settings
from calibrated_nets import HERE, sqnr_in_decibels
from onnx_sessions import open_session
from saved_nets import ALL, Convolutions, Tokens, build_net, make_batches
from torch import nn

from clika_ref import (
    ClikaCompileOptions,
    ClikaModule,
    DeploymentSettings_TensorRT_ONNX,
    DistributedTrainingSettings,
    PruningSettings,
    clika_compile,
    clika_distribute,
    clika_move_to_device,
)

DEVICE = torch.device(os.environ.get("CLIKA_REF_TEST_DEVICE") or ("cuda:0" if torch.cuda.is_available() else "cpu"))
IS_EMULATED = DEVICE.type == "emulated"


@pytest.fixture(scope="module")
def device():
    """Return the device, with float32 convolutions in float32: cuDNN rounds their operands otherwise."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield DEVICE
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.slow
@pytest.mark.skipif(IS_EMULATED, reason="this is the emulated device")
@pytest.mark.skipif(shutil.which("c++") is None, reason="an emulated device is compiled, and there is no c++")
def test_device_tests_pass_on_emulated_device(tmp_path):
    """All tests of this file pass on an emulated device."""
    tests = Path(__file__).parents[1]
    options = ["-p", "emulated_device", "-p", "no:cacheprovider", "-n", "0"]
    options += ["-W", "ignore::UserWarning"]  # by PyTorch, of kernels of the CPU in place of others
    command = [sys.executable, "-m", "pytest", "-q", *options, __file__]
    paths = os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")])
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # ninja is next to python
    env = {**os.environ, "CLIKA_REF_TEST_DEVICE": "emulated:0", "PYTHONPATH": paths, "PATH": programs}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=tests.parent)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def make_data(device, kind=Convolutions):
    return [x.to(device) for x in (*make_batches(kind), *make_batches(kind, 1, 4))]


def quantize(device, kind=Convolutions, settings=ALL, **options):
    how = {
        "quantization_settings": settings,
        "deployment_settings": HERE,
        "calibration_inputs": make_data(device, kind),
    }
    return clika_compile(build_net(kind).to(device), **{**how, **options})


def list_devices(module):
    return {t.device for t in [*module.parameters(), *module.buffers()]}


class Maker(nn.Module):
    """Makes tensors of its own, on the device that it finds itself on."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.register_buffer("steps", torch.arange(16.0))

    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device)
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf"), device=x.device).triu(1)
        y = x + self.table(places) * self.steps[: x.shape[1], None]
        noise = torch.zeros_like(y).masked_fill(y > 2, 0.5)
        return nn.functional.scaled_dot_product_attention(y, y, y + noise, attn_mask=mask)


@pytest.mark.parametrize("moved", [False, True], ids=["traced there", "moved there"])
def test_forward_on_device_matches_original(device, moved):
    """A module that is traced on the device, or moved there, matches the original."""
    original = Maker().eval()
    data = [torch.randn(2, n, 8) for n in (5, 9)]
    if not moved:
        original, data = original.to(device), clika_move_to_device(data, device)
    module = clika_compile(copy.deepcopy(original), tracing_inputs=data).to(device)
    x = torch.randn(2, 7, 8, device=device)
    found = module(x)
    assert found.device == device
    torch.testing.assert_close(found, original.to(device)(x))
    assert list_devices(module) == {device}


@pytest.mark.parametrize("kind", [Convolutions, Tokens])
def test_quantize_on_device_matches_cpu(device, kind):
    """Quantization on the device makes the same decisions as on the CPU."""
    there, here = quantize(device, kind), quantize("cpu", kind)
    plans = [m.clika_state.quantized.plan for m in (there, here)]
    assert plans[0].activations.keys() == plans[1].activations.keys()
    assert plans[0].floats == plans[1].floats
    for name, scale in plans[1].weights.items():
        torch.testing.assert_close(plans[0].weights[name].cpu(), scale, rtol=1e-3, atol=0)
    x = make_batches(kind, 1)[0]
    assert sqnr_in_decibels(here(x).detach(), there(x.to(device)).detach().cpu()) > 35


@pytest.mark.parametrize("kind", [Convolutions, Tokens])
def test_quantized_module_moves_to_device_and_back(device, kind):
    """A quantized module moves to the device and back."""
    module, x = quantize("cpu", kind), make_batches(kind, 1)[0]
    here = module(x).detach()
    there = module.to(device)(x.to(device)).detach()
    assert there.device == device
    assert list_devices(module) == {device}
    assert sqnr_in_decibels(here, there.cpu()) > 35  # a few elements round to the adjacent step
    torch.testing.assert_close(module.cpu()(x).detach(), here, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [Convolutions, Tokens])
def test_clika_export_on_device_matches_module(device, kind, tmp_path):
    """An export on the device matches the module."""
    module, x = quantize(device, kind), make_batches(kind, 1)[0]
    path = tmp_path / "module.onnx"
    module.clika_export(path)
    session = open_session(path)
    (name,) = [i.name for i in session.get_inputs()]
    (found,) = session.run(None, {name: x.numpy()})
    assert sqnr_in_decibels(module(x.to(device)).detach().cpu(), torch.from_numpy(found)) > 35


def test_moved_module_exports_explains_and_draws(device, tmp_path):
    """A module that was moved to the device is exported, explained, reported and drawn."""
    module, x = quantize("cpu", batch_norm="live"), make_batches(Convolutions, 1)[0]
    here = module(x).detach()
    module.to(device).clika_export(tmp_path / "module.onnx")
    (found,) = onnxruntime.InferenceSession(tmp_path / "module.onnx").run(None, {"x": x.numpy()})
    assert sqnr_in_decibels(here, torch.from_numpy(found)) > 35
    assert module(**module.clika_generate_dummy_inputs()).device == device
    assert module.clika_explain().share() > 0.5
    assert module.clika_report(tmp_path / "report.html").stat().st_size > 10_000
    assert module.clika_visualize(tmp_path / "picture.svg").stat().st_size > 1000


@pytest.mark.parametrize("norms", ["frozen", "live"])
@pytest.mark.parametrize("kind", [Convolutions, Tokens])
def test_train_on_device_reduces_loss(device, kind, norms):
    """Training on the device reduces the loss, with frozen and live batch norm."""
    module, original = quantize(device, kind, batch_norm=norms), build_net(kind).to(device)
    x = make_batches(kind, 1)[0].to(device)
    wanted = original(x).detach() * 1.1
    module.train()
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (module(x) - wanted).square().mean()
        loss.backward()
        assert all(p.grad is None or p.grad.device == device for p in module.parameters())
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    trained = module(x).detach() if norms == "frozen" else None
    module.eval()
    if trained is not None:
        assert sqnr_in_decibels(trained, module(x)) > 35


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_train_under_autocast_accepts_scaled_gradients(device, dtype):
    """Training under autocast accepts scaled gradients."""
    module, x = quantize(device).train(), make_batches(Convolutions, 1)[0].to(device)
    scaler = torch.amp.GradScaler(device.type)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    for _ in range(2):
        with torch.autocast(device.type, dtype):
            loss = module(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert torch.isfinite(loss)
    assert any(not torch.equal(p, before[n]) for n, p in module.named_parameters())


def test_bfloat16_model_on_device_matches_original(device):
    """A BF16 model on the device matches the original."""
    original = build_net(Convolutions).to(device, torch.bfloat16)
    data = [x.bfloat16() for x in make_data(device)]
    module = clika_compile(copy.deepcopy(original), tracing_inputs=data)
    assert sqnr_in_decibels(original(data[0]).detach().float(), module(data[0]).detach().float()) > 30


def test_clika_save_on_device_loads_on_cpu(device, tmp_path):
    """A module that was saved on the device loads on the CPU and moves back."""
    module, x = quantize(device), make_batches(Convolutions, 1)[0]
    module.clika_save(tmp_path / "saved.clika")
    loaded = ClikaModule.clika_load(tmp_path / "saved.clika")
    assert list_devices(loaded) == {torch.device("cpu")}
    here = loaded(x).detach()
    assert sqnr_in_decibels(here, module(x.to(device)).detach().cpu()) > 35
    torch.testing.assert_close(loaded.to(device)(x.to(device)), module(x.to(device)), rtol=1e-5, atol=1e-6)
    again = ClikaModule().to(device)
    again.load_state_dict(module.state_dict())
    torch.testing.assert_close(again.to(device)(x.to(device)), module(x.to(device)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", [ALL, INT4], ids=["int8", "int4"])
def test_adapters_on_device_train_and_export(device, settings, tmp_path):
    """Adapters train on the device and are exported."""
    options = ClikaCompileOptions(global_lora_settings=make_lora_settings())
    data = make_data(device, Tokens)[:-1]
    module = quantize(device, Tokens, settings, clika_compile_options=options, calibration_inputs=data).train()
    x = make_batches(Tokens, 1)[0].to(device)
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    module.eval().clika_export(tmp_path / "adapted.onnx")
    assert module.clika_lora_state_dict()


@pytest.mark.parametrize("mask", ["structured", "unstructured", "2:4"])
def test_pruned_module_on_device_trains_and_quantizes(device, mask):
    """A module that was pruned on the device trains and is quantized."""
    pruning = PruningSettings(mask, 1e9) if mask == "2:4" else PruningSettings(mask, None, 0.5)
    module = clika_compile(
        build_net(Convolutions).to(device), calibration_inputs=make_data(device), pruning_settings=pruning
    )
    assert list_devices(module) == {device}
    x = make_batches(Convolutions, 1)[0].to(device)
    assert torch.isfinite(module(x)).all()
    module.train()(x).square().mean().backward()
    pruned = module.eval()(x).detach()
    module.clika_initialize_algorithms(ALL, deployment_settings=HERE)
    assert sqnr_in_decibels(pruned, module(x)) > 15


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # by dynamo and inductor of their own calls
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_torch_compile_on_device_single_graph(device, mode):
    """`torch.compile` traces the module on the device as one graph, in both modes."""
    module = quantize(device).train(mode == "train")
    x = make_batches(Convolutions, 1)[0].to(device)
    torch._dynamo.reset()  # which counts how often it compiled a function for any module
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    wanted, found = module(x), torch.compile(module, fullgraph=True, backend=backend)(x)
    assert sqnr_in_decibels(wanted.detach(), found) > 35
    if mode == "train":
        found.square().mean().backward()
        assert all(p.grad is not None for p in module.parameters() if p.requires_grad)


@pytest.mark.parametrize("moved", [False, True], ids=["traced there", "moved there"])
def test_clika_export_other_target_with_device_inputs(device, moved, tmp_path):
    """A module on the device is quantized for another target with its kept inputs."""
    module = quantize("cpu" if moved else device).to(device)
    module.clika_export(tmp_path / "other.onnx", deployment_settings=DeploymentSettings_TensorRT_ONNX())
    quantizers = [n for n in onnx.load(tmp_path / "other.onnx").graph.node if n.op_type == "QuantizeLinear"]
    assert len(quantizers) >= 4


@pytest.mark.slow
@pytest.mark.skipif(IS_EMULATED, reason="no backend of torch.distributed knows the emulated device")
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "divided"])
def test_clika_distribute_single_process_on_device_trains(device, sharded, tmp_path):
    """DDP and FSDP with one process train on the device."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
    try:
        together = DistributedTrainingSettings(multi_gpu=True, use_sharding=sharded)
        module = quantize(device, distributed_training_settings=together)
        alone = quantize(device)
        spread = clika_distribute(module.train(), together)
        x = make_batches(Convolutions, 1)[0].to(device)
        wanted = alone.train()(x).square().mean()
        loss = spread(x).square().mean()
        torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-6)
        loss.backward()
        torch.optim.SGD(spread.parameters(), lr=1e-3).step()
        assert torch.isfinite(spread(x)).all()
    finally:
        dist.destroy_process_group()
