"""Architectures of torchvision."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks.breadth.architecture import BATCHES, IMAGES, Architecture, make_images, set_statistics

CLASSIFIERS = (
    *("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet", "inception_v3"),
    *("mnasnet0_5", "mnasnet1_0", "mobilenet_v2", "mobilenet_v3_large", "mobilenet_v3_small", "regnet_x_400mf"),
    *("regnet_y_400mf", "resnet18", "resnet50", "resnext50_32x4d", "shufflenet_v2_x0_5", "shufflenet_v2_x1_0"),
    *("squeezenet1_0", "squeezenet1_1", "swin_t", "swin_v2_t", "vgg11", "vgg11_bn", "wide_resnet50_2"),
)
"""Classifiers with dynamic height and width."""

FIXED_SIZE_CLASSIFIERS = ("maxvit_t", "vit_b_16")
"""Classifiers of images of 224 x 224."""

SEGMENTERS = ("deeplabv3_mobilenet_v3_large", "deeplabv3_resnet50", "fcn_resnet50", "lraspp_mobilenet_v3_large")

VIDEO_CLASSIFIERS = ("mc3_18", "r2plus1d_18", "r3d_18", "s3d", "swin3d_t", "mvit_v2_s")

DETECTORS = (
    *(
        "fasterrcnn_mobilenet_v3_large_320_fpn",
        "fasterrcnn_resnet50_fpn",
        "fcos_resnet50_fpn",
        "keypointrcnn_resnet50_fpn",
    ),
    *("maskrcnn_resnet50_fpn", "retinanet_resnet50_fpn", "ssd300_vgg16", "ssdlite320_mobilenet_v3_large"),
)

VIDEO_SIZES = ((1, 8, 48, 48), (2, 12, 64, 80)), (3, 8, 80, 64)
SWIN_VIDEO_SIZES = ((1, 8, 64, 64), (2, 12, 80, 96)), (3, 8, 96, 80)
"""A window is smaller than the second feature map at these sizes, and larger than the third: one graph."""


def _build(name: str, **options: object) -> nn.Module:
    import torchvision  # noqa: PLC0415 - only the process of an entry needs it

    return torchvision.models.get_model(name, weights=None, **options)


def _build_detector(name: str) -> nn.Module:
    """Return a detector that finds 5 to 100 objects: random ones score all boxes almost equally.

    Normalizations of the small networks take the statistics of noise, without which their results vanish. The layers
    that score boxes have results that vary.
    """
    model = _build(name, num_classes=5, weights_backbone=None, **_choose_detector_sizes(name)).eval()
    norms = [m for m in model.modules() if hasattr(m, "running_var")] if "mobilenet" in name else []
    named = [m for path, m in model.named_modules() if path.split(".")[-1] in SCORING_LAYERS]
    parts = named or [m for path, m in model.named_modules() if "classification_head" in path]  # of SSD
    layers = [m for m in parts if isinstance(m, nn.Conv2d | nn.Linear) and m.bias is not None]  # others are normalized
    spreads: dict[nn.Module, list[float]] = {}
    images = _make_detection_images(96, 128)
    set_statistics(norms, lambda: model(**images))
    hooks = [layer.register_forward_hook(functools.partial(_record_spread, spreads)) for layer in layers]
    with torch.no_grad():
        model(**images)
        for layer, found in spreads.items():
            cast("Any", layer).weight.mul_(SCORE_DEVIATION / max(found))
    for hook in hooks:
        hook.remove()
    return model


def _record_spread(spreads: dict[nn.Module, list[float]], layer: nn.Module, _args: Any, result: Tensor) -> None:
    """Record the standard deviation of a layer's results, once for each feature map."""
    if result.numel() > 1:
        spreads.setdefault(layer, []).append(max(float(result.std()), 1e-20))


SCORE_DEVIATION = 2.0
"""Standard deviation of scores before the sigmoid or softmax, on the feature map where it is largest."""

SCORING_LAYERS = frozenset({"cls_logits", "cls_score", "bbox_ctrness"})
"""Names of the layers that score boxes."""


def _make_video(batch: int, frames: int, height: int, width: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, 3, frames, height, width)}


def _make_detection_images(height: int, width: int) -> dict[str, list[Tensor]]:
    return {"images": [torch.rand(3, height, width), torch.rand(3, width, height)]}


def _make_frames(batch: int) -> dict[str, Tensor]:
    return {"image1": torch.rand(batch, 3, 128, 128), "image2": torch.rand(batch, 3, 128, 128)}


def _choose_detector_sizes(name: str) -> dict[str, int]:
    """Return small sizes to which a detector resizes images, and small numbers of boxes; images of SSD are fixed."""
    if name.startswith("ssd"):
        return {}
    boxes = {"rpn_post_nms_top_n_test": 100, "box_detections_per_img": 20} if "rcnn" in name else {}
    return {"min_size": 96, "max_size": 160, **boxes}


OTHER_CLASSIFIERS = {
    # Their own initialization makes results that do not depend on the input.
    **dict.fromkeys(
        ("googlenet", "inception_v3"), ((((1, 96, 96), (2, 128, 160)), (3, 160, 128)), {"init_weights": False})
    ),
    # A window is smaller than the feature map at these sizes, and larger at others: another graph.
    **dict.fromkeys(("swin_t", "swin_v2_t"), ((((1, 160, 192), (2, 192, 224)), (3, 224, 160)), {})),
}
"""The sizes and options of classifiers for which the usual ones prove nothing, or need two graphs."""


def list_architectures() -> Mapping[str, Architecture]:
    """Return the entries, by name."""
    make = functools.partial
    large, space = "batch, height, width", "batch, frames, height, width"
    return {
        **{
            name: Architecture(make(_build, name, num_classes=10), make_images, IMAGES, large)
            for name in CLASSIFIERS
            if name not in OTHER_CLASSIFIERS
        },
        **{
            name: Architecture(make(_build, name, num_classes=10, **options), make_images, sizes, large)
            for name, (sizes, options) in OTHER_CLASSIFIERS.items()
        },
        **{
            name: Architecture(
                make(_build, name, num_classes=10),
                make(make_images, height=224, width=224),
                BATCHES,
                "batch",
            )
            for name in FIXED_SIZE_CLASSIFIERS
        },
        **{
            name: Architecture(make(_build, name, num_classes=5, weights_backbone=None), make_scenes, IMAGES, large)
            for name in SEGMENTERS
        },
        **{
            name: Architecture(make(_build, name, num_classes=10), _make_video, VIDEO_SIZES, space)
            for name in VIDEO_CLASSIFIERS
            if name not in {"mvit_v2_s", "s3d", "swin3d_t"}
        },
        "swin3d_t": Architecture(make(_build, "swin3d_t", num_classes=10), _make_video, SWIN_VIDEO_SIZES, space),
        "s3d": Architecture(
            make(_build, "s3d", num_classes=10),
            _make_video,
            (((1, 14, 224, 224), (2, 14, 224, 224)), (3, 14, 224, 224)),
            "batch",
        ),
        "mvit_v2_s": Architecture(
            make(_build, "mvit_v2_s", num_classes=10),
            make(_make_video, frames=16, height=224, width=224),
            BATCHES,
            "batch",
        ),
        "raft_small": Architecture(make(_build, "raft_small"), _make_frames, BATCHES, "batch"),
        **{
            name: Architecture(
                make(_build_detector, name),
                _make_detection_images,
                (((96, 128), (128, 160)), (160, 96)),
                "height, width of each of two images",
            )
            for name in DETECTORS
        },
    }


def make_scenes(batch: int, height: int, width: int) -> tuple[Tensor]:
    """Return images."""
    return (torch.randn(batch, 3, height, width),)
