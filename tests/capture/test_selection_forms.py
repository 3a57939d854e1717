"""Selections, pooling and histograms as simpler calls: equal to PyTorch's kernels, in the module and in the file."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from clika_ref import ModelError, clika_compile
from clika_ref.capture.forms.histogram_forms import HISTOGRAM_FORMS
from clika_ref.capture.forms.selection_forms import SELECTION_FORMS

aten = torch.ops.aten


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_form_equals_kernel(forms, overload, *args, **kwargs):
    found, expected = forms[overload](*args, **kwargs), overload(*args, **kwargs)
    pairs = [(found, expected)] if isinstance(found, torch.Tensor) else zip(found, expected, strict=True)
    for a, e in pairs:
        torch.testing.assert_close(a, list(e) if isinstance(a, list) else e, rtol=1e-6, atol=1e-6, equal_nan=True)


LENGTHS = torch.tensor([2, 0, 3, 1])


@pytest.mark.parametrize("reduce", ["max", "min", "sum", "mean", "prod"])
@pytest.mark.parametrize("initial", [None, 0.5])
def test_segment_reduce_form_equals_kernel(reduce, initial):
    for data in (draw(6), draw(6, 3)):
        for given in ({"lengths": LENGTHS}, {"offsets": torch.tensor([0, 2, 2, 5, 6])}):
            overload = aten.segment_reduce.default
            assert_form_equals_kernel(SELECTION_FORMS, overload, data, reduce, **given, axis=0, initial=initial)
    batch = {"lengths": torch.tensor([[2, 1], [0, 3]]), "axis": 1, "initial": initial}
    assert_form_equals_kernel(SELECTION_FORMS, aten.segment_reduce.default, draw(2, 3, 2), reduce, **batch)


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_fractional_max_pool_form_equals_kernel(rank, batch):
    overload = aten.fractional_max_pool2d.default if rank == 2 else aten.fractional_max_pool3d.default
    x = draw(*batch, 3, 7, 9, 8)
    x = x if rank == 3 else x[..., 0]
    samples = torch.rand(batch[0] if batch else 1, 3, rank, generator=torch.Generator().manual_seed(1))
    for kernel, sizes in ((2, (3, 4, 5)), (3, (1, 2, 5))):
        assert_form_equals_kernel(SELECTION_FORMS, overload, x, [kernel] * rank, sizes[:rank], samples)


@pytest.mark.parametrize("size", [0, 2, 5, 20])
def test_nonzero_static_form_equals_kernel(size):
    for x in (draw(3, 4) > 0, draw(5).round(), torch.zeros(2, 2), torch.tensor(1.0), torch.zeros(0, 3)):
        assert_form_equals_kernel(SELECTION_FORMS, aten.nonzero_static.default, x, size=size, fill_value=-7)


def test_masked_index_form_ignores_indices_out_of_range():
    x, mask = draw(4, 5), torch.tensor([True, False, True])
    indices = [torch.tensor([3, 99, -1]), None]
    assert_form_equals_kernel(SELECTION_FORMS, aten._unsafe_masked_index.default, x, mask[:, None], indices, 2.0)
    put = aten._unsafe_masked_index_put_accumulate.default
    assert_form_equals_kernel(SELECTION_FORMS, put, x, mask[:, None], indices, draw(3, 5))


@pytest.mark.parametrize("density", [False, True])
def test_histogram_forms_equal_kernels(density):
    x = torch.cat([draw(50), torch.tensor([-1.0, 1.0, 0.0, 3.0])])
    bins, pair = HISTOGRAM_FORMS, aten.histogram.bin_ct
    for options in ({}, {"range": [-1.0, 1.0]}, {"weight": draw(54, seed=1).abs(), "range": [-2.0, 2.0]}):
        assert_form_equals_kernel(bins, pair, x, 7, **options, density=density)
    edges = torch.tensor([-1.0, 0.0, 0.5, 3.0])
    assert_form_equals_kernel(bins, aten.histogram.bins_tensor, x, edges, density=density)
    for options in ({"bins": [2, 3]}, {"bins": [2, 2], "range": [-1.0, 1.0, -0.5, 2.0], "weight": draw(27).abs()}):
        assert_form_equals_kernel(bins, aten.histogramdd.default, x.reshape(-1, 2), **options, density=density)
    assert_form_equals_kernel(bins, aten.histogramdd.TensorList_bins, x.reshape(-1, 2), [edges, edges], density=density)


def test_histogram_of_equal_values_equals_kernel():
    assert_form_equals_kernel(HISTOGRAM_FORMS, aten.histogram.bin_ct, torch.full((3,), 2.0), 4)


def select(x):
    hist, edges = torch.histogram(x.flatten(), 5)
    runs, inverse, counts = torch.unique_consecutive(x.round(), return_inverse=True, return_counts=True)
    return (
        *(hist, edges, runs, inverse, counts),
        torch.nonzero_static(x > 0, size=6),
        torch.segment_reduce(x.mT.contiguous(), "mean", lengths=LENGTHS, axis=0, unsafe=True),
    )


def test_selections_compiled_and_exported(tmp_path):
    module = clika_compile(select, tracing_inputs=[draw(3, 6), draw(4, 6)])
    for size in (1, 7):
        for found, expected in zip(module(draw(size, 6)), select(draw(size, 6)), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    module.clika_export(tmp_path / "model.onnx")  # compares the file with the module


def test_fractional_max_pool_draws_windows(tmp_path):
    """The windows are random in the module and in the file."""
    module = clika_compile(lambda x: F.fractional_max_pool2d(x, 2, 4), tracing_inputs=[draw(2, 3, 9, 9)])
    x = draw(2, 3, 9, 9)
    assert len({tuple(module(x).flatten().tolist()) for _ in range(4)}) > 1
    assert bool(torch.isin(module(x), x).all())
    module.clika_export(tmp_path / "model.onnx")


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_unique_consecutive_exported_with_dynamic_size(dim, tmp_path):
    def call(x):
        return torch.unique_consecutive(x, return_inverse=True, return_counts=True, dim=dim)

    inputs = [torch.tensor([[1, 1, 2], [1, 1, 2], [3, 1, 2]]), torch.tensor([[0, 0, 1], [1, 1, 1]])]
    module = clika_compile(call, tracing_inputs=inputs)
    for x in (*inputs, torch.tensor([[2, 2, 2]]), torch.arange(12).reshape(4, 3) // 5):
        for found, expected in zip(module(x), call(x), strict=True):
            assert torch.equal(found, expected)
    module.clika_export(tmp_path / "model.onnx")


def test_resized_tensor_equals_eager(tmp_path):
    def call(x):
        first, second = x.clone(), x.clone()
        first.resize_(3, 8).mul_(2)
        return first, second.resize_(2, 3) + 1, x.clone().resize_as_(first)

    module = clika_compile(call, tracing_inputs=[draw(4, 6)])
    for found, expected in zip(module(draw(4, 6, seed=1)), call(draw(4, 6, seed=1)), strict=True):
        assert torch.equal(found, expected)
    module.clika_export(tmp_path / "model.onnx")


def test_resize_to_more_elements_rejected():
    with pytest.raises(ModelError, match="reads uninitialized memory"):
        clika_compile(lambda x: x.clone().resize_(9, 9).shape[0] * x, tracing_inputs=[draw(4, 6)])


CALLS = {
    "native_batch_norm": lambda *tensors: aten.native_batch_norm(*tensors, True, 0.3, 1e-5),
    "legit": lambda *tensors: aten._native_batch_norm_legit(*tensors, True, 0.3, 1e-5),
    "with_update": lambda *tensors: aten._batch_norm_with_update(*tensors, 0.3, 1e-5)[:3],
}


class StatisticsNorm(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, x):
        norm = self.norm
        return self.call(x, norm.weight, norm.bias, norm.running_mean, norm.running_var)


@pytest.mark.parametrize("name", CALLS)
def test_batch_norm_with_statistics_updates_them(name, tmp_path):
    model, same = StatisticsNorm(CALLS[name]), StatisticsNorm(CALLS[name])
    module = clika_compile(model, tracing_inputs=[draw(4, 3, 5), draw(6, 3, 7)])
    for x in (draw(5, 3, 4), draw(2, 3, 9)):
        for found, expected in itertools.zip_longest(module(x), same(x)):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(module.state_dict()["norm.running_var"], same.norm.running_var)
    torch.testing.assert_close(module.state_dict()["norm.running_mean"], same.norm.running_mean)
    module.clika_export(tmp_path / "model.onnx")
