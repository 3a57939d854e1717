"""Four kinds of models with half of their channels or heads removed, and their exports."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models.densenet import DenseNet
from torchvision.models.mobilenetv3 import mobilenet_v3_large
from torchvision.models.resnet import Bottleneck, ResNet

from clika_ref import PruningSettings, clika_compile


class GroupedQueryBlock(nn.Module):
    """Grouped-query attention, followed by a gated layer, around a normalized residual stream."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (
            nn.Linear(a, b) for a, b in ((64, 64), (64, 32), (64, 32), (64, 64))
        )
        self.norm, self.gate, self.up = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(64, 128)
        self.down = nn.Linear(128, 64)

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


MODELS = {
    "densenet": lambda: DenseNet(16, (2, 2), 16, bn_size=2, num_classes=10),
    "mobilenet_v3_large": lambda: mobilenet_v3_large(weights=None, width_mult=0.5, num_classes=10),
    "resnext": lambda: ResNet(Bottleneck, [1, 1, 1, 1], num_classes=10, groups=8, width_per_group=4),
    "grouped-query block": GroupedQueryBlock,
}
"""As large as a test may be, with all parts of the large ones."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_clika_prune_architecture_halves_macs_and_exports(name, tmp_path):
    """Pruning halves the MACs of each architecture, and the export shrinks."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    shape = (16, 64) if "block" in name else (3, 32, 32)
    data = [torch.randn(2, *shape), torch.randn(3, *shape)]
    module = clika_compile(model, calibration_inputs=data)
    before = module.clika_export(tmp_path / "before.onnx").facts["bytes"]
    found = module.clika_prune(PruningSettings("structured", None, 0.5), calibration_inputs=data)
    assert found.macs_after <= 0.5 * found.macs_before
    assert [layer.scope for layer in found.layers if not layer.is_pruned] == []
    assert module.clika_export(tmp_path / "after.onnx").facts["bytes"] < 0.75 * before  # compared in ONNX Runtime
    assert module(data[1]).shape[0] == 3
