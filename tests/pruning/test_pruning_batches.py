"""Importance is estimated on enough samples, for any batch size."""

import pytest
import torch
from torch import nn

from clika_ref import (
    DeploymentSettings_ONNXRuntime_ONNX,
    PruningSettings,
    QuantizationSettings,
    clika_compile,
)
from clika_ref.pruning.batches import MIN_PRUNING_SAMPLES, PruningBatches
from clika_ref.quantization.calibration.calibrator import take_batches


class TwoKinds(nn.Module):
    """Half of the channels serve one type of samples, the other half the other type."""

    def __init__(self):
        super().__init__()
        self.wide, self.head = nn.Linear(2, 16), nn.Linear(16, 4)
        with torch.no_grad():
            self.wide.bias.zero_()
            self.wide.weight.zero_()
            self.wide.weight[:8, 0] = self.wide.weight[8:, 1] = torch.rand(8) + 0.5

    def forward(self, x):
        return self.head(self.wide(x).relu())


def make_single_samples(*, both):
    """Return batches of one sample: first one type, then the other."""
    one = [torch.tensor([[1 + 0.1 * i, 0.0]]) for i in range(8)]
    return one + [x.flip(1) for x in one] if both else one


TRACED = [torch.randn(2, 2), torch.randn(3, 2)]


@pytest.mark.parametrize("settings", [PruningSettings("structured"), PruningSettings("1:1")])
def test_clika_prune_keeps_channels_of_later_batches(settings):
    """Channels that only a later batch needs stay."""
    torch.manual_seed(0)
    module = clika_compile(TwoKinds().eval(), tracing_inputs=TRACED)
    data = make_single_samples(both=True)
    before = module(torch.cat(data)).detach()
    found = module.clika_prune(settings, calibration_inputs=data)
    share = float((module(torch.cat(data)).detach() - before).square().sum() / before.square().sum())
    assert share < 0.005
    assert found.error == pytest.approx(share, rel=1e-3)


def test_clika_compile_prunes_and_calibrates_with_iterator(tmp_path):
    """Data from an iterator is used for pruning first, and for calibration after it."""
    torch.manual_seed(0)
    module = clika_compile(
        TwoKinds().eval(),
        tracing_inputs=TRACED,
        calibration_inputs=(x for x in make_single_samples(both=True)),
        quantization_settings=QuantizationSettings(),
        pruning_settings=PruningSettings("structured"),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
        logs_dir=tmp_path,
    )
    assert module.wide.weight.shape[0] == 16
    (log,) = tmp_path.glob("*.log")
    assert "16 batches" in log.read_text()
    assert "estimates sensitivity on only 16 samples" in log.read_text()


def test_take_batches_reads_only_needed_batches():
    """No more batches are read than needed."""
    read = iter([[torch.zeros(20, 2)]] * 5)
    assert len(take_batches(read, MIN_PRUNING_SAMPLES)) == 2
    assert len([*read]) == 3


def test_pruning_batches_weights_follow_output_norm():
    """The weight of a batch is the squared norm of its outputs."""
    module = clika_compile(nn.Linear(2, 2, bias=False).eval(), tracing_inputs=TRACED)
    x = torch.randn(3, 2)
    assert PruningBatches.of(module.graph, [[x], [2 * x]]).weights == pytest.approx([0.2, 0.8])
    assert PruningBatches.of(module.graph, [[0 * x], [0 * x]]).weights == [0.5, 0.5]
