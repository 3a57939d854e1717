"""Each layer of a quantized graph, run alone in its target and compared, to find the faulty graph."""

from dataclasses import replace

import pytest
import torch
from seeded_tensors import randn
from torch import nn
from torch.nn import functional as F

from clika_ref import (
    DeploymentSettings_ONNXRuntime_ONNX,
    DeploymentSettings_OpenVINO_ONNX,
    DeploymentSettings_TensorRT_ONNX,
    QuantizationSettings,
    clika_compile,
)
from clika_ref.compiled.lowering import quantize_for_target
from clika_ref.core.registry import load_registry
from clika_ref.export.layer_check import describe_first_broken_layer, find_regions

X = randn(4, 3, 12, 12)
REGISTRY = load_registry()
TARGETS = [
    DeploymentSettings_ONNXRuntime_ONNX(),
    DeploymentSettings_OpenVINO_ONNX(),
    DeploymentSettings_TensorRT_ONNX(),
]


class Net(nn.Module):
    """Layers with a bias: convolutions, one of them after a float activation, a residual, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.stem, self.body, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x):
        y = F.silu(self.stem(x))
        return self.head(F.relu(self.body(y) + y).mean((2, 3)))


def compile_quantized(deployment, net=None):
    torch.manual_seed(0)
    module = clika_compile(
        (net or Net()).eval(),
        tracing_inputs=[X],
        calibration_inputs=[X],
        quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
        deployment_settings=deployment,
    )
    target = REGISTRY.targets[deployment.target]
    return quantize_for_target(module.graph, module.clika_state.quantized.plan, target, REGISTRY), target


@pytest.mark.parametrize("deployment", TARGETS, ids=str)
def test_first_broken_layer_each_layer_matches(deployment):
    """Each layer runs alone and matches, with any dtype of its bias."""
    graph, target = compile_quantized(deployment)
    found = {region.node.origin.scope for region in find_regions(graph)}
    assert {"stem", "body", "head"} <= found, "a bias is float in OpenVINO and TensorRT"
    assert describe_first_broken_layer(target, graph, [X]) == (
        "Each layer is correct alone: a fusion of the runtime differs"
    )


class Split(nn.Module):
    """A split of a quantized value, and one before a quantized layer."""

    def __init__(self):
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 8, 3), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        one, two = self.stem(x).chunk(2, 1)
        return self.body(one) + two


@pytest.mark.parametrize("deployment", TARGETS, ids=str)
def test_first_broken_layer_skips_splits(deployment):
    """A node with several results ends a region."""
    graph, target = compile_quantized(deployment, Split())
    assert "body" in {region.node.origin.scope for region in find_regions(graph)}
    assert "Each layer is correct alone" in describe_first_broken_layer(target, graph, [X])


@pytest.mark.parametrize("deployment", TARGETS, ids=str)
def test_first_broken_layer_names_layer_that_differs(deployment):
    """The layer that the target computes differently is named."""
    graph, target = compile_quantized(deployment)

    class Wrong(type(target)):
        def compile(self, graph, path, **options):
            for name, value in graph.constants.items():
                if name.startswith("body.weight") and name.endswith("_integers"):
                    value.data = -value.data
            return super().compile(graph, path, **options)

    assert "is conv2d (conv2d_1) in body at " in describe_first_broken_layer(
        replace(Wrong(), scheme=target.scheme), graph, [X]
    )
