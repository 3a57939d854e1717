"""Statistics of an activation: exact min/max, mean min/max, and no masked elements."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from seeded_tensors import randn

from clika_ref.quantization.calibration.statistics import (
    MAX_SAMPLED_ELEMENTS,
    ExactSum,
    Statistics,
    flatten_in_memory_order,
    measure_tensor,
    sample_evenly,
)


def measure(*batches):
    found = Statistics()
    for batch in batches:
        found.add(measure_tensor(torch.as_tensor(batch)))
    return found


@given(st.lists(st.floats(-1e15, 1e15), max_size=30))
def test_exact_sum_independent_of_order(numbers):
    """A sum is exact in every order."""
    found = []
    for order in (numbers, numbers[::-1], sorted(numbers)):
        total = ExactSum()
        for x in order:
            total.add(x)
        found.append(total.value)
    assert found == [math.fsum(numbers)] * 3


def test_statistics_min_max_and_batch_means():
    """Min/max cover all elements, and the means those of the batches."""
    found = measure([-1.0, 0.0, 3.0], [-3.0, 1.0])
    assert (found.low, found.high) == (-3.0, 3.0)
    assert found.mean_min_max == (-2.0, 2.0)
    assert found.histogram.total == 5


def test_statistics_min_max_exact_with_sampled_histogram():
    """Min/max are exact although only some elements are counted."""
    x = torch.zeros(10 * MAX_SAMPLED_ELEMENTS)
    x[1], x[2] = -7.0, 9.0
    found = measure(x)
    assert (found.low, found.high) == (-7.0, 9.0)
    assert found.histogram.total <= MAX_SAMPLED_ELEMENTS


def test_statistics_merge_equals_add():
    """Merging equals adding all batches."""
    batches = [randn(7, seed=i) * 3**i for i in range(6)]
    whole = measure(*batches)
    shuffled = random.Random(0).sample(batches, len(batches))
    merged = measure(*shuffled[:2])
    merged.merge(measure(*shuffled[2:]))
    assert (merged.low, merged.high, merged.batches) == (whole.low, whole.high, whole.batches)
    assert merged.mean_min_max == whole.mean_min_max
    assert torch.equal(merged.histogram.counts, whole.histogram.counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("is_infinite", [True, False])
def test_statistics_mask_values_excluded(dtype, is_infinite):
    """Mask values are excluded from the range."""
    mask = -math.inf if is_infinite else torch.finfo(dtype).min
    found = measure(torch.tensor([0.5, mask, -2.0], dtype=dtype))
    assert found.is_unbounded
    assert (found.low, found.high) == (-2.0, 0.5)
    assert found.mean_min_max == (-2.0, 0.5)
    assert found.histogram.total == 2


def test_statistics_masks_only_or_empty_tensor_stay_empty():
    """Tensors of masks alone or without elements give empty statistics."""
    found = measure(torch.full((3,), -math.inf), torch.zeros(0))
    assert found.is_empty
    assert found.is_unbounded
    empty = measure(torch.zeros(0))
    assert not empty.is_unbounded
    empty.merge(found)
    assert empty.is_unbounded


def test_sample_evenly_covers_every_column():
    """Samples come from every column."""
    x = torch.arange(64 * 256)
    places = sample_evenly(x).long()
    assert len(places) <= MAX_SAMPLED_ELEMENTS
    assert len(set((places % 256).tolist())) == 256


@pytest.mark.parametrize(
    ("view", "is_view"),
    [
        (lambda x: x, True),
        (lambda x: x.T, True),
        (lambda x: x[1], True),
        (lambda x: x.reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last), True),
        (lambda x: x[:, :2], False),
        (lambda x: x[:, ::2], False),
        (lambda x: x[:1].expand(3, 6), False),
    ],
)
def test_flatten_in_memory_order_keeps_elements_without_copy(view, is_view):
    """All elements are kept, without a copy where the memory layout allows it."""
    x = view(torch.arange(24.0).reshape(4, 6))
    found = flatten_in_memory_order(x)
    assert sorted(found.tolist()) == sorted(x.flatten().tolist())
    assert (found.data_ptr() == x.data_ptr()) is is_view


@pytest.mark.parametrize(
    "shape", [(4, 21, 32, 32), (4, 120, 28, 28), (4, 255, 8, 8), (1, 3, 224, 224), (4, 672, 14, 14)]
)
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_sample_evenly_covers_channels_in_any_memory_format(shape, form):
    """Every channel and column is sampled, in any memory format."""
    places = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape).contiguous(memory_format=form)
    found = sample_evenly(flatten_in_memory_order(places)).long()
    _, channels, _, columns = shape
    assert MAX_SAMPLED_ELEMENTS // 2 < len(found) <= MAX_SAMPLED_ELEMENTS
    for side, behind in ((channels, shape[2] * shape[3]), (columns, 1)):
        counts = torch.bincount(found // behind % side, minlength=side)
        assert counts.min() * side > len(found) / 2
