"""Learned scales: training with them at learning rates at which the float network trains."""

import copy
import math

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile

IMAGES, LABELS = load_digits(return_X_y=True)
IMAGES, LABELS = torch.tensor(IMAGES / 16, dtype=torch.float32), torch.tensor(LABELS)
TRAINING_IMAGES, STEPS = 1300, 60


def build_mlp():
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))


def build_convolutions():
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10)),
    )


OPTIMIZERS = {
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, rate, momentum=0.9),
    "adam": torch.optim.Adam,
}


def train(model, optimizer, rate, steps=STEPS):
    generator = torch.Generator().manual_seed(0)
    stepper = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad], rate)
    model.train()
    for _ in range(steps):
        batch = torch.randint(0, TRAINING_IMAGES, (64,), generator=generator)
        stepper.zero_grad()
        nn.functional.cross_entropy(model(IMAGES[batch]), LABELS[batch]).backward()
        stepper.step()
    return model.eval()


def measure_accuracy(model):
    with torch.no_grad():
        return float((model(IMAGES[TRAINING_IMAGES:]).argmax(1) == LABELS[TRAINING_IMAGES:]).float().mean())


@pytest.fixture(scope="module", params=[build_mlp, build_convolutions], ids=["mlp", "convolutions"])
def module(request):
    torch.manual_seed(0)
    return clika_compile(
        train(request.param(), "sgd", 0.01, 150),
        tracing_inputs=[IMAGES[:1], IMAGES[:2]],
        calibration_inputs=list(IMAGES[:320].split(32)),
        quantization_settings=QuantizationSettings(),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )


@pytest.mark.parametrize(("optimizer", "rate"), [("sgd", 0.01), ("sgd", 0.05), ("sgd", 0.1), ("adam", 0.01)])
def test_learned_scales_train_as_fixed_scales(module, optimizer, rate):
    """Learned scales train at the rates of float: they reach the accuracy of fixed scales, and stay near the plan."""
    fixed = copy.deepcopy(module)
    for name, parameter in fixed.named_parameters():
        parameter.requires_grad_(not name.startswith("clika."))
    learned = train(copy.deepcopy(module), optimizer, rate)
    logs = torch.cat([p.flatten() for name, p in learned.named_parameters() if name.startswith("clika.")])
    assert logs.any()
    assert logs.abs().max() < math.log(8)
    lost = measure_accuracy(train(fixed, optimizer, rate)) - measure_accuracy(learned)
    assert lost < 0.03  # single runs at these rates differ by 1 to 2 points, in float too
