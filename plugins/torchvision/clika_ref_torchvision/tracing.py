"""Forms of torchvision's functions that keep sizes dynamic, and need no loop over a data-dependent count.

This module alone knows private names of torchvision; its tests name the version that moved one.
"""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import optimization_hint

from clika_ref.capture.patching import only_in_this_thread, patch_attributes, patch_functions
from clika_ref.torch_internals.operators import while_loop

ASSUMED_SIZE = 800
"""The size to assume for one that is not known, to find the stride of a feature map."""


def _batched_nms(boxes: Tensor, scores: Tensor, idxs: Tensor, iou_threshold: float) -> Tensor:
    """Suppress boxes of each class: offsets move the classes apart."""
    limit = torch.cat([boxes.flatten(), boxes.new_zeros(1)]).max()  # there may be no boxes
    offsets = idxs.to(boxes) * (limit + 1)
    return torch.ops.torchvision.nms(boxes + offsets[:, None], scores, iou_threshold)


def _decode_boxes(coder: Any, rel_codes: Tensor, boxes: Sequence[Tensor]) -> Tensor:
    """Apply offsets ``[n, 4 * classes]`` to boxes, of which there may be none: ``[n, classes, 4]``."""
    corners = torch.cat([*boxes])
    count, columns = corners.shape[0], rel_codes.shape[1]
    decoded: Tensor = coder.decode_single(rel_codes.reshape(count, columns), corners)
    return decoded.reshape(count, columns // 4, 4)


def _resize_image_and_masks(
    image: Tensor,
    self_min_size: int,
    self_max_size: int,
    target: None = None,
    fixed_size: tuple[int, int] | None = None,
) -> tuple[Tensor, None]:
    """Resize an image of any size: the shorter dim to the minimum, unless the longer one exceeds the maximum."""
    size: Any = None
    scale: Any = None
    if fixed_size is not None:
        size = [fixed_size[1], fixed_size[0]]
    else:
        height, width = image.shape[-2:]
        shorter, longer = torch.sym_min(height, width), torch.sym_max(height, width)
        scale = torch.sym_min(self_min_size / shorter, self_max_size / longer)
    resized = F.interpolate(
        image[None],
        size=size,
        scale_factor=scale,
        mode="bilinear",
        recompute_scale_factor=None if scale is None else True,
        align_corners=False,
    )
    return resized[0], target


def _batch_images(_transform: Any, images: Sequence[Tensor], size_divisible: int = 32) -> Tensor:
    """Pad images to one size, a multiple of a number."""
    sizes = [_round_up(_find_largest([image.shape[d] for image in images]), size_divisible) for d in (1, 2)]
    padded = [
        F.pad(image, (0, sizes[1] - image.shape[2], 0, sizes[0] - image.shape[1]))  # pyright: ignore[reportArgumentType]
        for image in images
    ]
    return torch.stack(padded)


def _find_largest(sizes: Sequence[Any]) -> Any:
    largest = sizes[0]
    for size in sizes[1:]:
        largest = torch.sym_max(largest, size)
    return largest


def _round_up(size: Any, divisor: int) -> Any:
    return (size + divisor - 1) // divisor * divisor


def _infer_scale(feature: Tensor, original_size: Sequence[Any]) -> float:
    """Return the factor from an image to a feature map: the power of 2 nearest to the ratio of their sizes."""
    size, original = (optimization_hint(n, ASSUMED_SIZE) for n in (feature.shape[-2], original_size[0]))
    return 2.0 ** round(math.log2(size / original))


def _setup_scales(
    features: Sequence[Tensor], image_shapes: Sequence[Sequence[Any]], canonical_scale: int, canonical_level: int
) -> tuple[list[float], Any]:
    """Return the factor of each level, and the map from boxes to levels."""
    original = [_find_largest([shape[d] for shape in image_shapes]) for d in range(2)]
    scales = [_infer_scale(feature, original) for feature in features]
    first, last = (round(-math.log2(scale)) for scale in (scales[0], scales[-1]))
    make: Any = sys.modules["torchvision.ops.poolers"].initLevelMapper  # type: ignore[attr-defined]
    return scales, make(first, last, canonical_scale=canonical_scale, canonical_level=canonical_level)


def _multiscale_roi_align(
    x_filtered: Sequence[Tensor],
    boxes: Sequence[Tensor],
    output_size: tuple[int, int],
    sampling_ratio: int,
    scales: Sequence[float],
    mapper: Callable[[Sequence[Tensor]], Tensor],
) -> Tensor:
    """Pool each region from its own level."""
    numbers = [torch.full_like(b[:, :1], i) for i, b in enumerate(boxes)]
    rois = torch.cat([torch.cat(numbers), torch.cat([*boxes])], 1)

    def pool(feature: Tensor, regions: Tensor, scale: float) -> Tensor:
        return torch.ops.torchvision.roi_align(feature, regions, scale, *output_size, sampling_ratio, False)

    if len(x_filtered) == 1:
        return pool(x_filtered[0], rois, scales[0])
    levels = mapper(boxes)
    members = [torch.where(levels == level)[0] for level in range(len(x_filtered))]
    pooled = [pool(x, rois[own], scale) for x, own, scale in zip(x_filtered, members, scales, strict=True)]
    return torch.cat(pooled)[torch.cat(members).argsort()]


def _paste_masks_in_image(masks: Tensor, boxes: Tensor, img_shape: Sequence[Any], padding: int = 1) -> Tensor:
    """Resize each mask to its box in an image: ``[n, 1, h, w]`` of ``masks[n, 1, m, m]`` and ``boxes[n, 4]``."""
    scale = (masks.shape[-1] + 2 * padding) / masks.shape[-1]
    padded = F.pad(masks, (padding,) * 4)
    centers, halves = (boxes[:, 2:] + boxes[:, :2]) * 0.5, (boxes[:, 2:] - boxes[:, :2]) * 0.5 * scale
    first, last = (corners.to(torch.int64).to(masks) for corners in (centers - halves, centers + halves))
    rows, columns = (
        _make_resizing_weights(first[:, d], last[:, d], img_shape[1 - d], padded.shape[-1]) for d in (1, 0)
    )
    return (rows @ padded[:, 0] @ columns.transpose(1, 2))[:, None]


def _make_resizing_weights(first: Tensor, last: Tensor, size: Any, count: int) -> Tensor:
    """Return the weights of ``count`` elements, resized to positions ``first[n]`` to ``last[n]`` of ``size``.

    Returns:
        ``[n, size, count]``: linear interpolation between two elements, 0 outside.
    """
    positions = torch.arange(size, device=first.device).to(first)[None]
    inside = (positions >= first[:, None]) & (positions <= last[:, None])
    step = count / (last - first + 1).clamp(min=1)[:, None]
    source = ((positions - first[:, None] + 0.5) * step - 0.5).clamp(min=0, max=count - 1)
    elements = torch.arange(count, device=first.device).to(first)
    weights = (1 - (source.unsqueeze(-1) - elements).abs()).clamp(min=0)
    return weights * inside.unsqueeze(-1)


CUBIC_COEFFICIENT = -0.75
"""The coefficient of cubic interpolation in PyTorch."""


def _heatmaps_to_keypoints(maps: Tensor, rois: Tensor) -> tuple[Tensor, Tensor]:
    """Resize each heatmap to its region, and find the largest element: ``[n, k, 3]`` and ``[n, k]``.

    ``maps`` is ``[n, k, size, size]``, and ``rois[n, 4]`` are the corners.
    """
    sizes = (rois[:, 2:] - rois[:, :2]).clamp(min=1)
    counts = sizes.ceil()
    longest: Any = torch.cat([counts.flatten(), counts.new_ones(1)]).max().to(torch.int64).item()
    positions, regions = (torch.arange(n, device=maps.device) for n in (longest, maps.shape[0]))

    def is_open(region: Tensor, scores: Tensor, _: Tensor) -> Tensor:
        return region < scores.shape[0]

    def find_largest(region: Tensor, scores: Tensor, found: Tensor) -> tuple[Tensor, ...]:
        heatmap, count = (x.index_select(0, region.reshape(1))[0] for x in (maps, counts))
        rows, columns = (_make_cubic_weights(positions, count[d], heatmap.shape[-1]) for d in (1, 0))
        resized = rows @ heatmap @ columns.transpose(0, 1)
        outside = (positions[:, None] >= count[1]) | (positions >= count[0])
        flat = resized.masked_fill(outside, -torch.inf).flatten(1)
        own = (regions == region)[:, None]
        return region + 1, torch.where(own, flat.amax(1), scores), torch.where(own, flat.argmax(1), found)

    scores = maps.new_zeros(maps.shape[:2])
    start = (torch.zeros((), dtype=torch.int64, device=maps.device), scores, scores.to(torch.int64))
    _, scores, found = while_loop(is_open, find_largest, start)
    places = torch.stack([found % longest, found // longest], -1).to(maps) + 0.5
    corners = places * (sizes / counts)[:, None] + rois[:, None, :2]
    return torch.cat([corners, torch.ones_like(corners[..., :1])], -1), scores


def _make_cubic_weights(positions: Tensor, count: Tensor, size: int) -> Tensor:
    """Return the weights ``[n, size]`` of ``size`` elements, resized by cubic interpolation to ``count`` positions."""
    source = (positions + 0.5) * (size / count) - 0.5
    first = source.floor()
    elements = torch.arange(size, device=positions.device)
    weights = torch.zeros((), device=positions.device)
    for step in range(-1, 3):
        distance = (source - first - step).abs()
        near = ((CUBIC_COEFFICIENT + 2) * distance - (CUBIC_COEFFICIENT + 3)) * distance**2 + 1
        far = CUBIC_COEFFICIENT * (((distance - 5) * distance + 8) * distance - 4)
        own = (first + step).clamp(0, size - 1).unsqueeze(-1) == elements
        weights = weights + torch.where(distance <= 1, near, far).unsqueeze(-1) * own
    return weights


_DETECTION = "torchvision.models.detection"

FORMS: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("torchvision.ops.boxes", "batched_nms"): _batched_nms,
    ("torchvision.ops.poolers", "_setup_scales"): _setup_scales,
    ("torchvision.ops.poolers", "_multiscale_roi_align"): _multiscale_roi_align,
    (f"{_DETECTION}._utils", "BoxCoder.decode"): _decode_boxes,
    (f"{_DETECTION}.roi_heads", "heatmaps_to_keypoints"): _heatmaps_to_keypoints,
    (f"{_DETECTION}.transform", "_resize_image_and_masks"): _resize_image_and_masks,
    (f"{_DETECTION}.transform", "paste_masks_in_image"): _paste_masks_in_image,
    (f"{_DETECTION}.transform", "GeneralizedRCNNTransform.batch_images"): _batch_images,
}
"""Functions by module and qualified name, and the form of each."""


@contextlib.contextmanager
def use_dynamic_forms() -> Iterator[None]:
    """Replace torchvision's functions by `FORMS` in this thread while the context lasts, if it is imported."""
    functions: dict[Callable[..., Any], Callable[..., Any]] = {}
    methods: dict[tuple[Any, str], Callable[..., Any]] = {}
    for (module, name), form in FORMS.items():
        if module in sys.modules:
            owner, _, attribute = name.rpartition(".")
            scope: Any = getattr(sys.modules[module], owner) if owner else sys.modules[module]
            plain = getattr(scope, attribute)
            if owner:
                methods[scope, attribute] = only_in_this_thread(form, plain)
            else:
                functions[plain] = only_in_this_thread(form, plain)
    with warnings.catch_warnings(), patch_attributes(methods), patch_functions(functions):
        # torchvision's kernel of nms for fake tensors
        warnings.filterwarnings("ignore", "`create_unbacked_symint` is deprecated", FutureWarning)
        yield
