"""Live batch norms that average the statistics of all batches (``momentum=None``), and count batches, as in eager."""

import copy

import pytest
import torch
from calibrated_nets import sqnr_in_decibels
from clika_ref_onnxruntime.target import OnnxRuntime
from loaded_copies import load_copy
from seeded_tensors import draw_batches
from torch import nn

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile

HERE = DeploymentSettings_ONNXRuntime_ONNX()
ALL = QuantizationSettings(quantization_sensitivity_threshold=1e9)
BATCHES = draw_batches(8, 8, 3, 10, 10, seed=0)


class AveragingNorms(nn.Module):
    """Norms after a convolution, before one, called twice, with constant statistics, and without statistics."""

    def __init__(self):
        super().__init__()
        self.stem, self.folded = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=None)
        self.before, self.middle = nn.BatchNorm2d(8, momentum=None), nn.Conv2d(8, 8, 3)
        self.twice = nn.BatchNorm2d(8, momentum=None)
        self.constant = nn.BatchNorm2d(8, momentum=0.0)
        self.untracked = nn.BatchNorm2d(8, momentum=None, track_running_stats=False)
        self.usual, self.head = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = self.before(torch.relu(self.folded(self.stem(x))))
        x = self.twice(torch.relu(self.twice(torch.relu(self.middle(x)))))
        return self.head(torch.relu(self.untracked(self.usual(torch.relu(self.constant(x))))))


def build_net():
    """Return a net whose norms have seen two batches, so that calibration sees normalized activations."""
    torch.manual_seed(0)
    model = AveragingNorms().train()
    for x in BATCHES[6:]:
        model(x)
    return model.eval()


def compile_net(settings=None, **options):
    return clika_compile(
        build_net(),
        tracing_inputs=BATCHES[:1],
        calibration_inputs=BATCHES[:4],
        deployment_settings=HERE,
        quantization_settings=settings,
        **options,
    )


def train(model, steps=5):
    optimizer = torch.optim.SGD(model.train().parameters(), lr=1e-3)
    for x in BATCHES[:steps]:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model


def list_statistics(model):
    return {name: b for name, b in model.named_buffers() if "running" in name}


def list_counts(model):
    return {name: int(b) for name, b in model.named_buffers() if "num_batches" in name}


def test_live_averaging_norms_of_float_module_match_eager(tmp_path):
    """Steps, averages and counts of a float module, of its copies and of its artifact equal those of eager."""
    original = train(build_net())
    module = compile_net(batch_norm="live")
    for twin in (load_copy(module), copy.deepcopy(module), module):
        train(twin)
        for name, wanted in original.named_buffers():
            torch.testing.assert_close(twin.get_buffer(name), wanted)
        for name, parameter in original.named_parameters():
            torch.testing.assert_close(twin.get_parameter(name), parameter, atol=1e-5, rtol=1e-4)
    assert set(list_counts(module).values()) == {7, 14}, "one norm is called twice"
    wanted = original.eval()(BATCHES[5])
    torch.testing.assert_close(module.eval()(BATCHES[5]), wanted, atol=1e-4, rtol=1e-4)
    (exported,) = OnnxRuntime().load(module.clika_export(tmp_path / "float.onnx"))([BATCHES[5]])
    torch.testing.assert_close(exported, wanted, atol=1e-4, rtol=1e-4)


def test_live_averaging_norms_of_quantized_module_match_eager(tmp_path):
    """Averages of a quantized module equal those of eager up to rounding; the artifact uses them."""
    original, module = train(build_net()), train(compile_net(ALL, batch_norm="live"))
    assert list_counts(original) == list_counts(module)
    found = list_statistics(module)
    for name, wanted in list_statistics(original).items():
        assert sqnr_in_decibels(wanted, found[name]) > 30, name
    assert torch.equal(found["constant.running_mean"], torch.zeros(8))
    integers = module.eval()(BATCHES[5])
    assert sqnr_in_decibels(original.eval()(BATCHES[5]), integers) > 20
    (exported,) = OnnxRuntime().load(module.clika_export(tmp_path / "int8.onnx"))([BATCHES[5]])
    assert sqnr_in_decibels(integers, exported) > 30


@pytest.mark.parametrize("settings", [None, ALL], ids=["float", "int8"])
def test_live_averaging_norm_is_mean_of_batches(settings):
    """The statistics after three batches are the means of those of each batch alone."""
    module = compile_net(settings, batch_norm="live").train()
    module.get_buffer("folded.num_batches_tracked").zero_()
    alone = [copy.deepcopy(module) for _ in range(3)]
    for twin, x in zip(alone, BATCHES, strict=False):
        twin(x)
        module(x)
    for name in ("running_mean", "running_var"):
        of_each = [twin.get_buffer(f"folded.{name}") for twin in alone]
        assert not torch.allclose(of_each[0], of_each[2])
        torch.testing.assert_close(module.get_buffer(f"folded.{name}"), sum(of_each) / 3)


@pytest.mark.parametrize("settings", [None, ALL], ids=["float", "int8"])
def test_frozen_averaging_norms_keep_statistics_and_counts(settings):
    """Frozen norms keep statistics and counts; live again, averages go on from there."""
    module = train(compile_net(settings, batch_norm="live"), 2)
    before = {name: b.clone() for name, b in module.named_buffers()}
    module.clika_set_batch_norm("frozen")
    train(module, 1)
    assert all(torch.equal(b, before[name]) for name, b in module.named_buffers())
    module.clika_set_batch_norm("live")
    module.train()(BATCHES[2])
    assert list_counts(module)["folded.num_batches_tracked"] == 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by dynamo itself
def test_torch_compile_live_averaging_norms_single_graph():
    """`torch.compile` traces a module that averages as one graph, with the same statistics."""
    torch._dynamo.reset()  # which counts how often it compiled a function for any module
    module = compile_net(ALL, batch_norm="live").train()
    twin = copy.deepcopy(module)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for x in BATCHES[:2]:
        torch.testing.assert_close(compiled(x), module(x), atol=1e-5, rtol=1e-4)
    for name, wanted in module.named_buffers():
        torch.testing.assert_close(twin.get_buffer(name), wanted)
