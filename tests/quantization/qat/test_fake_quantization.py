"""Fake quantization: the results of quantize and dequantize, and the gradients of LSQ."""

import math

import pytest
import torch
from seeded_tensors import randn

from clika_ref.core.registry import load_registry
from clika_ref.quantization.qat.fake_quantization import (
    apply_log_scale,
    apply_log_scales,
    fake_quantize,
    fake_quantize_bias,
    fake_quantize_rows,
    fake_quantize_weight,
    follow_norm_multiplier,
)
from clika_ref.quantization.qdq.qparams import INT32_BIAS_LIMIT, quantize_bias

OPERATORS = load_registry().operators


def make_numbers(*sides, seed=0):
    return randn(*sides, seed=seed) * 3


@pytest.mark.parametrize(("dtype", "zero_point"), [(torch.int8, 0), (torch.int8, 17), (torch.uint8, 100)])
def test_fake_quantize_matches_quantize_dequantize(dtype, zero_point):
    """Fake quantization equals quantize and dequantize to the last bit."""
    x, scale, ends = make_numbers(64, 64), 0.031, torch.iinfo(dtype)
    wanted = OPERATORS["dequantize"](OPERATORS["quantize"](x, scale, zero_point, dtype=dtype), scale, zero_point)
    own = apply_log_scale(torch.zeros(()), planned=float(torch.tensor(scale)))
    assert torch.equal(fake_quantize(x, own, zero_point=zero_point, low=ends.min, high=ends.max), wanted)
    assert (wanted == wanted.amax()).sum() > 1, "some are cut off"


@pytest.mark.parametrize("axis", [0, 1])
def test_fake_quantize_weight_matches_operators(axis):
    """Fake quantization of weights equals the operators, with moved weights too."""
    x, scales = make_numbers(6, 6, 3), make_numbers(6, seed=1).abs() / 40
    zeros = torch.zeros(6, dtype=torch.int8)
    steps = OPERATORS["quantize"](x, scales, zeros, axis=axis, quant_min=-127)
    wanted = OPERATORS["dequantize"](steps, scales, axis=axis)
    assert torch.equal(fake_quantize_weight(x, scales, None, axis=axis, low=-127, high=127), wanted)
    moved = torch.randint(-1, 2, x.shape, dtype=torch.int8)
    shifted = OPERATORS["dequantize"]((steps.short() + moved).clamp(-127, 127).to(torch.int8), scales, axis=axis)
    assert torch.equal(fake_quantize_weight(x, scales, moved, axis=axis, low=-127, high=127), shifted)


@pytest.mark.parametrize("has_rows", [True, False])
def test_fake_quantize_rows_scale_per_block(has_rows):
    """Rows have a scale for each block."""
    rows, scales = make_numbers(4, 8), make_numbers(4, 2, seed=1).abs() / 4
    wide = scales.repeat_interleave(4, 1)
    wanted = (rows / wide).round().clamp(-8, 7) * wide
    given = rows if has_rows else rows.T
    found = fake_quantize_rows(given, scales, None, has_rows=has_rows, low=-8, high=7)
    assert torch.equal(found, wanted if has_rows else wanted.T)


def test_fake_quantize_bias_matches_int32():
    """Fake quantization of biases equals INT32, and passes gradients."""
    bias, scales = make_numbers(64) * 1e3, make_numbers(64, seed=1).abs() / 1e4
    scales[:2] = 1e-8
    steps, own = quantize_bias(bias, 0.017, scales)
    wanted = OPERATORS["dequantize"](steps, own, axis=0)
    bias.requires_grad_()
    found = fake_quantize_bias(bias, torch.tensor(0.017), scales)
    assert torch.equal(found, wanted)
    found.sum().backward()
    assert torch.equal(bias.grad, torch.ones(64)), "gradients pass rounding"
    assert steps[:2].abs().tolist() == [INT32_BIAS_LIMIT] * 2, "what needs more bits keeps its sign"


def compute_gradients(x, scale, seed, **ends):
    """Return the gradients of the elements and of the scale."""
    x, scale = x.clone().requires_grad_(), scale.clone().requires_grad_()
    fake_quantize(x, scale, **{"zero_point": 0, **ends}).backward(seed)
    return x.grad, scale.grad


def test_fake_quantize_gradients_match_lsq():
    """Gradients equal those of LSQ, divided by sqrt(elements): Esser et al. (2020), equations 3 and 5."""
    x, scale, seed = make_numbers(2, 500), torch.tensor(0.02), make_numbers(2, 500, seed=1)
    found, of_scale = compute_gradients(x, scale, seed, low=-128, high=127)
    steps = (x / scale).double()
    inside = (steps > -128.5) & (steps < 127.5)  # elements that round to the min or max are not clipped, as in PyTorch
    assert torch.equal(found, seed * inside)
    slope = torch.where(inside, steps.round() - steps, steps.clamp(-128, 127))
    wanted = (slope * seed).sum() / math.sqrt(500)  # elements of one sample
    assert abs(float(of_scale) - float(wanted)) < 1e-3 * abs(float(wanted))
    assert 0 < int((~inside).sum()) < 500


def test_fake_quantize_zero_point_shifts_clipping():
    """A zero point shifts the clipped range of the gradients."""
    x, seed = torch.tensor([[-1.0, -0.5, 0.0, 1.0, 1.5]]), torch.ones(1, 5)
    found, _ = compute_gradients(x, torch.tensor(0.01), seed, low=0, high=255, zero_point=100)
    assert found.tolist() == [[1, 1, 1, 1, 1]]
    found, _ = compute_gradients(x, torch.tensor(0.01), seed, low=0, high=255, zero_point=60)
    assert found.tolist() == [[0, 1, 1, 1, 1]]


def test_fake_quantize_gradients_independent_of_int_type():
    """The integer type does not change the gradients."""
    x, scale, seed = make_numbers(2, 500).relu(), torch.tensor(0.02), make_numbers(2, 500, seed=1)
    _, signed = compute_gradients(x, scale, seed, low=-128, high=127, zero_point=-128)
    _, unsigned = compute_gradients(x, scale, seed, low=0, high=255)
    _, below = compute_gradients(x, scale, seed, low=0, high=255, zero_point=255)
    assert signed == unsigned != 0
    assert below.isfinite()


def test_fake_quantize_weight_gradients_per_channel():
    """Each channel has the gradient that it would have alone."""
    x, scales, seed = make_numbers(4, 50), torch.full((4,), 0.02), make_numbers(4, 50, seed=1)
    scales.requires_grad_()
    fake_quantize_weight(x, scales, None, axis=0, low=-127, high=127).backward(seed)
    for row, found in enumerate(scales.grad):
        _, wanted = compute_gradients(x[row : row + 1], torch.tensor(0.02), seed[row : row + 1], low=-127, high=127)
        assert torch.allclose(found, wanted, rtol=1e-4)


def test_apply_log_scale_multiplies_planned_scale():
    """The scale is the planned one times the exponential of the learned logarithm."""
    log = torch.zeros((), requires_grad=True)
    apply_log_scale(log, planned=0.25).backward()
    assert float(log.grad) == 0.25
    logs = torch.tensor([0.0, math.log(2)])
    assert torch.allclose(apply_log_scales(logs, torch.tensor([0.1, 0.1])), torch.tensor([0.1, 0.2]))


def compute_log_gradient(x, planned, seed):
    """Return the gradient of the log scale of a value."""
    log = torch.zeros(1, requires_grad=True)
    fake_quantize(x, apply_log_scale(log, planned=planned), zero_point=0, low=-128, high=127).backward(seed)
    return float(log.grad)


@pytest.mark.parametrize("planned", [0.02, 0.05])  # with and without clipped elements
def test_log_scale_gradient_independent_of_unit(planned):
    """The gradient of a log scale does not depend on the unit of the tensor."""
    x, seed = make_numbers(8, 256), make_numbers(8, 256, seed=1)
    wanted = compute_log_gradient(x, planned, seed)
    for unit in (2.0**-20, 2.0**10):  # powers of 2 do not change the rounding
        assert math.isclose(compute_log_gradient(x * unit, planned * unit, seed / unit), wanted, rel_tol=1e-5)


def test_log_scale_gradient_bounded_by_error():
    """The gradient of a log scale is at most the norm of the gradients times the RMS error of a sample."""
    x, planned = make_numbers(8, 256), 0.2
    errors = (x / planned).round() * planned - x
    bound = float(errors.norm() / 256**0.5)
    seed = errors / errors.norm()  # the worst case for gradients of norm 1
    assert (x / planned).abs().max() < 127
    assert math.isclose(compute_log_gradient(x, planned, seed), bound, rel_tol=1e-4)
    assert bound < planned  # 8 samples with errors of 0.29 steps


def test_fake_quantize_weight_tiny_channel_gradient_bounded():
    """Channels close to zero have bounded gradients."""
    weight, logs = make_numbers(2, 64), torch.zeros(2, requires_grad=True)
    weight[0] *= 1e-10
    scales = apply_log_scales(logs, weight.abs().amax(1) / 127)
    (
        fake_quantize_weight(weight, scales, None, axis=0, low=-127, high=127) * make_numbers(2, 64, seed=1)
    ).sum().backward()
    assert abs(float(logs.grad[0])) < 1e-3 * abs(float(logs.grad[1])), "as if all were of one size"


def test_follow_norm_multiplier_ratio_or_one():
    """Scales follow the ratio of norms, and stay if it is undefined or the scale is shared."""
    now, then = torch.tensor([2.0, -3.0, 0.0, 5.0]).double(), torch.tensor([1.0, 1.5, 2.0, 0.0]).double()
    assert follow_norm_multiplier(torch.ones(4), now, then).tolist() == [2, 2, 1, 1]
    assert follow_norm_multiplier(torch.ones(4, 2), now, then)[:, 1].tolist() == [2, 2, 1, 1]
    assert follow_norm_multiplier(torch.tensor(1.0), now, then) == 1


def test_fake_quantize_bfloat16_rounds_like_float32():
    """BF16 activations are rounded as float32."""
    x, scale = make_numbers(8, 64).bfloat16().requires_grad_(), torch.tensor(0.031, requires_grad=True)
    found = fake_quantize(x, scale, zero_point=0, low=-128, high=127)
    whole = fake_quantize(x.detach().float(), scale, zero_point=0, low=-128, high=127)
    assert torch.equal(found, whole.bfloat16())
    found.sum().backward()
    of_half = scale.grad.clone()
    scale.grad = None
    whole.sum().backward()
    assert x.grad.dtype == torch.bfloat16
    assert torch.allclose(of_half, scale.grad, rtol=0.05)


def test_fake_quantize_double_backward_raises():
    """Second derivatives raise an error."""
    x, scale = make_numbers(8, 64).requires_grad_(), torch.tensor(0.031, requires_grad=True)
    held = fake_quantize(x, scale, zero_point=0, low=-128, high=127)
    (slope,) = torch.autograd.grad(held.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="trying to differentiate twice a function that was marked with @once_diff"):
        slope.square().sum().backward()
