"""Layers between quantized tensors, with results from integer arithmetic that are exact by choice of scales.

All scales are powers of two, and sums stay below 2^24. No product or sum rounds in float32. A runtime must therefore
return exactly these numbers, whether it computes in INT8 or simulates it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph, Value
from clika_ref.core.registry import Registry
from clika_ref.core.types import TensorType
from clika_ref_conformance.cases import CaseRun, GraphCase

X_SCALE = 2.0**-4
W_SCALE = 2.0**-6


@dataclass(frozen=True)
class QuantizedLayer:
    """One layer on uint8 ``x`` and int8 ``w``: its operator, shapes and quantization."""

    name: str
    op: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    zero_point: int = 0
    axis: int | None = None
    """Axis of ``w`` for per-channel scales."""
    bias: bool = False
    requantized: bool = False
    """Whether the result is quantized again, so that runtimes can fuse the layer."""
    attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def is_known(self, registry: Registry) -> bool:
        """Return whether a plugin declares the operator."""
        return self.op in registry.operators


ROWS_SHAPE, SQUARE_SHAPE = (3, 64), (64, 64)
PADDED_CONV_ATTRS = {"padding": (1, 1), "stride": (1, 1), "dilation": (1, 1), "groups": 1}
GROUPED_CONV_ATTRS = {"padding": (0, 0), "stride": (2, 2), "output_padding": (0, 0), "groups": 2, "dilation": (1, 1)}

QUANTIZED_LAYERS = (
    QuantizedLayer("matmul", "matmul", (3, 64), (64, 5)),
    QuantizedLayer("matmul requantized", "matmul", (3, 64), (64, 5), zero_point=3, requantized=True),
    QuantizedLayer("linear", "linear", ROWS_SHAPE, SQUARE_SHAPE),
    QuantizedLayer("linear per channel", "linear", ROWS_SHAPE, SQUARE_SHAPE, axis=0, zero_point=128),
    QuantizedLayer("linear with bias", "linear", ROWS_SHAPE, SQUARE_SHAPE, axis=0, bias=True, requantized=True),
    QuantizedLayer(
        "matmul per channel of a square weight", "matmul", ROWS_SHAPE, SQUARE_SHAPE, axis=1, requantized=True
    ),
    QuantizedLayer(
        "conv2d padded with its zero point", "conv2d", (1, 3, 5, 5), (4, 3, 3, 3), 77, 0, attrs=PADDED_CONV_ATTRS
    ),
    QuantizedLayer("conv2d requantized", "conv2d", (1, 3, 5, 5), (4, 3, 3, 3), 128, 0, True, True, PADDED_CONV_ATTRS),
    QuantizedLayer(
        "conv_transpose2d per channel", "conv_transpose2d", (1, 4, 3, 3), (4, 4, 2, 2), 9, 1, attrs=GROUPED_CONV_ATTRS
    ),
)


def make_layer_case(
    layer: QuantizedLayer, registry: Registry, seed: int, bits: int = 8
) -> tuple[GraphCase, dict[str, np.ndarray]]:
    """Return a layer with weights of ``bits`` bits as a case, and the exact result for each run."""
    end = 2 ** (bits - 1)
    weights = {"largest": np.full(layer.w, end - 1), "drawn": np.random.default_rng(seed).integers(-end, end, layer.w)}
    kind = "drawn" if layer.axis is not None else "largest"
    w = weights[kind].astype(np.int8)
    scales = _draw_weight_scales(layer)
    channels = w.shape[layer.axis] if layer.axis is not None else w.shape[0 if layer.op == "linear" else -1]
    bias = np.random.default_rng(seed + 1).integers(-1000, 1000, channels).astype(np.int32) if layer.bias else None
    graph = _build_graph(layer, registry, w, scales, bias)
    runs, expected = [], {}
    for name, codes in _draw_input_codes(layer, seed):
        x = ((codes - layer.zero_point) * X_SCALE).astype(np.float32)
        runs.append(CaseRun(name, (torch.from_numpy(x),)))
        expected[name] = _compute_expected(layer, codes, w, scales, bias)
    return GraphCase(layer.name, graph, runs, {"layer": layer.name}), expected


def _draw_input_codes(layer: QuantizedLayer, seed: int) -> list[tuple[str, np.ndarray]]:
    random = np.random.default_rng(seed + 2)
    return [
        ("all 255", np.full(layer.x, 255)),
        ("all 0", np.zeros(layer.x, int)),
        ("drawn", random.integers(0, 256, layer.x)),
        ("pairs", np.where(np.arange(layer.x[-1]) % 2, 255, 0) + np.zeros(layer.x, int)),
    ]


def _draw_weight_scales(layer: QuantizedLayer) -> np.ndarray:
    if layer.axis is None:
        return np.asarray(W_SCALE, np.float32)
    count = layer.w[layer.axis]
    return (W_SCALE * np.exp2(np.arange(count) % 3 - 1)).astype(np.float32)


def _build_graph(
    layer: QuantizedLayer, registry: Registry, w: np.ndarray, scales: np.ndarray, bias: np.ndarray | None
) -> Graph:
    graph = Graph(layer.op)
    x = graph.add_input(TensorType(torch.float32, layer.x), "x")
    build = Builder(graph, registry.operators)
    codes = build("quantize", x, X_SCALE, layer.zero_point, dtype=torch.uint8)
    operands = [build("dequantize", codes, X_SCALE, layer.zero_point), _add_weight(graph, build, w, scales, layer.axis)]
    if bias is not None:
        stored = graph.add_constant(torch.from_numpy(bias), "bias")
        along = 0 if scales.ndim else None
        scale: Any = graph.add_constant(torch.as_tensor(scales * np.float32(X_SCALE)), "bias_scale")
        operands.append(build("dequantize", stored, scale, axis=along))
    result = build(layer.op, *operands, **layer.attrs)
    graph.add_output(build("quantize", result, *OUTPUT_QPARAMS, dtype=torch.uint8) if layer.requantized else result)
    return graph


OUTPUT_QPARAMS = (2.0**-1, 100)
"""Scale and zero point of a requantized result."""


def _add_weight(graph: Graph, build: Builder, w: np.ndarray, scales: np.ndarray, axis: int | None) -> Value:
    stored = graph.add_constant(torch.from_numpy(w), "w")
    if axis is None:
        return build("dequantize", stored, float(scales), 0)
    zeros = graph.add_constant(torch.zeros(len(scales), dtype=torch.int8), "w_zero_point")
    return build("dequantize", stored, graph.add_constant(torch.from_numpy(scales), "w_scale"), zeros, axis=axis)


def _compute_expected(
    layer: QuantizedLayer, codes: np.ndarray, w: np.ndarray, scales: np.ndarray, bias: np.ndarray | None
) -> np.ndarray:
    """Return the exact result, computed in float64 and quantized again if the layer is requantized."""
    a, b = torch.from_numpy(codes - layer.zero_point).double(), torch.from_numpy(w.astype(np.float64))
    spread = torch.as_tensor(scales.astype(np.float64) * X_SCALE)
    if layer.axis is not None:  # multiplying a weight by powers of two is exact
        spread = spread.reshape([-1 if i == layer.axis else 1 for i in range(b.ndim)])
    weight = b * spread
    extra = None if bias is None else torch.as_tensor(bias * scales.astype(np.float64) * X_SCALE)
    y = _get_float64_layers(layer, extra)[layer.op](a, weight).numpy()
    if not layer.requantized:
        return y.astype(np.float32)
    scale, zero = OUTPUT_QPARAMS
    return np.clip(np.rint(y / scale) + zero, 0, 255).astype(np.uint8)


def _get_float64_layers(layer: QuantizedLayer, bias: torch.Tensor | None) -> dict[str, Any]:
    """Return the layers in float64, where sums of integers below 2^53 are exact."""
    stride, groups = layer.attrs.get("stride", 1), layer.attrs.get("groups", 1)
    padding: Sequence[int] = layer.attrs.get("padding", (0, 0))
    return {
        "matmul": lambda a, w: a @ w,
        "linear": lambda a, w: F.linear(a, w, bias),
        "conv2d": lambda a, w: F.conv2d(a, w, bias, stride, padding, 1, groups),
        "conv_transpose2d": lambda a, w: F.conv_transpose2d(a, w, bias, stride, padding, 0, groups),
    }
