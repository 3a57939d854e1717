"""Shared by tests of quantization: a scheme with two kinds of quantized layers, and a model."""

from torch import nn

from clika_ref.core.quantization_scheme import QuantizationScheme, QuantizedType
from clika_ref.core.registry import load_registry

OPERATORS = load_registry().operators


def make_scheme(weights):
    """Return the scheme of a target like ONNX Runtime, with the given type of weights."""
    return QuantizationScheme(
        QuantizedType(),
        weights,
        layers=frozenset({"conv2d", "linear"}),
        needs_quantized_output=frozenset({"conv2d"}),
        fused={"relu": {}},
        int32_bias=frozenset({"conv2d", "linear"}),
    )


class WithLargeOutput(nn.Module):
    """A model with a second output that is far larger, and depends on no layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x), x * 1e6
