"""Operators of torchvision against independent computations."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from clika_ref_torchvision.deformable import deform_conv2d
from clika_ref_torchvision.regions import ps_roi_align, roi_align, roi_pool
from clika_ref_torchvision.suppression import nms

import conftest  # noqa: F401 - first, so that torchvision's operators exist with a torch without CUDA
from clika_ref import clika_compile

torchvision = pytest.importorskip("torchvision")  # it declares the shapes of results for tracers

BOXES = torch.tensor([[0, 0, 4, 4], [1, 1, 5, 5], [0, 0, 4, 4], [6, 6, 9, 9], [3, 3, 3, 7], [6, 6, 9, 8.5]])
SCORES = torch.tensor([0.5, 0.9, 0.5, 0.1, 0.7, 0.3])


def compute_iou(a, b):
    """Return the intersection over union of two boxes."""
    shared = max(min(a[2], b[2]) - max(a[0], b[0]), 0) * max(min(a[3], b[3]) - max(a[1], b[1]), 0)
    union = sum((c[2] - c[0]) * (c[3] - c[1]) for c in (a, b)) - shared
    return shared / union if union else 0


@pytest.mark.parametrize("threshold", [0.1, 0.35, 0.5, 0.8])
def test_nms_keeps_boxes_that_overlap_no_better_one(threshold):
    """The kept boxes are those of a plain loop; a box of zero area overlaps nothing."""
    expected: list[int] = []
    for i in sorted(range(len(SCORES)), key=lambda n: -SCORES[n]):
        if all(compute_iou(BOXES[i].tolist(), BOXES[k].tolist()) <= threshold for k in expected):
            expected.append(i)
    assert nms(BOXES, SCORES, iou_threshold=threshold).tolist() == expected


@pytest.mark.slow
def test_use_python_kernels_as_documented():
    """The operators stay when nothing else refers to them; they accept no regions."""
    code = (
        "import gc; from clika_ref_torchvision.kernels import use_python_kernels; use_python_kernels(); gc.collect(); "
        "import torch, torchvision.ops as ops; rois = torch.zeros(0, 5); "
        "print(ops.ps_roi_align(torch.rand(1, 8, 9, 9), rois, 2).shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "torch.Size([0, 2, 2, 2])" in done.stdout, done.stderr


def test_nms_compiled_accepts_no_boxes(tmp_path):
    """The number of boxes and of kept boxes may be 0 and 1, in module and file."""
    calls = [(BOXES, SCORES), (BOXES[:4], SCORES[:4])]
    module = clika_compile(lambda boxes, scores: torchvision.ops.nms(boxes, scores, 0.5), tracing_inputs=calls)
    assert not module.graph.guards
    for count in (0, 1, 5):
        found = module(BOXES[:count], SCORES[:count])
        assert found.tolist() == nms(BOXES[:count], SCORES[:count], iou_threshold=0.5).tolist()
    module.clika_export(tmp_path / "m.onnx")


def test_nms_without_boxes_keeps_none():
    """No boxes give no indices."""
    assert nms(torch.empty(0, 4), torch.empty(0), iou_threshold=0.5).shape == (0,)


@pytest.mark.parametrize("sampling_ratio", [2, -1])
@pytest.mark.parametrize("aligned", [True, False])
def test_roi_align_agrees_with_torchvision(sampling_ratio, aligned):
    """The result is that of torchvision's own form in Python, for regions that do not leave the image by far."""
    ops = pytest.importorskip("torchvision.ops.roi_align")
    torch.manual_seed(0)
    x = torch.randn(3, 4, 9, 11)
    rois = torch.tensor(
        [[0, 1.0, 2.0, 12.0, 9.5], [2, 0.0, 0.0, 3.0, 3.0], [1, -1.0, 5.0, 21.0, 17.0], [1, 5, 5, 5, 5]]
    )
    options = {"spatial_scale": 0.5, "pooled_height": 2, "pooled_width": 3, "sampling_ratio": sampling_ratio}
    expected = ops._roi_align.__wrapped__(x, rois, *options.values(), aligned)
    torch.testing.assert_close(roi_align(x, rois, aligned=aligned, **options), expected)


def test_roi_pool_takes_maxima_of_whole_elements():
    """Regions on whole elements are adaptive maximum pooling of a part; regions outside are 0."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 9)
    rois = torch.tensor([[1, 1.0, 2.0, 6.0, 7.0], [0, 40.0, 40.0, 50.0, 50.0]])
    found = roi_pool(x, rois, spatial_scale=1.0, pooled_height=3, pooled_width=2)
    torch.testing.assert_close(found[0], F.adaptive_max_pool2d(x[1, :, 2:8, 1:7], (3, 2)))
    assert not found[1].any()


def test_ps_roi_align_takes_each_bin_from_its_channels():
    """Bin (i, j) of channel c is the bin of roi_align from channel (c * 2 + i) * 3 + j."""
    torch.manual_seed(0)
    x, rois = torch.randn(1, 12, 8, 9), torch.tensor([[0, 1.0, 2.0, 6.5, 7.0]])
    options = {"spatial_scale": 1.0, "pooled_height": 2, "pooled_width": 3, "sampling_ratio": 2}
    whole = roi_align(x, rois, aligned=True, **options)
    found = ps_roi_align(x, rois, **options)
    assert found.shape == (1, 2, 2, 3)
    for c, i, j in [(0, 0, 0), (1, 0, 2), (0, 1, 1), (1, 1, 2)]:
        torch.testing.assert_close(found[0, c, i, j], whole[0, (c * 2 + i) * 3 + j, i, j])


def test_deform_conv2d_without_offsets_is_a_convolution():
    """Offsets of 0 give a convolution; the mask scales it."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 4, 8, 9), torch.randn(6, 2, 3, 3), torch.randn(6)
    options = {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)}
    expected = F.conv2d(x, weight, bias, **options, groups=2)
    offset = torch.zeros(2, 2 * 2 * 9, *expected.shape[2:])
    for mask, scale in ((None, 1), (torch.full((2, 2 * 9, *expected.shape[2:]), 0.5), 0.5)):
        found = deform_conv2d(x, weight, offset, mask, bias, **options, groups=2, offset_groups=2)
        torch.testing.assert_close(found, (expected - bias[:, None, None]) * scale + bias[:, None, None])


def test_deform_conv2d_offsets_move_points():
    """An offset of (1, -0.5) reads one row below, halfway to the column before; what is outside is 0."""
    torch.manual_seed(0)
    x = torch.randn(1, 1, 5, 6)
    offset = torch.tensor([1.0, -0.5])[None, :, None, None].expand(1, 2, 5, 6)
    common = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1, "offset_groups": 1}
    found = deform_conv2d(x, torch.ones(1, 1, 1, 1), offset, **common)
    below = F.pad(x, (1, 0, 0, 1))[:, :, 1:]
    torch.testing.assert_close(found, (below[..., :-1] + below[..., 1:]) / 2)


def test_operators_have_gradients():
    """Training goes through the pooled regions and the moved points."""
    torch.manual_seed(0)
    x = torch.randn(1, 2, 6, 6, dtype=torch.float64, requires_grad=True)
    rois = torch.tensor([[0, 0.7, 0.9, 4.1, 5.2]], dtype=torch.float64)
    options = {"spatial_scale": 1.0, "pooled_height": 2, "pooled_width": 2, "sampling_ratio": 2}
    assert torch.autograd.gradcheck(lambda t: roi_align(t, rois, aligned=True, **options), x)
    offset = (torch.rand(1, 8, 5, 5, dtype=torch.float64) - 0.5).requires_grad_()
    weight = torch.randn(1, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    common = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1, "offset_groups": 1}
    assert torch.autograd.gradcheck(lambda t, w, o: deform_conv2d(t, w, o, **common), (x, weight, offset))


def test_nms_artifact_agrees_for_any_order_of_corners(tmp_path):
    """A box with exchanged corners overlaps nothing, in the file as in PyTorch."""
    boxes = BOXES.clone()
    boxes[3] = boxes[3].flip(0)
    module = clika_compile(
        lambda b, s: torch.ops.torchvision.nms(b, s, 0.3),
        tracing_inputs=[(BOXES, SCORES), (BOXES[:4], SCORES[:4])],
    )
    expected = nms(boxes, SCORES, iou_threshold=0.3)
    assert torch.equal(module(boxes, SCORES), expected)
    module.clika_export(tmp_path / "nms.onnx", example_inputs=(boxes, SCORES))
