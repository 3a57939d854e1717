"""The elements that nearest resampling selects if scale factor and output size disagree."""

import pytest
import torch
from clika_ref_aten import resampling
from one_operator import Case, build_case_graph, run_onnx


@pytest.mark.parametrize(
    ("dims", "size", "scales"),
    [
        ((2, 7), (4, 21), (2.3, 3.0)),  # doubled: 0 0 1 1, not 0 0 0 1
        ((26, 3), (18, 6), (0.7, 2.3)),
        ((2, 5), (2, 9), (1.2, 1.9)),  # stays: 0 1, not 0 0
        ((2, 63), (4, 124), (2.3, None)),  # a plane that is just small
        ((2, 63), (4, 126), (2.3, 2.0)),  # and one that is not
        ((40, 24), (80, 49), (2.01, None)),
    ],
)
@pytest.mark.parametrize("op", [resampling.upsample_nearest2d, resampling.upsample_nearest_exact2d])
def test_upsample_nearest_inconsistent_scale_equals_eager(op, dims, size, scales):
    """Scales that disagree with the size take the elements that eager takes."""
    x = torch.arange(float(dims[0] * dims[1])).reshape(1, 1, *dims)
    case = Case(op, [x], op.call(x, output_size=size, scales=scales).attrs)
    assert torch.equal(run_onnx(build_case_graph(case), [x])[0], case.eager()[0])


@pytest.mark.parametrize("op", [resampling.upsample_nearest1d, resampling.upsample_nearest3d])
def test_upsample_nearest_1d_and_3d_use_scale(op):
    """Only the 2-D kernel ignores scales."""
    dims = 3 if op is resampling.upsample_nearest3d else 1
    x = torch.arange(2.0**dims).reshape(1, 1, *[2] * dims)
    case = Case(op, [x], op.call(x, output_size=(4,) * dims, scales=(2.3,) * dims).attrs)
    assert torch.equal(run_onnx(build_case_graph(case), [x])[0], case.eager()[0])
