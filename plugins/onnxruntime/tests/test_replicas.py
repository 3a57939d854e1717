"""The declared formulas of ONNX Runtime's kernels: the runtime computes them, and eager does not."""

import math

import pytest
import torch
from clika_ref_onnxruntime import replicas
from clika_ref_onnxruntime.target import OnnxRuntime

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph
from clika_ref.core.registry import load_registry
from clika_ref.core.types import TensorType

OPERATORS = load_registry().operators
LEAST, GREATEST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max


def run(folder, call):
    """Compile one call and run it in ONNX Runtime."""
    graph = Graph("one")
    tensors = [o for o in call.operands if isinstance(o, torch.Tensor)]
    values = iter([graph.add_input(TensorType(t.dtype, tuple(t.shape)), f"x{i}") for i, t in enumerate(tensors)])
    operands = [next(values) if isinstance(o, torch.Tensor) else o for o in call.operands]
    found = Builder(graph, OPERATORS)(call.name, *operands, **call.attrs)
    for value in found if isinstance(found, tuple) else (found,):
        graph.add_output(value)
    return OnnxRuntime().load(OnnxRuntime().compile(graph, folder / "one.onnx"))(tensors)


class Call:
    def __init__(self, name, *operands, **attrs):
        full = OPERATORS[name].call(*operands, **attrs)
        self.name, self.operands, self.attrs = name, full.operands, full.attrs


BOUNDS = torch.tensor([[LEAST, 3, GREATEST], [1, 2, 4], [2**40, 2**40, 2**40 + 1]])
LARGE = torch.tensor([2**53 + 1, 5, LEAST, 2, 7]).expand(1, 5, 5)
CASES = [
    ("prod", "multiply_integers", Call("prod", BOUNDS, dim=-1, keepdim=True)),
    ("prod of all", "multiply_integers", Call("prod", BOUNDS)),
    ("pow", "raise_integers", Call("pow", 3, torch.tensor([2, 35, 90, LEAST]))),
    ("pow of int32", "raise_integers", Call("pow", 2, torch.tensor([2, 31, 40, -1], dtype=torch.int32))),
    ("pow of tensors", "raise_integers", Call("pow", BOUNDS, torch.tensor([[0, 1, 2], [3, 4, 5], [2, 3, 1]]))),
    ("max_pool2d", "max_pool2d", Call("max_pool2d", LARGE, kernel_size=(2, 2))),
    ("max_pool2d_with_indices", "max_pool2d_with_indices", Call("max_pool2d_with_indices", LARGE, kernel_size=(2, 2))),
    ("max_pool3d", "max_pool3d", Call("max_pool3d", LARGE[None], kernel_size=(1, 2, 2))),
]


def as_list(found):
    return [found] if isinstance(found, torch.Tensor) else list(found)


@pytest.mark.parametrize(("replica", "call"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_replicas_of_large_integers_equal_onnxruntime(tmp_path, replica, call):
    """Replicas equal ONNX Runtime for integers beyond float64; eager does not."""
    actual = run(tmp_path, call)
    expected = as_list(getattr(replicas, replica)(*call.operands, **call.attrs))
    eager = as_list(OPERATORS[call.name](*call.operands, **call.attrs))
    assert [(a.tolist(), a.dtype) for a in actual] == [(e.tolist(), e.dtype) for e in expected]
    assert any(not torch.equal(a, e) for a, e in zip(actual, eager, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_multiply_integers_other_dtype_equals_eager(dtype):
    """Integers multiplied to other dtypes equal eager's."""
    x = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    assert replicas.multiply_integers(x, dim=None, keepdim=False, dtype=dtype).item() == 24


def test_group_norm_replica_keeps_infinite_weight(tmp_path):
    """An infinite weight of a group norm stays infinite."""
    call = Call("group_norm", torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([1.0, 1.0, math.inf]), None, num_groups=1)
    (actual,) = run(tmp_path, call)
    (expected,) = as_list(replicas.group_norm(*call.operands, **call.attrs))
    assert torch.equal(actual.isinf(), expected.isinf())
    assert OPERATORS["group_norm"](*call.operands, **call.attrs).isnan().any()


@pytest.mark.parametrize("weight", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("count", [1, 6])
def test_prelu_replica_infinite_weight_keeps_zeros(tmp_path, weight, count):
    """An infinite weight of prelu leaves zeros unchanged."""
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, math.inf, math.nan]).reshape(1, 6)
    call = Call("prelu", x, torch.full((count,), weight))
    (actual,) = run(tmp_path, call)
    torch.testing.assert_close(actual, replicas.prelu(*call.operands), rtol=0, atol=0, equal_nan=True)
    assert OPERATORS["prelu"](*call.operands)[0, 0].isnan()


@pytest.mark.parametrize("reduce", ["amax", "amin", "sum"])
@pytest.mark.parametrize("include_self", [False, True])
def test_scatter_min_max_later_numbers_replace_nan(tmp_path, reduce, include_self):
    """Scattered maxima and minima lose NaN to later numbers."""
    x, index = torch.tensor([[math.nan, 1.0, 2.0]] * 2), torch.tensor([[0, 1, 1, 2]])
    src = torch.tensor([[5.0, math.nan, 0.5, math.nan]])
    call = Call("scatter_reduce", x, index, src, dim=1, reduce=reduce, include_self=include_self)
    (actual,) = run(tmp_path, call)
    expected = replicas.scatter_min_max(*call.operands, **call.attrs)
    assert torch.equal(actual.nan_to_num(7), expected.nan_to_num(7)), (actual, expected)
    eager = OPERATORS["scatter_reduce"](*call.operands, **call.attrs)
    assert torch.equal(expected.isnan(), eager.isnan()) is (reduce == "sum")


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("last", [False, True])
def test_bag_min_max_later_numbers_replace_nan(tmp_path, mode, padding_idx, last):
    """The maximum of a bag loses NaN to later numbers."""
    weight = torch.tensor([[math.nan, 1.0], [0.5, math.nan], [2.0, -math.inf], [math.nan, 7.0]])
    indices, offsets = torch.tensor([0, 2, 1, 1, 3, 2, 0]), torch.tensor([0, 2, 4, 4, 7])
    attrs = {"mode": mode, "padding_idx": padding_idx, "include_last_offset": last}
    call = Call("embedding_bag", weight, indices, offsets, None, **attrs)
    (actual,) = run(tmp_path, call)
    expected = replicas.scatter_or_bag_min_max(*call.operands, **call.attrs)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    eager = OPERATORS["embedding_bag"](*call.operands, **call.attrs)
    assert torch.equal(expected.isnan(), eager.isnan()) is (mode != replicas.MAX_MODE)


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_grid_sampler_replica_rounds_before_reflection(tmp_path, dtype, size, align_corners):
    """A point between two elements is rounded before it is reflected."""
    points = torch.arange(-6, 6.5, 0.5, dtype=dtype)
    grid = torch.cartesian_prod(*[points] * size).reshape(1, -1, *[1] * (size - 1), size)
    x = torch.arange(2.0**size, dtype=dtype).reshape(1, 1, *[2] * size)
    attrs = {"interpolation_mode": 1, "padding_mode": 2, "align_corners": align_corners}
    call = Call("grid_sampler", x, grid, **attrs)
    (actual,) = run(tmp_path, call)
    assert torch.equal(actual, replicas.grid_sampler(*call.operands, **call.attrs))
    eager = OPERATORS["grid_sampler"](*call.operands, **call.attrs)
    assert torch.equal(actual, eager) is align_corners  # then reflected positions stay even or odd, and so do halves


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("padding_mode", [0, 1, 2])
@pytest.mark.parametrize("special", [math.nan, math.inf])
def test_grid_sampler_replica_reads_beyond_border(tmp_path, special, padding_mode, align_corners):
    """A grid reads neighbours beyond the border."""
    points = torch.tensor([-1.5, -1.0, -0.9, 0.0, 0.5, 1.0, 1.5])
    grid = torch.cartesian_prod(points, points)[None, :, None]
    for place in range(9):
        x = torch.arange(9.0)
        x[place] = special
        attrs = {"interpolation_mode": 0, "padding_mode": padding_mode, "align_corners": align_corners}
        call = Call("grid_sampler", x.reshape(1, 1, 3, 3), grid, **attrs)
        (actual,) = run(tmp_path, call)
        expected = replicas.grid_sampler(*call.operands, **call.attrs)
        for kind in (torch.isnan, torch.isposinf):
            assert torch.equal(kind(actual), kind(expected)), place


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("padding_mode", [0, 1, 2])
@pytest.mark.parametrize(("size", "interpolation_mode"), [(2, 0), (2, 1), (2, 2), (3, 0), (3, 1)])
def test_grid_sampler_replica_nonfinite_point_at_first_border(
    tmp_path, size, interpolation_mode, padding_mode, align_corners
):
    """A point that is not finite is moved to the first border."""
    points = torch.tensor([math.nan, math.inf, -math.inf, 0.25, 3e38])
    grid = torch.cartesian_prod(*[points] * size).reshape(1, -1, *[1] * (size - 1), size)
    x = torch.arange(2 * 3.0 * 4 ** (size - 1)).reshape(1, 2, 3, *[4] * (size - 1))
    attrs = {"interpolation_mode": interpolation_mode, "padding_mode": padding_mode, "align_corners": align_corners}
    call = Call("grid_sampler", x, grid, **attrs)
    (actual,) = run(tmp_path, call)
    torch.testing.assert_close(actual, replicas.grid_sampler(*call.operands, **call.attrs))


@pytest.mark.parametrize(("x", "y"), [(torch.tensor([3, 2]), 40), (torch.tensor([3, 2]), torch.tensor([0.5, 2.0]))])
def test_raise_integers_small_powers_equal_eager(x, y):
    """Powers that need no float64 equal eager's."""
    assert torch.equal(replicas.raise_integers(x, y), torch.pow(x, y))
