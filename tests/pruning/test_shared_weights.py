"""Weights of several nodes: one mask for all layers, and no mask if another node reads them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clika_ref import LayerPruningSettings, ModelError, PruningSettings, clika_compile


class Twice(nn.Module):
    """A layer that is used twice; its first use is more important for the outputs."""

    def __init__(self, width=16):
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, 4)
        nn.init.eye_(self.shared.weight)
        self.shared.weight.data += 0.1 * torch.randn(width, width)

    def forward(self, x):
        x = self.shared(self.first(x))
        return self.last(x + 0.001 * self.shared(0.01 * x.relu() + 1))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.inner, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(self.inner(self.words(x)).relu())


class BothOrientations(nn.Module):
    """A convolution and a transposed one, which share a weight and have their inputs along different dims of it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4, 1, 1))

    def forward(self, x):
        return F.conv_transpose2d(F.conv2d(x, self.weight).relu(), self.weight)


def compile_model(model, data):
    torch.manual_seed(0)
    return clika_compile(model().eval(), calibration_inputs=data)


def test_clika_prune_shared_weight_gets_one_mask():
    """A weight that is used twice gets one mask, based on both uses."""
    torch.manual_seed(0)
    data = [torch.randn(32, 8), torch.randn(16, 8)]
    module = compile_model(Twice, data)
    before = module(data[0]).detach()
    others = {name: LayerPruningSettings(skip_pruning=True) for name in ("first", "last")}
    found = module.clika_prune(PruningSettings("1:1", 0.02), layer_pruning_settings=others, calibration_inputs=data)
    first, second = (layer for layer in found.layers if layer.scope == "shared")
    zeros = float((module.shared.weight == 0).float().mean())
    assert first.zeros == second.zeros == pytest.approx(zeros)
    assert first.sensitivity == second.sensitivity <= 0.02
    assert (
        float((module(data[0]).detach() - before).square().sum() / before.square().sum()) < 0.03
    )  # importance is a first-order estimate


def test_clika_prune_tied_embedding_not_masked():
    """An embedding that is tied to a layer is not masked, and naming the layer raises an error."""
    data = [torch.randint(0, 16, (4, 5)), torch.randint(0, 16, (3, 6))]
    module = compile_model(Tied, data)
    found = module.clika_prune(PruningSettings("2:4", 1e9), calibration_inputs=data)
    reasons = {layer.scope: layer.decision for layer in found.layers if not layer.is_pruned}
    assert reasons == {"head": "its weight is also read by 'embedding' in words, which a mask would change"}
    assert not (module.words.weight == 0).any()
    with pytest.raises(ModelError, match="'head': its weight is also read by 'embedding' in words"):
        module.clika_prune(
            PruningSettings("2:4", 1e9),
            layer_pruning_settings={"head": LayerPruningSettings(mask_type="1:4")},
            calibration_inputs=data,
        )


def test_clika_prune_shared_weight_settings_must_agree():
    """Uses of a weight with one skipped stay unmasked; contradicting mask types raise an error."""
    data = [torch.randn(32, 8), torch.randn(16, 8)]
    module = compile_model(Twice, data)
    second = [node.name for node in module.graph.nodes if node.origin.scope == "shared"][1]
    own = {second: LayerPruningSettings(skip_pruning=True)}
    found = module.clika_prune(PruningSettings("2:4", 1e9), layer_pruning_settings=own, calibration_inputs=data)
    assert {layer.decision for layer in found.layers if layer.scope == "shared"} == {f"skip_pruning of '{second}'"}
    own = {second: LayerPruningSettings(mask_type="1:4")}
    with pytest.raises(
        ModelError, match=rf"'{second}': it shares its weight with '\w+' in shared, which has mask_type="
    ):
        module.clika_prune(PruningSettings("2:4", 1e9), layer_pruning_settings=own, calibration_inputs=data)


def test_clika_prune_pattern_on_two_input_dims_skipped():
    """A weight with two different input dims gets no pattern."""
    data = [torch.randn(4, 4, 5, 5), torch.randn(3, 4, 5, 5)]
    module = compile_model(BothOrientations, data)
    found = module.clika_prune(PruningSettings("2:4", 1e9), calibration_inputs=data)
    assert ["has two dims of inputs" in layer.decision for layer in found.layers] == [True, True]


@pytest.mark.parametrize(
    ("model", "key", "shape"),
    [
        (lambda: Twice(6), "shared", (8,)),
        (lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), nn.Linear(6, 4)), "0", (6,)),
        (lambda: nn.Sequential(nn.ConvTranspose2d(12, 8, 2, groups=2), nn.Conv2d(8, 4, 1)), "0", (12, 5, 5)),
    ],
)
def test_mask_pattern_indivisible_named_layer_raises(model, key, shape):
    """A named layer whose size the pattern does not divide raises an error."""
    data = [torch.randn(4, *shape), torch.randn(3, *shape)]
    module = compile_model(model, data)
    with pytest.raises(ModelError, match=f"'{key}': mask_type='2:4' needs a multiple of 4 inputs .* the layer has 6"):
        module.clika_prune(
            PruningSettings("1:1", 1e9),
            layer_pruning_settings={key: LayerPruningSettings(mask_type="2:4")},
            calibration_inputs=data,
        )
