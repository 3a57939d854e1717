"""A pruned module trains, saves, exports and quantizes as before; invalid orders of steps are rejected."""

import re

import pytest
import torch
from loaded_copies import load_copy
from torch import nn

from clika_ref import (
    DeploymentSettings_ONNXRuntime_ONNX,
    LayerPruningSettings,
    ModelError,
    PruningSettings,
    QuantizationSettings,
    clika_compile,
)
from clika_ref.pruning import stages
from clika_ref.pruning.groups import UnitGroup
from clika_ref.pruning.importance import UnitEffects
from clika_ref.pruning.layer_settings import PruningChoice
from clika_ref.pruning.unit_selection import choose_removal

HALF = PruningSettings("structured", None, 0.5)


def test_clika_prune_half_then_train_save_export_quantize(compile_model, tmp_path):
    """A module with half of its channels trains, saves, exports and quantizes; pruning later raises an error."""
    module, inputs = compile_model("Residual")
    before = module.clika_export(tmp_path / "before.onnx").facts["bytes"]
    found = module.clika_prune(HALF, calibration_inputs=inputs)
    assert module.inner.weight.shape == (6, 4, 3, 3)
    assert found.macs_after < 0.3 * found.macs_before
    assert "4 of 8 channels removed" in str(found)
    assert "the model returns" in str(found)
    optimizer = torch.optim.Adam(module.parameters(), 1e-2)
    module.train()
    module(inputs[0]).square().sum().backward()
    optimizer.step()
    again = load_copy(module)
    torch.testing.assert_close(again.eval()(inputs[1]), module.eval()(inputs[1]))
    assert module.clika_export(tmp_path / "after.onnx").facts["bytes"] < before
    target = DeploymentSettings_ONNXRuntime_ONNX()
    module.clika_initialize_algorithms(QuantizationSettings(), calibration_inputs=inputs, deployment_settings=target)
    module.clika_export(tmp_path / "integers.onnx")
    with pytest.raises(ModelError, match=r"the module is quantized.*Prune first, then quantize"):
        module.clika_prune(HALF, calibration_inputs=inputs)


def test_clika_compile_prunes_and_quantizes_warns_without_data(compile_model, tmp_path):
    """Compiling prunes and quantizes at once, and warns if calibration data is missing."""
    torch.manual_seed(0)
    data = [torch.randn(8, 3, 8, 8)]
    module, _ = compile_model(
        "Residual",
        calibration_inputs=data,
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
        quantization_settings=QuantizationSettings(),
        pruning_settings=HALF,
        logs_dir=tmp_path,
    )
    assert module.inner.weight.shape == (6, 4, 3, 3)
    (log,) = tmp_path.glob("*.log")
    assert "Global Pruning Settings" in log.read_text()
    other, _ = compile_model("Residual", pruning_settings=HALF, logs_dir=tmp_path / "other")
    (log,) = (tmp_path / "other").glob("*.log")
    assert "Pruning uses a tracing input to estimate its effect" in log.read_text()
    assert other.inner.weight.shape == (6, 4, 3, 3)


def test_clika_prune_threshold_removes_unused_channels(compile_model):
    """A threshold removes channels without an effect, up to a multiple of 8."""
    module, inputs = compile_model("Residual")
    with torch.no_grad():
        module.outer.weight[:, :5] = 0.0
    wanted = module(inputs[0])
    settings = {"inner": LayerPruningSettings(mask_type="structured", pruning_sensitivity_threshold=1e-9)}
    found = module.clika_prune(PruningSettings("1:1", 0), layer_pruning_settings=settings, calibration_inputs=inputs)
    assert module.inner.weight.shape[0] == 8  # of the 7 that count, with one more for whole lanes
    torch.testing.assert_close(module(inputs[0]), wanted)
    assert found.error < 1e-9


@pytest.mark.parametrize(
    ("key", "settings", "message"),
    [
        ("iner", LayerPruningSettings(sparsity=0.5), "'iner' is not a layer.*Near matches: 'inner'"),
        ("norm", LayerPruningSettings(sparsity=0.5), "'norm' is not a layer with weights to prune"),
        ("head", LayerPruningSettings(sparsity=0.5), "'head': no output channel.*the model returns"),
        ("stem", LayerPruningSettings(mask_type="1:1", sparsity=0.5), None),
    ],
)
def test_clika_prune_invalid_layer_key_raises(compile_model, key, settings, message):
    """A key of a layer that cannot be pruned raises an error; a mask type for one layer works."""
    module, inputs = compile_model("Residual")
    if message is None:
        module.clika_prune(HALF, layer_pruning_settings={key: settings}, calibration_inputs=inputs)
        assert module.stem.weight.shape[0] == 8
        assert (module.stem.weight == 0).any()
        return
    with pytest.raises(ModelError, match=message):
        module.clika_prune(HALF, layer_pruning_settings={key: settings}, calibration_inputs=inputs)


def test_clika_prune_coupled_layer_with_skip_raises(compile_model):
    """A layer that is coupled to a skipped one raises an error that names it."""
    module, inputs = compile_model("Residual")
    layers = {"outer": LayerPruningSettings(sparsity=0.5), "stem": LayerPruningSettings(skip_pruning=True)}
    with pytest.raises(
        ModelError, match="'outer': its output is pruned together with that of 'conv2d' in stem, which has skip_pru"
    ):
        module.clika_prune(HALF, layer_pruning_settings=layers, calibration_inputs=inputs)


def test_clika_prune_skipped_layer_loses_input_channels(compile_model):
    """A skipped layer keeps its output channels and loses input channels."""
    module, inputs = compile_model("Residual")
    weight = module.outer.weight.detach().clone()
    layers = {"outer": LayerPruningSettings(skip_pruning=True)}
    found = module.clika_prune(HALF, layer_pruning_settings=layers, calibration_inputs=inputs)
    assert module.outer.weight.shape == (8, 6, 3, 3)
    assert all(any(torch.equal(kept, own) for own in weight.unbind(1)) for kept in module.outer.weight.unbind(1))
    (outer,) = [layer for layer in found.layers if layer.scope == "outer"]
    assert outer.bytes_saved == 8 * 6 * 9 * 4
    assert outer.decision == "skip_pruning of 'outer'"


def test_pruning_report_sums_groups_of_one_layer():
    """The table combines the groups of a layer."""

    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.one, self.two = nn.Conv2d(3, 24, 1), nn.Conv2d(16, 4, 1), nn.Conv2d(8, 4, 1)

        def forward(self, x):
            a, b = self.wide(x).split([16, 8], 1)
            return self.one(a.relu()) + self.two(b.relu())

    data = [torch.randn(16, 3, 6, 6), torch.randn(20, 3, 6, 6)]
    module = clika_compile(Halves().eval(), calibration_inputs=data)
    found = module.clika_prune(PruningSettings("structured", None, 0.25), calibration_inputs=data)
    (wide,) = [layer for layer in found.layers if layer.scope == "wide"]
    assert wide.after == (18, 3, 1, 1)
    assert sorted(wide.decision.split("; ")) == ["2 of 8 channels removed", "4 of 16 channels removed"]
    assert "bytes saved" in str(found)
    assert wide.bytes_saved == 6 * 3 * 4


def test_clika_prune_traces_smallest_valid_batch(compile_model, monkeypatch):
    """Dependencies are traced with the smallest batch that the guards allow."""
    seen = []

    def record_sizes(graph, sizes):
        seen.append(sizes)
        return dependencies(graph, sizes)

    class Guarded(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.head = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.head(self.wide(x)) if x.shape[0] > 4 else x

    dependencies = stages.build_dependency_graph
    monkeypatch.setattr(stages, "build_dependency_graph", record_sizes)
    module, _ = compile_model("Residual")
    module.clika_prune(HALF, calibration_inputs=[torch.randn(40, 3, 8, 8)])
    module = clika_compile(Guarded().eval(), tracing_inputs=[torch.randn(n, 4) for n in (6, 7)])
    module.clika_prune(HALF, calibration_inputs=[torch.randn(40, 4)])
    assert [sizes["batch"] for sizes in seen] == [2, 5]
    assert module.wide.weight.shape == (4, 4)


@pytest.mark.parametrize(
    ("positions", "fixed", "count", "kept"),
    [(1, 0, 20, 8), (1, 3, 20, 5), (2, 4, 20, 2), (8, 3, 4, 1), (1, 0, 6, 1), (1, 3, 4, 1), (1, 3, 8, 5)],
)
def test_choose_removal_keeps_multiple_of_eight(positions, fixed, count, kept):
    """The kept channels are a multiple of eight, including the fixed ones."""
    group = UnitGroup(positions, fixed, list(range(count)))
    harmless = UnitEffects(torch.zeros(1, count, dtype=torch.float64), {i: i for i in range(count)})
    assert count - len(choose_removal(group, PruningChoice("structured", 0.0, None), harmless).units) == kept


def test_clika_prune_keeps_channels_last_layout(compile_model):
    """Weights in channels_last keep their memory format."""
    module, inputs = compile_model("Residual")
    module.to(memory_format=torch.channels_last)
    module.clika_prune(HALF, calibration_inputs=inputs)
    assert module.outer.weight.is_contiguous(memory_format=torch.channels_last)
    assert not module.outer.weight.is_contiguous()
    assert module.head.weight.is_contiguous()


def test_choose_removal_too_few_channels_reports_reason():
    """If too few channels are removable for a multiple of 8, none is removed, with the reason."""
    group = UnitGroup(1, 0, list(range(16)))
    effects = UnitEffects(torch.tensor([[0.0] * 6 + [1.0] * 10], dtype=torch.float64), {i: i for i in range(16)})
    found = choose_removal(group, PruningChoice("structured", 0.1, None), effects)
    assert not found.units
    assert found.reason == "only 6 of 16 channels can be removed, too few to keep a multiple of 8 channels"


@pytest.mark.parametrize("settings", [HALF, PruningSettings("2:4", 1e9)])
def test_clika_prune_in_inference_mode_trains_afterwards(compile_model, settings):
    """A module that is pruned in inference mode can be trained."""
    module, inputs = compile_model("Residual")
    with torch.inference_mode():
        module.clika_prune(settings, calibration_inputs=[torch.randn(4, 3, 8, 8)])
    module.train()(inputs[0]).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


class Joined(nn.Module):
    """Two branches that are concatenated and split into heads; each head is a whole branch."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 16, 1), nn.Conv2d(3, 16, 1), nn.Conv2d(32, 2, 1)

    def forward(self, x):
        x = torch.cat([self.first(x), self.second(x)], 1)
        return self.head(x.unflatten(1, (2, 16)).transpose(1, 2).flatten(1, 2))


class Stepped(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.head = nn.Conv2d(3, 32, 1), nn.Conv2d(16, 2, 1)

    def forward(self, x):
        return self.head(self.wide(x)[:, ::2])


@pytest.mark.parametrize("settings", [HALF, PruningSettings("structured", 0.5)])
def test_clika_prune_whole_layer_head_keeps_head(settings):
    """A head that is the whole output of a layer stays, and channels inside heads are removed."""
    torch.manual_seed(0)
    data = [torch.randn(16, 3, 6, 6)]
    module = clika_compile(Joined().eval(), calibration_inputs=data)
    module.clika_prune(settings, calibration_inputs=data)
    assert module.first.weight.shape == module.second.weight.shape == (8, 3, 1, 1)


def test_clika_prune_strided_slice_reports_reason():
    """Channels whose removal changes a node stay, and the table names the node."""
    torch.manual_seed(0)
    data = [torch.randn(16, 3, 6, 6)]
    module = clika_compile(Stepped().eval(), calibration_inputs=data)
    before = module(data[0])
    found = module.clika_prune(PruningSettings("structured", None, 0.3), calibration_inputs=data)
    assert re.search("%slice.* computes a different result without the removed ones", found.layers[0].decision)
    assert torch.equal(module(data[0]), before)
