"""Level quantization: correct quantizers pass, and each known fault of exporters is found and reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir
import pytest
import torch
from clika_ref_conformance.cases import Task
from clika_ref_conformance.drawing.quantized.layers import QUANTIZED_LAYERS
from clika_ref_conformance.drawing.quantized.ranges import (
    ELEMENTS_SHAPE,
    QuantizationGrid,
    draw_quantization_grids,
    make_elements,
)
from clika_ref_conformance.drawing.quantized.stored_weights import STORED_WEIGHTS
from clika_ref_conformance.levels import quantization
from clika_ref_conformance.profiles import Profile
from clika_ref_conformance.reporting.replay import replay
from clika_ref_conformance.reproducing.reproducers import write_reproducer
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.targets.identity import Identity
from clika_ref_conformance.verdicts import Verdict
from clika_ref_onnxruntime.explaining import NO_OPTIMIZATIONS

from clika_ref.core.registry import Registry, load_registry
from clika_ref.onnx_export import builder
from clika_ref.onnx_export.int4 import pack_int4, unpack_int4


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry()


def make_suite(registry: Registry, target, folder: Path) -> Suite:
    return Suite(registry, target, Profile("small", drawn=1), folder)


def run_checks(subject: str, suite: Suite):
    return [check.run() for check in quantization.checks(Task("quantization", subject), suite)]


@pytest.mark.slow
def test_quantization_onnxruntime_passes_each_subject(registry, tmp_path):
    """Each subject passes in ONNX Runtime."""
    suite = make_suite(registry, registry.targets["onnxruntime"], tmp_path)
    tasks = quantization.tasks(suite)
    assert [task.subject for task in tasks] == ["quantize+dequantize", "layers", "stored weights", "packing"]
    for task in tasks:
        bad = [(o.name, o.comparison.message) for o in run_checks(task.subject, suite) if o.verdict is not Verdict.PASS]
        assert not bad


@pytest.mark.slow
def test_quantization_eager_passes_each_subject(registry, tmp_path):
    """Eager itself passes."""
    suite = make_suite(registry, Identity(), tmp_path)
    for subject in ("quantize+dequantize", "layers", "stored weights"):
        assert {o.verdict for o in run_checks(subject, suite)} == {Verdict.PASS}


def test_quantization_without_operators_has_no_task(registry, tmp_path):
    """Without the quantization operators there are no tasks."""
    bare = Registry((), {}, {}, {}, {})
    assert quantization.tasks(make_suite(bare, registry.targets["onnxruntime"], tmp_path)) == []


def _truncate(op, x, scale, zero_point, *, dtype, quant_min, quant_max, axis):
    steps = _divide_by_scale(op, x, scale, axis)
    whole = op.Where(op.Less(steps, op.like(steps, 0)), op.Ceil(steps), op.Floor(steps))
    return _clamp_and_cast(op, _add_zero_point(op, whole, x, zero_point, axis), dtype, quant_min, quant_max)


def _round_half_away(op, x, scale, zero_point, *, dtype, quant_min, quant_max, axis):
    steps = _divide_by_scale(op, x, scale, axis)
    away = op.Mul(op.Sign(steps), op.Floor(op.Add(op.Abs(steps), op.like(steps, 0.5))))
    return _clamp_and_cast(op, _add_zero_point(op, away, x, zero_point, axis), dtype, quant_min, quant_max)


def _clamp_before_shift(op, x, scale, zero_point, *, dtype, quant_min, quant_max, axis):
    low, high = _quantized_bounds(dtype, quant_min, quant_max)
    steps = op.Round(_divide_by_scale(op, x, scale, axis))
    clamped = op.Clip(steps, op.like(steps, float(low)), op.like(steps, float(high)))
    return _clamp_and_cast(op, _add_zero_point(op, clamped, x, zero_point, axis), dtype, None, None)


def _use_narrow_range(op, x, scale, zero_point, *, dtype, quant_min, quant_max, axis):
    low = -127 if dtype == torch.int8 and quant_min is None else quant_min
    return _quantize(op, x, scale, zero_point, dtype=dtype, quant_min=low, quant_max=quant_max, axis=axis)


def _use_axis_0(op, x, scale, zero_point, *, dtype, quant_min, quant_max, axis):
    axis = axis and 0
    return _quantize(op, x, scale, zero_point, dtype=dtype, quant_min=quant_min, quant_max=quant_max, axis=axis)


def _drop_range(op, x, scale, zero_point, *, dtype, quant_min, quant_max, axis):
    return _quantize(op, x, scale, zero_point, dtype=dtype, quant_min=None, quant_max=None, axis=axis)


def _multiply_by_reciprocal(op, x, scale, zero_point, *, dtype, quant_min, quant_max, axis):
    factor = op.Reciprocal(_reshape_along_axis(op, x, op.promote(scale, to=torch.float32)[0], axis))
    steps = op.Round(op.Mul(x, factor))
    return _clamp_and_cast(op, _add_zero_point(op, steps, x, zero_point, axis), dtype, quant_min, quant_max)


FAULTS = [
    _truncate,
    _round_half_away,
    _clamp_before_shift,
    _use_narrow_range,
    _use_axis_0,
    _drop_range,
    _multiply_by_reciprocal,
]


def _quantize(*operands, **attrs):
    return QUANTIZE[0](*operands, **attrs)


QUANTIZE: list = []
"""The lowering as it was declared, while a fault takes its place."""


def _reshape_along_axis(op, x, parameter, axis):
    if axis is None:
        return parameter
    return op.Reshape(parameter, op.ints([-1 if i == axis % op.rank(x) else 1 for i in range(op.rank(x))]))


def _divide_by_scale(op, x, scale, axis):
    return op.Div(x, _reshape_along_axis(op, x, op.promote(scale, to=torch.float32)[0], axis))


def _add_zero_point(op, steps, x, zero_point, axis):
    return op.Add(steps, _reshape_along_axis(op, x, op.promote(zero_point, to=torch.float32)[0], axis))


def _quantized_bounds(dtype, quant_min, quant_max):
    info = torch.iinfo(dtype)
    return info.min if quant_min is None else quant_min, info.max if quant_max is None else quant_max


def _clamp_and_cast(op, steps, dtype, quant_min, quant_max):
    low, high = _quantized_bounds(dtype, quant_min, quant_max)
    return op.cast(op.Clip(steps, op.like(steps, float(low)), op.like(steps, float(high))), dtype)


@pytest.mark.slow_cases("_use_narrow_range", "_multiply_by_reciprocal")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_quantization_faulty_lowering_found(registry, tmp_path, monkeypatch, fault):
    """A faulty lowering of quantize is found."""
    quantize = registry.operators["quantize"]
    monkeypatch.setattr(quantize, "lowering", fault)
    QUANTIZE[:] = [LOWERING]
    found = run_checks("quantize+dequantize", make_suite(registry, registry.targets["onnxruntime"], tmp_path))
    assert any(o.verdict.is_failure for o in found)


LOWERING = load_registry().operators["quantize"].lowering


def test_quantization_faulty_reference_fails_contract(registry, tmp_path, monkeypatch):
    """A faulty eager reference is reported as such."""
    quantize = registry.operators["quantize"]
    monkeypatch.setattr(
        quantize,
        "reference",
        lambda x, scale, zero_point, *, dtype, quant_min, quant_max, axis: torch.zeros(x.shape, dtype=dtype),
    )
    suite = make_suite(registry, Identity(), tmp_path)
    wrong = [o for o in run_checks("quantize+dequantize", suite) if o.verdict is Verdict.CONTRACT]
    assert wrong
    assert "the eager reference is wrong" in wrong[0].comparison.message
    again = replay_outcome(wrong[0], "quantize+dequantize", suite)
    assert again.comparison.message == wrong[0].comparison.message


def test_quantization_integer_mismatch_replays(registry, tmp_path, monkeypatch):
    """A failure that only the integers show is found again by replay."""
    suite = make_suite(registry, Identity(), tmp_path)
    monkeypatch.setattr(quantization, "_verify_integers", make_second_run_describer())
    found = run_checks("layers", suite)[0]
    assert (found.verdict, found.comparison.message) == (Verdict.VALUE, "the target")
    monkeypatch.setattr(quantization, "_verify_integers", make_second_run_describer())
    again = replay_outcome(found, "layers", suite)
    assert (again.verdict, again.comparison.message) == (Verdict.VALUE, "the target")


def make_second_run_describer():
    """Return a check that names the target in its second call; eager is checked first, on all inputs."""
    seen = set()
    return lambda _name, _expected, run, _outputs: "the target" if run.name in seen else seen.add(run.name)


def replay_outcome(outcome, subject, suite):
    path = write_reproducer(outcome, Task("quantization", subject), suite, "identity", suite.folder)
    return replay(suite.folder / path, suite.registry)


@pytest.mark.parametrize("name", ["linear per channel", "conv_transpose2d per channel"])
def test_quantization_other_weight_axis_found(registry, tmp_path, monkeypatch, name):
    """Another axis of the weight is found."""
    dequantize = registry.operators["dequantize"]
    right = dequantize.lowering
    assert right is not None
    other = {0: 1, 1: 0, None: None}
    monkeypatch.setattr(
        dequantize, "lowering", lambda *operands, axis, **attrs: right(*operands, axis=other[axis], **attrs)
    )
    as_written = replace(
        registry.targets["onnxruntime"],
        optimization_level=NO_OPTIMIZATIONS,  # fusions ignore the axis
    )  # its fusions read the axis as they like
    suite = make_suite(registry, as_written, tmp_path)
    (check,) = [c for c in quantization.checks(Task("quantization", "layers"), suite) if c.name == name]
    assert check.run().verdict.is_failure


def swap_nibbles(packed):
    return (packed >> 4) | (packed << 4)


def test_quantization_wrong_int4_packing_found(registry, tmp_path, monkeypatch):
    """A constant of four bits that is packed wrongly is found."""
    monkeypatch.setattr(builder, "pack_int4", lambda x: pack_int4(x).roll(1))
    found = run_checks("stored weights", make_suite(registry, registry.targets["onnxruntime"], tmp_path))
    assert [o.name for o in found if o.verdict is Verdict.VALUE] == [w.name for w in STORED_WEIGHTS if w.bits == 4]


def test_quantization_swapped_nibbles_found(registry, tmp_path, monkeypatch):
    """Nibbles that both packing and unpacking swap are found."""
    monkeypatch.setattr(quantization, "pack_int4", lambda x: swap_nibbles(pack_int4(x)))
    monkeypatch.setattr(quantization, "unpack_int4", lambda packed, *rest: unpack_int4(swap_nibbles(packed), *rest))
    found = {o.name: o for o in run_checks("packing", make_suite(registry, Identity(), tmp_path))}
    right = [name for name, outcome in found.items() if not outcome.verdict.is_failure]
    assert right == ["int4-0", "uint4-0"], "nothing to swap"
    assert "is packed as " in found["uint4-3"].comparison.message


@pytest.mark.parametrize("kind", ["int4", "uint4"])
def test_pack_by_rule_equals_onnx_bytes(kind):
    """The expected bytes are those of ONNX."""
    codes = [*range(-8, 8), 3] if kind == "int4" else [*range(16), 3]
    theirs = onnx_ir.tensor(np.array(codes, dtype=getattr(ml_dtypes, kind))).tobytes()
    assert bytes(quantization.pack_by_rule(codes)) == theirs


def test_quantized_layers_pair_sum_exceeds_16_bits():
    """The sum of two MACs exceeds 16 bits, and no sum rounds in float32."""
    (plain,) = [layer for layer in QUANTIZED_LAYERS if layer.name == "matmul"]
    assert plain.axis is None  # so that all weights are 127
    assert 255 * 127 * 2 > 2**15
    assert plain.w[0] * 255 * 128 < 2**24  # and no sum rounds in float32


def test_draw_quantized_ranges_repeat_and_cover_choices():
    """The drawn ranges are the same for a seed and cover all choices."""
    found = draw_quantization_grids(quantization.MIN_RANGES, 0)
    assert [str(g) for g in found] == [str(g) for g in draw_quantization_grids(quantization.MIN_RANGES, 0)]
    assert {g.axis for g in found} == {None, 0, 1, -1}
    assert {(g.dtype, g.low, g.high) for g in found} >= {("int8", -8, 7), ("uint8", 0, 15), ("int8", -127, 127)}
    assert {float(g.scale.flat[0]) for g in found} >= {float(np.float32(1e-40)), 1.0, float(np.float32(1e30))}


def make_grid(scale=1.0, low=-128, high=127, zero=0):
    return QuantizationGrid("int8", low, high, np.asarray(scale, np.float32), np.asarray(zero), None)


def test_make_elements_contain_many_ties():
    """A large share of the elements are ties."""
    share = [
        make_grid().find_ties(x).mean()
        for seed in range(20)
        for name, x in make_elements(make_grid(), seed)
        if name == "halves"
    ]
    assert np.mean(share) > 0.3
    assert all(x.shape == ELEMENTS_SHAPE for _, x in make_elements(make_grid(), 0))


def test_quantize_rounds_half_to_even_and_saturates():
    """Codes round half to even and saturate."""
    x = np.array([-np.inf, -2.5, -0.5, 0.5, 1.5, 1e9], np.float32)
    assert make_grid().quantize(x).tolist() == [-128, -2, 0, 0, 2, 127]
    assert make_grid(zero=127).quantize(x).tolist() == [-128, 125, 127, 127, 127, 127]


@pytest.mark.parametrize(
    ("x", "code", "value", "message"),
    [
        (0.4, 1, 1.0, "the error exceeds half a step"),
        (200.0, 126, 126.0, "expected 127"),
        (-200.0, -127, -127.0, "expected -128"),
        (0.4, 0, 0.0, None),
        (127.3, 127, 127.0, None),
    ],
)
def test_find_error_allows_half_step(x, code, value, message):
    """The error is half a step at most."""
    found = make_grid().find_error(np.array([x], np.float32), np.array([code]), np.array([value], np.float32))
    assert found is None if message is None else message in found
