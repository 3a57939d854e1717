"""Clipped weight scales are never worse than unclipped ones, and better with a few outlier weights."""

import pytest
import torch
from seeded_tensors import randn

from clika_ref.core.quantization_scheme import QuantizedType
from clika_ref.quantization.calibration.weight_clipping import find_clipped_scales
from clika_ref.quantization.qdq.qparams import compute_weight_scales

S8 = QuantizedType(is_signed=True, is_symmetric=True)
S4 = QuantizedType(bits=4, is_signed=True, is_symmetric=True)


def compute_error(weight, scales, quantized_type, axis, importance=1.0):
    shape = [-1 if d == axis else 1 for d in range(weight.ndim)]
    scales = scales.reshape(shape) if scales.ndim else scales
    steps = (weight / scales).round().clamp(quantized_type.low, quantized_type.high)
    return ((steps * scales - weight).square() * importance).double().sum()


@pytest.mark.parametrize("axis", [0, 1, None])
@pytest.mark.parametrize("quantized_type", [S8, S4], ids=["8 bits", "4 bits"])
def test_find_clipped_scales_never_increase_error(axis, quantized_type):
    """Clipped scales never increase the error of a channel."""
    weight = randn(6, 5, 3, 3)
    whole, clipped = (
        compute_weight_scales(weight, axis, quantized_type),
        find_clipped_scales(weight, axis, quantized_type),
    )
    assert clipped.shape == whole.shape
    assert (clipped <= whole).all()
    channels = range(weight.shape[axis]) if axis is not None else [None]
    for c in channels:
        part = weight if c is None else weight.select(axis, c)
        ends = [s if c is None else s[c] for s in (clipped, whole)]
        assert compute_error(part, ends[0], quantized_type, None) <= compute_error(part, ends[1], quantized_type, None)
    if quantized_type is S4:  # with 256 steps there is next to nothing to gain
        assert compute_error(weight, clipped, quantized_type, axis) < 0.95 * compute_error(
            weight, whole, quantized_type, axis
        )


def test_find_clipped_scales_outlier_kept_if_important():
    """An outlier is clipped, unless it is important."""
    weight = torch.rand(1, 4000, generator=torch.Generator().manual_seed(0))
    weight[0, 7] = 3.0
    importance = torch.ones(4000)
    importance[7] = 1e6
    whole = compute_weight_scales(weight, 0, S4)
    assert find_clipped_scales(weight, 0, S4).item() < 0.7 * whole.item()
    assert find_clipped_scales(weight, 0, S4, importance).item() > 0.9 * whole.item()


def test_find_clipped_scales_zero_and_tiny_weights_normal():
    """Channels of zeros or tiny weights get a normal scale."""
    weight = torch.tensor([[0.0, 0.0], [1e-42, 1e-42], [1.0, 2.0]], dtype=torch.float32)
    scales = find_clipped_scales(weight, 0, S8)
    assert torch.isfinite(weight / scales.reshape(-1, 1)).all()
    assert (scales >= torch.finfo(torch.float32).tiny).all()
