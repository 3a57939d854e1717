"""Random operators in ONNX Runtime: type, range and moments, and no random numbers in eval mode."""

from __future__ import annotations

import math

import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from clika_ref_aten import dropout, randomness
from clika_ref_aten.plugin import clika_ref_operators
from one_operator import Case, build_case_graph, draw_case, run_onnx

from clika_ref.core.inference import infer_types
from clika_ref.core.ir import Graph, Node
from clika_ref.core.types import TensorType
from clika_ref.onnx_export.emission import emit

aten = torch.ops.aten
RANDOM = sorted((op for op in clika_ref_operators() if op.random), key=lambda op: op.name)
DROPOUTS = [dropout.dropout, dropout.feature_dropout, dropout.alpha_dropout, dropout.feature_alpha_dropout]
COUNT = 40_000
SIX_SIGMA = 6  # a mean of COUNT draws strays further once in 10**9 runs


def run(op, *operands, **attrs):
    call = op.call(*operands, **attrs)
    case = Case(op, list(call.operands), call.attrs)
    return run_onnx(build_case_graph(case), case.tensors)


def assert_moments(values, mean, deviation):
    """Check the mean within six of its standard errors, and the deviation within 10 %."""
    values = values.double()
    assert abs(float(values.mean()) - mean) < SIX_SIGMA * deviation / math.sqrt(values.numel())
    assert float(values.std()) == pytest.approx(deviation, rel=0.1)


@pytest.mark.parametrize("op", RANDOM, ids=lambda op: op.name)
def test_random_operators_have_types_of_eager(op):
    """Random tensors have eager's types."""
    for seed in range(12):
        case = draw_case(op, seed)
        found = [(r.dtype, r.shape) for r in run_onnx(build_case_graph(case), case.tensors)]
        assert found == [(r.dtype, r.shape) for r in case.eager()], str(case)


@pytest.mark.parametrize("op", [randomness.rand, randomness.randn, randomness.randperm], ids=lambda op: op.name)
def test_random_calls_and_runs_draw_different_numbers(op):
    """Neither two calls nor two runs draw the same numbers."""
    graph = Graph("draws")
    call = op.call(**({"n": 100} if op is randomness.randperm else {"size": (100,)}))
    for _ in range(2):
        graph.add_output(graph.insert(Node(op, (), call.attrs), infer_types(op, (), call.attrs)).output)
    session = ort.InferenceSession(ir.to_proto(emit(graph)).SerializeToString(), providers=["CPUExecutionProvider"])
    drawn = {tuple(values) for _ in range(2) for values in session.run(None, {})}
    assert len(drawn) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_rand_and_uniform_fill_their_interval(dtype):
    """Uniform numbers fill their interval."""
    (values,) = run(randomness.rand, size=(COUNT,), dtype=dtype)
    assert values.min() >= 0
    assert values.max() < 1
    assert_moments(values, 0.5, math.sqrt(1 / 12))
    (values,) = run(randomness.uniform, torch.zeros(COUNT, dtype=dtype), low=-3.0, high=5.0)
    assert_moments(values, 1.0, 8 * math.sqrt(1 / 12))


def test_normal_has_given_moments():
    """Normal numbers have the given moments."""
    assert_moments(run(randomness.randn, size=(COUNT,))[0], 0, 1)
    assert_moments(run(randomness.normal, -2.0, 3.0, size=(COUNT,))[0], -2, 3)
    mean, std = torch.full((COUNT,), 5.0), torch.full((COUNT,), 0.5)
    for operands in ((mean, std), (5.0, std), (mean, 0.5)):
        assert_moments(run(randomness.normal, *operands)[0], 5, 0.5)
    (logs,) = run(randomness.log_normal, torch.zeros(COUNT), mean=0.5, std=0.2)
    assert_moments(logs.log(), 0.5, 0.2)


def test_exponential_finite_with_given_mean():
    """Exponential numbers are finite and have the given mean."""
    (values,) = run(randomness.exponential, torch.zeros(COUNT), lambd=4.0)
    assert values.isfinite().all()
    assert values.min() >= 0
    assert_moments(values, 0.25, 0.25)


def test_randint_reaches_both_limits():
    """Random integers reach both limits and pass neither."""
    (values,) = run(randomness.randint, low=-2, high=3, size=(COUNT,))
    assert values.unique().tolist() == [-2, -1, 0, 1, 2]
    assert_moments(values, 0, math.sqrt(2))


def test_randperm_contains_each_number_once():
    """A permutation contains every number once."""
    (order,) = run(randomness.randperm, n=500)
    assert order.sort().values.tolist() == list(range(500))


def test_bernoulli_frequency_equals_probability():
    """Bernoulli draws ones with the given probability."""
    chance = torch.full((COUNT,), 0.2)
    for operands in ((chance,), (torch.zeros(COUNT), 0.2), (torch.zeros(COUNT), chance)):
        (values,) = run(randomness.bernoulli, *operands)
        assert values.unique().tolist() == [0, 1]
        assert_moments(values, 0.2, 0.4)
    assert run(randomness.bernoulli, torch.zeros(COUNT))[0].max() == 0
    assert run(randomness.bernoulli, torch.ones(COUNT))[0].min() == 1


def test_multinomial_draws_in_proportion():
    """Multinomial draws in proportion, and never the impossible."""
    chances = torch.tensor([[1.0, 0.0, 3.0, 2.0]])
    (many,) = run(randomness.multinomial, chances, num_samples=COUNT, replacement=True)
    assert many.unique().tolist() == [0, 2, 3]
    assert_moments((many == 2).float(), 0.5, 0.5)
    (rows,) = run(randomness.multinomial, chances.expand(COUNT, 4).contiguous(), num_samples=3)
    assert rows.sort(1).values.unique(dim=0).tolist() == [[0, 2, 3]]
    assert_moments((rows[:, 0] == 2).float(), 0.5, 0.5)


@pytest.mark.parametrize("op", DROPOUTS, ids=lambda op: op.name)
def test_dropout_without_drops_returns_input(op):
    """Dropout returns its input in evaluation and where nothing is dropped."""
    x = torch.randn(3, 4, 5)
    assert torch.equal(run(op, x, p=0.5, train=False)[0], x)
    assert torch.equal(run(op, x, p=0.0, train=True)[0], x)
    assert not run(op, x, p=1.0, train=True)[0].any()


def test_dropout_drops_share_and_scales_rest():
    """Dropout drops the given share and scales the rest."""
    (y,) = run(dropout.dropout, torch.ones(COUNT), p=0.2, train=True)
    assert y.unique().tolist() == [0, 1.25]
    assert_moments(y, 1, 0.5)
    y, mask = run(dropout.native_dropout, torch.ones(COUNT), p=0.2, train=True)
    assert torch.equal(mask, y != 0)
    assert_moments(mask.float(), 0.8, 0.4)


def test_feature_dropout_drops_whole_channels():
    (y,) = run(dropout.feature_dropout, torch.ones(200, 200, 3, 2), p=0.2, train=True)
    assert torch.equal(y.amin((2, 3)), y.amax((2, 3)))
    assert_moments(y[:, :, 0, 0], 1, 0.5)
    assert not torch.equal(y[:, 0], y[:, 1])


@pytest.mark.parametrize("op", DROPOUTS[2:], ids=lambda op: op.name)
def test_alpha_dropout_keeps_mean_and_deviation(op):
    (y,) = run(op, torch.randn(COUNT, 1), p=0.3, train=True)
    assert_moments(y, 0, 1)
    (y,) = run(op, torch.ones(COUNT, 1), p=0.3, train=True)
    expected = torch.alpha_dropout(torch.ones(COUNT), 0.3, train=True)
    torch.testing.assert_close(y.unique(), expected.unique())


def test_rrelu_mean_slope_in_eval_random_in_training():
    """rrelu uses the mean slope in evaluation and random ones in training."""
    x = torch.tensor([-2.0, 3.0])
    (y,) = run(dropout.rrelu, x, lower=0.1, upper=0.3)
    torch.testing.assert_close(y, torch.rrelu(x, 0.1, 0.3))
    (y,) = run(dropout.rrelu, torch.full((COUNT,), -1.0), lower=0.1, upper=0.3, training=True)
    assert_moments(-y, 0.2, 0.2 * math.sqrt(1 / 12))


CONVERSIONS = [
    (aten.rand_like.default, ("x",), {"dtype": torch.float64}, ((), {"size": (2, 3), "dtype": torch.float64})),
    (aten.randn_like.default, ("x",), {}, ((), {"size": (2, 3), "dtype": torch.float32})),
    (aten.randint.default, (5, [4]), {}, ((), {"low": 0, "high": 5, "size": (4,), "dtype": None})),
    (aten.randint.low, (2, 5, [4]), {}, ((), {"low": 2, "high": 5, "size": (4,), "dtype": None})),
    (aten.randint_like.default, ("x", 5), {}, ((), {"low": 0, "high": 5, "size": (2, 3), "dtype": torch.float32})),
    (aten.randint_like.low_dtype, ("x", 2, 5), {}, ((), {"low": 2, "high": 5, "size": (2, 3), "dtype": torch.float32})),
    (aten.random.default, ("x",), {}, ((), {"low": 0, "high": 2**24 + 1, "size": (2, 3), "dtype": torch.float32})),
    (aten.random.to, ("x", 7), {}, ((), {"low": 0, "high": 7, "size": (2, 3), "dtype": torch.float32})),
    (aten.native_dropout.default, ("x", 0.1, None), {}, (("x",), {"p": 0.1, "train": True})),
    (aten.native_dropout.default, ("x", 0.1, False), {}, (("x",), {"p": 0.1, "train": False})),
    (aten.bernoulli.p, ("x",), {}, (("x", 0.5), {})),
    (aten.randperm.default, (5,), {}, ((), {"n": 5})),
    (aten.normal_functional.default, ("x", 1.0), {}, ((1.0, 1.0), {"size": (2, 3), "dtype": torch.float32})),
]


@pytest.mark.parametrize(("overload", "args", "kwargs", "expected"), CONVERSIONS, ids=lambda v: str(v)[:40])
def test_converted_random_aten_calls_keep_shape_and_bounds(overload, args, kwargs, expected):
    """Random ATen calls become draws of the same shape and bounds."""
    x = Graph("calls").add_input(TensorType(torch.float32, (2, 3)), "x")
    op = next(op for op in RANDOM if overload in op.converters)
    call = op.converters[overload](*[x if a == "x" else a for a in args], **kwargs)
    operands, attrs = expected
    assert call.operands == tuple(x if o == "x" else o for o in operands)
    assert call.attrs == {**op.attributes, **attrs}


def test_converted_uniform_reads_bounds_by_position_and_name():
    """The bounds of aten.uniform are read by position and by name."""
    x = Graph("calls").add_input(TensorType(torch.float32, (2, 3)), "x")
    convert = randomness.uniform.converters[aten.uniform.default]
    assert convert(x, -1.0, 2.0).attrs == convert(x, **{"from": -1.0, "to": 2.0}).attrs == {"low": -1.0, "high": 2.0}
