"""Lowerings of tensors without elements give the results of eager, which runtimes do not define."""

from __future__ import annotations

import pytest
import torch
from clika_ref_aten import normalization, reduction, scattering, searching, sorting, variance
from one_operator import Case, build_case_graph, run_onnx

INSTANCES = {"momentum": 0.1, "per_instance": True}


@pytest.mark.parametrize(
    ("op", "operands", "attrs"),
    [
        (reduction.mean, [torch.empty(2, 0)], {"dim": (1,)}),
        (reduction.mean, [torch.empty(0, 2)], {"dtype": torch.float64}),
        (variance.var_mean, [torch.empty(2, 3, 0)], {"dim": (2,), "correction": 0}),
        (variance.var, [torch.empty(2, 3, 0)], {"dim": (-1, 1), "correction": 0, "keepdim": True}),
        (sorting.flat_median, [torch.empty(3, 0)], {}),
        (sorting.flat_median, [torch.empty(3, 0, dtype=torch.int32)], {}),
        (sorting.max_, [torch.empty(0, 2)], {"dim": -1}),
        (sorting.min_, [torch.empty(2, 5, 0, dtype=torch.int64)], {"dim": -3, "keepdim": True}),
        (searching.searchsorted, [torch.ones(2, 0, 3), torch.ones(2, 0, 5), None], {}),
        (searching.searchsorted, [torch.ones(3), torch.ones(4, 0), None], {"right": True}),
        (scattering.index_put, [torch.empty(0, 2), torch.empty(0, 1), None, torch.tensor([1])], {}),
        (scattering.index_add, [torch.empty(5, 0), torch.tensor([1, 4]), torch.empty(2, 0)], {"dim": 0}),
        (scattering.index_add, [torch.empty(3, 0), torch.tensor([0]), torch.ones(3, 1)], {"dim": 1}),
        (normalization.group_norm, [torch.empty(3, 4, 0), None, None], {"num_groups": 2}),
        (normalization.group_norm, [torch.empty(3, 2, 0, dtype=torch.half), None, None], {"num_groups": 1}),
        (normalization.running_mean_update, [torch.empty(4, 2, 0), torch.ones(2)], {"momentum": 0.1}),
        (normalization.running_var_update, [torch.empty(0, 2, 3), torch.ones(2)], {"momentum": 0.1}),
        (normalization.running_mean_update, [torch.empty(0, 2, 3), torch.ones(2)], INSTANCES),
        (normalization.running_var_update, [torch.empty(3, 2, 0), torch.ones(2)], INSTANCES),
    ],
    ids=lambda part: getattr(part, "name", ""),
)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")
def test_lowering_of_empty_tensors_equals_eager(op, operands, attrs):
    """Lowerings of empty tensors return eager's results."""
    call = op.call(*operands, **attrs)
    case = Case(op, list(call.operands), call.attrs)
    for expected, actual in zip(case.eager(), run_onnx(build_case_graph(case), case.tensors), strict=True):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert torch.equal(actual.nan_to_num(7.0), expected.nan_to_num(7.0)), actual
