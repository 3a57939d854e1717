"""Channels are removed from a module that trains, saves, exports and quantizes as before; orders that make no sense."""

import re

import pytest
import torch
from torch import nn

from clika_ref import (
    ClikaModule,
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


def test_half_of_the_channels_go_and_the_rest_trains_saves_exports_and_quantizes(made, tmp_path):
    module, inputs = made("Residual")
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
    again = ClikaModule()
    again.load_state_dict(module.state_dict())
    torch.testing.assert_close(again.eval()(inputs[1]), module.eval()(inputs[1]))
    assert module.clika_export(tmp_path / "after.onnx").facts["bytes"] < before
    target = DeploymentSettings_ONNXRuntime_ONNX()
    module.clika_initialize_algorithms(QuantizationSettings(), calibration_inputs=inputs, deployment_settings=target)
    module.clika_export(tmp_path / "integers.onnx")
    with pytest.raises(ModelError, match=r"the module is quantized.*prune first, and quantize then"):
        module.clika_prune(HALF, calibration_inputs=inputs)


def test_both_are_asked_for_at_once_and_data_that_is_not_given_is_missed_in_a_warning(made, tmp_path):
    torch.manual_seed(0)
    data = [torch.randn(8, 3, 8, 8)]
    module, _ = made(
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
    other, _ = made("Residual", pruning_settings=HALF, logs_dir=tmp_path / "other")
    (log,) = (tmp_path / "other").glob("*.log")
    assert "weighed on an input that the module was traced with" in log.read_text()
    assert other.inner.weight.shape == (6, 4, 3, 3)


def test_a_threshold_lets_go_what_the_outputs_do_not_miss(made):
    module, inputs = made("Residual")
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
def test_a_key_that_names_nothing_to_prune_is_refused(made, key, settings, message):
    module, inputs = made("Residual")
    if message is None:
        module.clika_prune(HALF, layer_pruning_settings={key: settings}, calibration_inputs=inputs)
        assert module.stem.weight.shape[0] == 8
        assert (module.stem.weight == 0).any()
        return
    with pytest.raises(ModelError, match=message):
        module.clika_prune(HALF, layer_pruning_settings={key: settings}, calibration_inputs=inputs)


def test_a_layer_whose_partner_keeps_its_channels_is_refused_by_name(made):
    module, inputs = made("Residual")
    layers = {"outer": LayerPruningSettings(sparsity=0.5), "stem": LayerPruningSettings(skip_pruning=True)}
    with pytest.raises(
        ModelError, match="'outer': its output is pruned together with that of 'conv2d' in stem, which has skip_pru"
    ):
        module.clika_prune(HALF, layer_pruning_settings=layers, calibration_inputs=inputs)


def test_a_skipped_layer_keeps_what_it_returns_and_loses_what_it_read(made):
    module, inputs = made("Residual")
    weight = module.outer.weight.detach().clone()
    layers = {"outer": LayerPruningSettings(skip_pruning=True)}
    found = module.clika_prune(HALF, layer_pruning_settings=layers, calibration_inputs=inputs)
    assert module.outer.weight.shape == (8, 6, 3, 3)
    assert all(any(torch.equal(kept, own) for own in weight.unbind(1)) for kept in module.outer.weight.unbind(1))
    (outer,) = [layer for layer in found.layers if layer.scope == "outer"]
    assert outer.bytes_saved == 8 * 6 * 9 * 4
    assert outer.decision == "skip_pruning of 'outer'"


def test_the_table_tells_all_that_went_of_a_layer_whose_channels_are_in_two_groups():
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


def test_nodes_are_run_on_the_smallest_batch_that_guards_let_pass(made, monkeypatch):
    seen = []

    def noted(graph, sizes):
        seen.append(sizes)
        return dependencies(graph, sizes)

    class Guarded(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.head = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.head(self.wide(x)) if x.shape[0] > 4 else x

    dependencies = stages.build_dependency_graph
    monkeypatch.setattr(stages, "build_dependency_graph", noted)
    module, _ = made("Residual")
    module.clika_prune(HALF, calibration_inputs=[torch.randn(40, 3, 8, 8)])
    module = clika_compile(Guarded().eval(), tracing_inputs=[torch.randn(n, 4) for n in (6, 7)])
    module.clika_prune(HALF, calibration_inputs=[torch.randn(40, 4)])
    assert [sizes["batch"] for sizes in seen] == [2, 5]
    assert module.wide.weight.shape == (4, 4)


@pytest.mark.parametrize(
    ("places", "fixed", "count", "kept"),
    [(1, 0, 20, 8), (1, 3, 20, 5), (2, 4, 20, 2), (8, 3, 4, 1), (1, 0, 6, 1), (1, 3, 4, 1), (1, 3, 8, 5)],
)
def test_what_stays_is_a_multiple_of_eight_channels_with_those_that_are_fixed(places, fixed, count, kept):
    group = UnitGroup(places, fixed, list(range(count)))
    harmless = UnitEffects(torch.zeros(1, count, dtype=torch.float64), {i: i for i in range(count)})
    assert count - len(choose_removal(group, PruningChoice("structured", 0.0, None), harmless).units) == kept


def test_weights_whose_channels_lie_last_stay_so(made):
    module, inputs = made("Residual")
    module.to(memory_format=torch.channels_last)
    module.clika_prune(HALF, calibration_inputs=inputs)
    assert module.outer.weight.is_contiguous(memory_format=torch.channels_last)
    assert not module.outer.weight.is_contiguous()
    assert module.head.weight.is_contiguous()


def test_harmless_channels_too_few_for_whole_lanes_stay_and_the_table_says_so():
    group = UnitGroup(1, 0, list(range(16)))
    effects = UnitEffects(torch.tensor([[0.0] * 6 + [1.0] * 10], dtype=torch.float64), {i: i for i in range(16)})
    found = choose_removal(group, PruningChoice("structured", 0.1, None), effects)
    assert not found.units
    assert found.reason == "only 6 of 16 channels can be removed, too few to keep a multiple of 8 channels"


@pytest.mark.parametrize("settings", [HALF, PruningSettings("2:4", 1e9)])
def test_what_is_pruned_in_inference_mode_trains_afterwards(made, settings):
    module, inputs = made("Residual")
    with torch.inference_mode():
        module.clika_prune(settings, calibration_inputs=[torch.randn(4, 3, 8, 8)])
    module.train()(inputs[0]).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


class Joined(nn.Module):
    """Two branches that are joined and divided into heads each of which is a whole branch."""

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
def test_heads_of_which_one_is_all_that_a_layer_returns_stay_and_channels_within_them_go(settings):
    torch.manual_seed(0)
    data = [torch.randn(16, 3, 6, 6)]
    module = clika_compile(Joined().eval(), calibration_inputs=data)
    module.clika_prune(settings, calibration_inputs=data)
    assert module.first.weight.shape == module.second.weight.shape == (8, 3, 1, 1)


def test_channels_without_which_a_node_computes_something_else_stay_and_the_table_names_it():
    torch.manual_seed(0)
    data = [torch.randn(16, 3, 6, 6)]
    module = clika_compile(Stepped().eval(), calibration_inputs=data)
    before = module(data[0])
    found = module.clika_prune(PruningSettings("structured", None, 0.3), calibration_inputs=data)
    assert re.search("%slice.* computes a different result without the removed ones", found.layers[0].decision)
    assert torch.equal(module(data[0]), before)
