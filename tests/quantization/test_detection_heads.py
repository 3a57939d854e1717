"""Detection heads: boxes in pixels and scores from 0 to 1 keep their own scales, and selected detections quantize."""

import pytest
import torch
from torch import nn

from clika_ref import (
    DeploymentSettings_ONNXRuntime_ONNX,
    DeploymentSettings_OpenVINO_ONNX,
    DeploymentSettings_TensorRT_ONNX,
    QuantizationSettings,
    clika_compile,
)
from clika_ref.capture.detections import pair_rows
from clika_ref.core.registry import load_registry

DEPLOYMENTS = (
    DeploymentSettings_ONNXRuntime_ONNX(),
    DeploymentSettings_OpenVINO_ONNX(),
    DeploymentSettings_TensorRT_ONNX(),
)

PIXELS = 640.0


class Detector(nn.Module):
    """Features, and a head of two branches: boxes in pixels and classes."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 1, 1), nn.ReLU())
        self.boxes, self.classes = (nn.Sequential(nn.Conv2d(32, 16, 1), nn.ReLU(), nn.Conv2d(16, 4, 1)) for _ in "ab")
        with torch.no_grad():
            self.boxes[-1].weight.mul_(PIXELS)
            self.boxes[-1].bias.fill_(PIXELS / 2)
            self.classes[-1].weight.mul_(4)

    def forward(self, x):
        raise NotImplementedError


class RawDetector(Detector):
    """Boxes in pixels and logits."""

    def forward(self, x):
        x = self.features(x)
        return torch.cat([self.boxes(x), self.classes(x)], 1)


class SigmoidDetector(Detector):
    """Boxes in pixels and scores."""

    def forward(self, x):
        x = self.features(x)
        return torch.cat([self.boxes(x), self.classes(x).sigmoid()], 1)


class DecodingDetector(Detector):
    """Cells flattened, corners relative to the center of each cell, and scores."""

    def forward(self, x):
        x = self.features(x)
        boxes, classes = self.boxes(x).flatten(2), self.classes(x).flatten(2)
        centers = torch.linspace(0, PIXELS, boxes.shape[2])
        first, last = boxes.relu().chunk(2, 1)
        return torch.cat([torch.cat([centers - first, centers + last], 1), classes.sigmoid()], 1)


def make_images(count):
    """Return images of varying contrast."""
    return torch.randn(count, 3, 16, 16) * torch.linspace(0.5, 1.5, count)[:, None, None, None]


def measure_branch_sqnr(found, expected):
    """Return the SQNR of the boxes and of the classes, in dB, of the part that varies with the input."""
    return [
        float(10 * torch.log10((w - w.mean(0)).square().sum() / (f - w).square().sum()))
        for f, w in zip(found.split(4, 1), expected.split(4, 1), strict=True)
    ]


@pytest.mark.parametrize("build", [RawDetector, SigmoidDetector, DecodingDetector])
@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment.target)
def test_clika_compile_head_branches_keep_own_scales(build, deployment, tmp_path):
    """With every layer in INT8, boxes and classes keep their accuracy, in the module and in the file."""
    torch.manual_seed(0)
    model, x = build().eval(), make_images(16)
    module = clika_compile(
        model,
        tracing_inputs=[x[:1], x[:2]],
        calibration_inputs=[make_images(4) for _ in range(8)],
        quantization_settings=QuantizationSettings(automatic_skip_quantization=False, skip_tail_quantization=False),
        deployment_settings=deployment,
    )
    assert not any(layer.reason for layer in module.clika_summary().layers)
    with torch.no_grad():
        assert min(measure_branch_sqnr(module(x), model(x))) >= 20  # a common scale: below 0 dB for the classes
    artifact = module.clika_export(tmp_path / "model.onnx")
    target = load_registry().targets[deployment.target]
    if target.unavailable_reason() is None:
        (found,) = target.load(artifact)([x])
        assert min(measure_branch_sqnr(found, model(x).detach())) >= 20


class SelectingDetector(Detector):
    """The boxes, scores and labels of cells with a high score, in descending order of the scores."""

    def forward(self, x):
        x = self.features(x)
        boxes, scores = (
            y.flatten(2).permute(0, 2, 1).flatten(0, 1) for y in (self.boxes(x), self.classes(x).sigmoid())
        )
        kept, labels = torch.where(scores > 0.55)
        order = scores[kept, labels].argsort(descending=True)
        return boxes[kept][order], scores[kept, labels][order], labels[order]


@pytest.mark.parametrize("deployment", DEPLOYMENTS[:2], ids=lambda deployment: deployment.target)
def test_clika_compile_selected_detections_quantized(deployment, tmp_path):
    """INT8 changes the number of detections: layers are chosen by the values that they are selected from."""
    torch.manual_seed(0)
    model, x = SelectingDetector().eval(), make_images(4)
    module = clika_compile(
        model,
        tracing_inputs=[x, make_images(3)],
        calibration_inputs=[make_images(4) for _ in range(8)],
        quantization_settings=QuantizationSettings(),
        deployment_settings=deployment,
    )
    layers = module.clika_summary().layers
    assert all(0 < layer.sensitivity < 1 for layer in layers)
    assert sum(not layer.reason for layer in layers) >= 4
    module.clika_export(tmp_path / "model.onnx")
    with torch.no_grad():
        expected, found = model(x), module(x)
    assert len(expected[0]) >= 20
    pairs = pair_rows(found, expected)
    assert len(pairs[0][0]) <= 1.1 * len(expected[0])
    for own, wanted in pairs[:2]:
        assert (own - wanted).square().sum() < 0.05 * wanted.square().sum()


class RefiningDetector(Detector):
    """Scores, and boxes that a layer computes from the features of selected cells only."""

    def __init__(self):
        super().__init__()
        self.boxes = nn.Linear(32, 4)

    def forward(self, x):
        x = self.features(x)
        scores = self.classes(x).sigmoid().amax(1).flatten()
        kept = torch.where(scores > 0.55)[0]
        return self.boxes(x.permute(0, 2, 3, 1).flatten(0, 2)[kept]), scores[kept]


def test_clika_compile_layer_after_selection_stays_float(tmp_path):
    """The values before a selection are compared: a layer after it has no sensitivity, and its float result differs."""
    torch.manual_seed(0)
    module = clika_compile(
        RefiningDetector().eval(),
        tracing_inputs=[make_images(4), make_images(3)],
        calibration_inputs=[make_images(4) for _ in range(8)],
        quantization_settings=QuantizationSettings(),
        deployment_settings=DEPLOYMENTS[0],
    )
    reasons = {layer.scope: layer.reason for layer in module.clika_summary().layers}
    assert "after a selection" in reasons.pop("boxes")
    assert sum(not reason for reason in reasons.values()) >= 3
    module.clika_export(tmp_path / "model.onnx")


class ColumnDetector(Detector):
    """The boxes of selected cells, one in each column."""

    def forward(self, x):
        x = self.features(x)
        kept = torch.where(self.classes(x).amax(1).flatten() > 1.0)[0]
        return self.boxes(x).transpose(0, 1).flatten(1)[:, kept]


def test_clika_compile_selected_columns_not_compared(tmp_path, capfd, monkeypatch):
    """Only rows are matched: a file with another selected dim is written, and the log reports the missing check."""
    monkeypatch.delenv("CLIKA_REF_QUIET", raising=False)
    torch.manual_seed(0)
    module = clika_compile(
        ColumnDetector().eval(),
        tracing_inputs=[make_images(4), make_images(3)],
        calibration_inputs=[make_images(4) for _ in range(4)],
        quantization_settings=QuantizationSettings(),
        deployment_settings=DEPLOYMENTS[0],
    )
    assert any(not layer.reason for layer in module.clika_summary().layers)
    module.clika_export(tmp_path / "model.onnx")
    assert "not compared: the data determines more than the number of rows of" in capfd.readouterr().err
