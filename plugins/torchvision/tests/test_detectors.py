"""Torchvision's detectors as they are: lists of images in, lists of dicts with data-dependent counts out."""

import importlib
import inspect
import operator

import pytest
import torch
from clika_ref_torchvision.tracing import FORMS, use_dynamic_forms
from torch import nn

import conftest  # noqa: F401 - first, so that torchvision imports with a torch without CUDA
from clika_ref import ModelError, clika_compile

torchvision = pytest.importorskip("torchvision")
DETECTION = "torchvision.models.detection"
detection = pytest.importorskip("torchvision.models.detection")
anchors = pytest.importorskip("torchvision.models.detection.anchor_utils")


class Backbone(nn.Sequential):
    """A stride of 8 in three convolutions."""

    out_channels = 32

    def __init__(self):
        layers = [nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 32, 3, 2, 1)]
        super().__init__(*layers)


SIZES = {"min_size": 64, "max_size": 96}


def build_faster_rcnn():
    """Return Faster R-CNN with a single level."""
    generator = anchors.AnchorGenerator(((16, 32),), ((0.5, 1.0),))
    return detection.FasterRCNN(Backbone(), 4, rpn_anchor_generator=generator, rpn_post_nms_top_n_test=30, **SIZES)


@torch.no_grad()
def raise_scores(model):
    """Give a random head scores that vary around the threshold: untrained ones find nothing."""
    layer = model.head.classification_head.cls_logits
    nn.init.constant_(layer.bias, -3)
    results = []
    with layer.register_forward_hook(lambda _layer, _args, result: results.append(result)):
        model.eval()(*make_images((64, 96)))
    layer.weight.div_(results[0].std())
    return model


def build_retinanet():
    """Return RetinaNet with a single level."""
    generator = anchors.AnchorGenerator(((16, 32),), ((0.5, 1.0),))
    return raise_scores(detection.RetinaNet(Backbone(), 4, anchor_generator=generator, **SIZES))


def build_fcos():
    """Return FCOS with a single level."""
    generator = anchors.AnchorGenerator(((8,),), ((1.0,),))
    return raise_scores(detection.FCOS(Backbone(), 4, anchor_generator=generator, **SIZES))


def build_keypoint_rcnn():
    """Return Keypoint R-CNN with a single level, a small head, and five keypoints."""
    keypoints = importlib.import_module("torchvision.models.detection.keypoint_rcnn")
    generator = anchors.AnchorGenerator(((16, 32),), ((0.5, 1.0),))
    head = keypoints.KeypointRCNNHeads(Backbone.out_channels, (16, 16))
    return keypoints.KeypointRCNN(
        Backbone(),
        2,
        rpn_anchor_generator=generator,
        rpn_post_nms_top_n_test=30,
        keypoint_head=head,
        keypoint_predictor=keypoints.KeypointRCNNPredictor(16, 5),
        **SIZES,
    )


DETECTORS = {
    f.__name__.removeprefix("build_"): f for f in (build_faster_rcnn, build_retinanet, build_fcos, build_keypoint_rcnn)
}


def make_images(*sizes):
    """Return images of the given heights and widths."""
    return ([torch.rand(3, *size) for size in sizes],)


@pytest.mark.slow_cases("faster_rcnn", "retinanet", "keypoint_rcnn")
@pytest.mark.parametrize("name", DETECTORS)
def test_detector_serves_images_of_other_sizes(name, tmp_path):
    """Boxes, labels and scores agree with eager for images of sizes never traced, in module and file."""
    torch.manual_seed(0)
    model = DETECTORS[name]().eval()
    traced = [make_images((40, 60), (70, 50)), make_images((90, 48), (44, 66))]
    module = clika_compile(model, tracing_inputs=traced, discard_input_model=False)
    call = make_images((52, 81), (64, 64))
    with torch.no_grad():
        expected, found = model(*call), module(*call)
    for e, f in zip(expected, found, strict=True):
        assert len(e["boxes"]) >= 5
        for key in e:
            torch.testing.assert_close(f[key], e[key], rtol=1e-3, atol=1e-3)
    module.clika_export(tmp_path / "detector.onnx", example_inputs=call)


def test_forms_replace_functions_of_torchvision():
    """Each function that a trace replaces exists in this torchvision, and is back after the trace."""
    for (module, name), form in FORMS.items():
        owner = importlib.import_module(module)
        plain = operator.attrgetter(name)(owner)
        known, own = (inspect.signature(f).parameters for f in (plain, form))
        assert [*known][1:] == [*own][1:], f"torchvision {torchvision.__version__} changed {module}.{name}"
        with use_dynamic_forms():
            assert operator.attrgetter(name)(owner) is not plain
        assert operator.attrgetter(name)(owner) is plain


@pytest.mark.parametrize("sizes", [(16, 8), (16,)], ids=["two levels", "one level"])
def test_regions_pooled_like_torchvision(sizes):
    """The scales of feature maps, and the regions pooled from their levels, are those of torchvision."""
    poolers = importlib.import_module("torchvision.ops.poolers")
    torch.manual_seed(0)
    features = [torch.randn(2, 3, size, size) for size in sizes]
    boxes = [torch.tensor([[1.0, 2.0, 9.0, 8.0], [0.0, 0.0, 60.0, 62.0]]), torch.tensor([[4.0, 4.0, 40.0, 44.0]])]
    images = [(64, 64), (64, 48)]
    found, expected = (
        pool(features, boxes, (5, 5), 2, *setup(features, images, 32, 3))
        for setup, pool in (
            (
                FORMS["torchvision.ops.poolers", "_setup_scales"],
                FORMS["torchvision.ops.poolers", "_multiscale_roi_align"],
            ),
            (poolers._setup_scales, poolers._multiscale_roi_align),
        )
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("shape", [(3, 30, 50), (3, 90, 31)], ids=["by the shorter dim", "by the longer dim"])
def test_images_resized_and_batched_like_torchvision(shape):
    """Images are resized and padded to one size as by torchvision."""
    transform = importlib.import_module("torchvision.models.detection.transform")
    torch.manual_seed(0)
    images = [torch.rand(shape), torch.rand(3, 40, 40)]
    limits = (20, 44)
    resize = FORMS[f"{DETECTION}.transform", "_resize_image_and_masks"]
    found = [resize(image, *limits)[0] for image in images]
    expected = [transform._resize_image_and_masks(image, *map(float, limits))[0] for image in images]
    torch.testing.assert_close(found, expected)
    module = transform.GeneralizedRCNNTransform(*limits, [0.5] * 3, [0.5] * 3)
    batch = FORMS[f"{DETECTION}.transform", "GeneralizedRCNNTransform.batch_images"]
    torch.testing.assert_close(batch(module, found, 32), module.batch_images(expected, 32))


def test_boxes_decoded_and_suppressed_like_torchvision():
    """Offsets are applied to boxes, and boxes suppressed in each class, as by torchvision; also if there are none."""
    utils, ops = map(importlib.import_module, ("torchvision.models.detection._utils", "torchvision.ops.boxes"))
    torch.manual_seed(0)
    coder = utils.BoxCoder((10.0, 10.0, 5.0, 5.0))
    corners = torch.rand(20, 4) * 20
    boxes = torch.cat([corners[:, :2], corners[:, :2] + corners[:, 2:] + 1], 1)
    decode = FORMS[f"{DETECTION}._utils", "BoxCoder.decode"]
    codes = torch.randn(20, 8)
    torch.testing.assert_close(decode(coder, codes, [boxes]), coder.decode(codes, [boxes]))
    assert decode(coder, codes[:0], [boxes[:0]]).shape == (0, 2, 4)
    suppress, classes = FORMS["torchvision.ops.boxes", "batched_nms"], torch.arange(20) % 3
    found = suppress(boxes, torch.rand(20, generator=torch.Generator().manual_seed(1)), classes, 0.3)
    expected = ops.batched_nms(boxes, torch.rand(20, generator=torch.Generator().manual_seed(1)), classes, 0.3)
    assert found.tolist() == expected.tolist()
    assert 0 < len(found) < 20


def test_masks_pasted_like_torchvision():
    """Masks resized by two products of matrices are those of torchvision's loop, also beyond the image."""
    heads = importlib.import_module("torchvision.models.detection.roi_heads")
    torch.manual_seed(0)
    masks = torch.rand(4, 1, 28, 28)
    boxes = torch.tensor(
        [[3.2, 4.1, 20.9, 30.5], [-5.0, -7.5, 12.0, 9.0], [30.0, 20.0, 60.0, 50.0], [5.0, 5.0, 5.4, 5.2]]
    )
    expected = heads.paste_masks_in_image(masks, boxes, (40, 48))
    torch.testing.assert_close(
        FORMS[f"{DETECTION}.transform", "paste_masks_in_image"](masks, boxes, (40, 48)), expected
    )


def test_keypoints_found_like_torchvision():
    """Keypoints found by a loop over regions are those of torchvision's loop, also in regions below one pixel."""
    heads = importlib.import_module("torchvision.models.detection.roi_heads")
    torch.manual_seed(0)
    maps = torch.randn(4, 3, 12, 12)
    regions = torch.tensor(
        [[3.0, 4.0, 40.5, 90.2], [10.0, 10.0, 10.3, 50.0], [0.0, 0.0, 200.0, 100.0], [5.0, 5.0, 5.4, 5.2]]
    )
    found = FORMS[f"{DETECTION}.roi_heads", "heatmaps_to_keypoints"](maps, regions)
    torch.testing.assert_close(found, heads.heatmaps_to_keypoints(maps, regions))


@pytest.mark.slow
def test_keypoints_of_other_counts():
    """A graph finds the keypoints of a number of regions that was not traced."""
    heads = importlib.import_module("torchvision.models.detection.roi_heads")
    torch.manual_seed(0)
    maps = torch.randn(3, 3, 12, 12)
    regions = torch.tensor([[3.0, 4.0, 40.5, 90.2], [10.0, 10.0, 10.3, 50.0], [0.0, 0.0, 20.0, 10.0]])

    def find(maps, regions):
        return heads.heatmaps_to_keypoints(maps, regions)

    module = clika_compile(find, tracing_inputs=[(maps, regions), (maps[:2], regions[:2])])
    for count in (1, 3):
        torch.testing.assert_close(module(maps[:count], regions[:count]), find(maps[:count], regions[:count]))


def test_empty_list_of_images_named():
    """The number of images is part of the graph: no images are rejected, with both numbers."""
    torch.manual_seed(0)
    module = clika_compile(DETECTORS["fcos"]().eval(), tracing_inputs=[make_images((40, 60), (70, 50))])
    with pytest.raises(
        ModelError, match="'images' is an empty list, but the model was compiled for a list of 2 values"
    ):
        module([])
