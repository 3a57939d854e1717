"""The networks of the pictures, quantized by the stages of `clika_ref.stages` with a scheme that no CPU changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from clika_ref_onnxruntime.scheme import X86
from torch import Tensor, nn

from clika_ref import (
    ClikaCompileOptions,
    DeploymentSettings_ONNXRuntime_ONNX,
    QuantizationSettings,
)
from clika_ref.core.ir import Graph
from clika_ref.core.registry import Registry
from clika_ref.core.targets import Target
from clika_ref.quantization.calibration.range_table import RangeTable
from clika_ref.quantization.decision import Quantization
from clika_ref.stages import (
    CompilationLog,
    QuantizationRequest,
    calibrate_graph,
    capture,
    clean_graph,
    decide_quantization,
    load_registry,
    make_callable,
    make_calls,
    prepare_calibration,
    quantize_for_target,
    target_for,
    torchlib_operator,
)

NO_ALGORITHMS = ClikaCompileOptions(
    observer="min-max",
    smooth_quant="off",
    equalization="off",
    weight_clipping="off",
    mixed_precision="off",
    gptq="off",
    bias_correction="off",
)
"""Scales from min/max alone, so that exact activations give exact scales."""


class Branches(nn.Module):
    """Two convolutions of one input, added: small enough for a picture of its graph.

    Weights and inputs are multiples of powers of two, and batch norms divide by 1. All sums are exact in float32,
    in any order, and the picture has the same bytes on every CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, eps=0.0))
        self.narrow = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8, eps=0.0))
        generator = torch.Generator().manual_seed(0)
        for parameter in (p for m in (self.wide[0], self.narrow[0]) for p in m.parameters()):
            parameter.data = torch.randint(-32, 33, parameter.shape, generator=generator) / 64

    def forward(self, x: Tensor) -> Tensor:
        """Return ``relu(wide(x) + narrow(x))``, ``[n, 8, h, w]``."""
        return (self.wide(x) + self.narrow(x)).relu()


class Residual(nn.Module):
    """A depthwise and a pointwise convolution, added to their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.pointwise = nn.Conv2d(channels, channels, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``relu(x + branch(x))``, ``[n, channels, h, w]``."""
        y = self.norm1(self.depthwise(x)).relu()
        return (x + self.norm2(self.pointwise(y))).relu()


class Separable(nn.Module):
    """A network of three residual blocks, with one large channel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*(Residual(16) for _ in range(3)))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, 10]`` of images ``x[n, 3, h, w]``."""
        return self.head(self.blocks(self.stem(x).relu()).mean((2, 3)))


class Coupled(nn.Module):
    """A residual block with an addition, which couples the channels of two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.expand = nn.Conv2d(8, 12, 3, padding=1)
        self.reduce = nn.Conv2d(12, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, 5]`` of images ``x[n, 3, h, w]``."""
        x = self.stem(x)
        return self.head((x + self.reduce(self.expand(x).relu())).relu().mean((2, 3)))


def make_images(count: int, generator: torch.Generator) -> Tensor:
    """Return images of colored discs on colored backgrounds with noise, ``[count, 3, 32, 32]``."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, 32), torch.linspace(-1, 1, 32), indexing="ij")
    left, top, size = torch.rand(3, count, 1, 1, generator=generator)
    inside = (x - 2 * left + 1).square() + (y - 2 * top + 1).square() < (0.2 + 0.8 * size).square()
    disc, background = torch.rand(2, count, 3, 1, 1, generator=generator)
    return torch.where(inside[:, None], disc, background) + 0.1 * torch.rand(count, 3, 32, 32, generator=generator)


def randomize_separable(model: Separable, generator: torch.Generator) -> None:
    """Set random weights, one channel ten times larger, and the batch statistics of four batches of images."""
    for parameter in model.parameters():
        fan_in = parameter[0].numel() if parameter.dim() > 1 else 4
        parameter.data = (2 * torch.rand(parameter.shape, generator=generator) - 1) * 1.7 / fan_in**0.5
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data = torch.rand(module.weight.shape, generator=generator) + 0.5
            module.momentum = None  # the mean over all batches
    model.get_submodule("blocks.1.depthwise").get_parameter("weight").data[3] *= 10
    model.train()
    with torch.no_grad():
        for _ in range(4):
            model(make_images(16, generator))


@dataclass(frozen=True)
class QuantizedNetwork:
    """A network after each of the stages."""

    captured: Graph
    quantized: Graph
    found: Quantization
    table: RangeTable
    """Observed ranges."""
    target: Target
    registry: Registry


def load_fixed_registry() -> Registry:
    """Return the installed plugins, with ONNX Runtime's scheme for a CPU with VNNI, whatever this CPU has."""
    registry = load_registry()
    target = replace(registry.targets["onnxruntime"], scheme=X86)  # pyright: ignore[reportArgumentType]
    return replace(registry, targets={**registry.targets, target.name: target})


def capture_network(model: nn.Module, inputs: Sequence[Tensor], registry: Registry) -> Graph:
    """Return the graph of a model after the CLEAN passes."""
    callee = make_callable(model.eval().requires_grad_(False))
    graph = capture(callee, make_calls(callee, inputs), registry, fallback=torchlib_operator).graph
    clean_graph(graph, registry)
    return graph


def quantize_network(
    model: nn.Module,
    batches: Sequence[Tensor],
    settings: QuantizationSettings,
    options: ClikaCompileOptions,
) -> QuantizedNetwork:
    """Return a model quantized for ONNX Runtime, with a dynamic batch."""
    registry = load_fixed_registry()
    target = target_for(DeploymentSettings_ONNXRuntime_ONNX(), registry)
    graph = capture_network(model, [batches[0], batches[0][:2]], registry)
    request = QuantizationRequest(target, settings, options=options)
    calibration = prepare_calibration(graph, request, registry)
    log, inputs = CompilationLog(), [[batch] for batch in batches]
    pipeline = calibrate_graph(calibration, inputs, request, registry, log, model=graph)
    found = decide_quantization(pipeline, graph, request, registry, log)
    quantized = quantize_for_target(graph, found.plan, target, registry)
    return QuantizedNetwork(graph, quantized, found, calibration.table, target, registry)
