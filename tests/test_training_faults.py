"""What goes wrong in training, and where that is said."""

import copy
import math

import pytest
import torch
from torch import nn

from clika_ref import (
    DeploymentSettings_ONNXRuntime_ONNX,
    ModelError,
    QuantizationSettings,
    clika_compile,
)

HERE = DeploymentSettings_ONNXRuntime_ONNX()
ALL = QuantizationSettings(quantization_sensitivity_threshold=1e9)


class Small(nn.Module):
    """A convolution with a norm, and a head."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def data(size=8, seed=0):
    return torch.randn(size, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def made():
    torch.manual_seed(0)
    model = Small().train()
    for seed in range(20):
        model(data(seed=seed))
    return model.eval()


def compiled(model=None, **options):
    options = {"deployment_settings": HERE, "quantization_settings": ALL, **options}
    return clika_compile(model or made(), calibration_inputs=[data(), data(4)], **options)


# Scales


def test_a_step_whose_loss_is_nan_is_followed_by_an_error_that_names_scales_and_layers():
    module = compiled().train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    (module(data()).sum() * math.nan).backward()
    optimizer.step()
    assert module.get_parameter("conv.weight").isnan().any(), "weights are spoiled as well"
    said = r"the scale of the value '\w+' is nan, .*that of the weight of 'conv2d' is nan.*: training has diverged"
    for call in (lambda: module(data()), module.eval):
        with pytest.raises(ModelError, match=said):
            call()


@pytest.mark.parametrize(("number", "found"), [(-200.0, "0.0"), (100.0, "inf")])
def test_a_scale_that_has_grown_too_small_or_too_large_is_named_before_it_makes_nan(number, found):
    module = compiled().train()
    before = copy.deepcopy(module.state_dict())
    with torch.no_grad():
        module.get_parameter("clika.log_weight_scales.conv2d")[1] = number
    with pytest.raises(ModelError, match=rf"the scale of the weight of 'conv2d' is {found}: training has diverged"):
        module(data())
    module.load_state_dict(before)
    assert module(data()).isfinite().all()
