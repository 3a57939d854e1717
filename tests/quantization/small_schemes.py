"""What tests of quantization share: the scheme of a target that runs two kinds of layers in integers."""

from clika_ref.core.registry import load_registry
from clika_ref.quantization_scheme import Integers, QuantizationScheme

OPERATORS = load_registry().operators


def scheme_with(weights):
    """Return the scheme of a target like ONNX Runtime, with integers of a kind for weights."""
    return QuantizationScheme(
        Integers(),
        weights,
        layers=frozenset({"conv2d", "linear"}),
        closed=frozenset({"conv2d"}),
        absorbed={"relu": {}},
        integer_bias=frozenset({"conv2d", "linear"}),
    )
