"""Mean average precision of detections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.ptq.detection import compute_ious

IOU_THRESHOLDS = tuple(0.5 + 0.05 * i for i in range(10))

RECALLS = torch.linspace(0, 1, 101, dtype=torch.float64)
"""Recalls at which precisions are averaged. Source: Lin et al., Microsoft COCO (2014), its evaluation code."""


@dataclass(frozen=True)
class Detections:
    """The boxes that a detector found in one image."""

    boxes: Tensor
    """``float32[n, 4]``: x0, y0, x1, y1 in pixels."""
    scores: Tensor
    """``float32[n]``."""
    labels: Tensor
    """``int64[n]``."""


def compute_mean_average_precision(
    found: Sequence[Detections], boxes: Sequence[Tensor], labels: Sequence[Tensor], thresholds: Sequence[float]
) -> float:
    """Return the average precision, as the mean over classes and IoU thresholds, in percent.

    Args:
        found: the detections in each image.
        boxes: the true boxes in each image, ``float32[n, 4]``.
        labels: their classes, ``int64[n]``.
        thresholds: smallest IoU of a detection and the true box that it matches.
    """
    classes = sorted({int(label) for each in labels for label in each})
    precisions = [
        _compute_average_precision(
            [_select_class(each, label) for each in found],
            [b[each == label] for b, each in zip(boxes, labels, strict=True)],
            threshold,
        )
        for label in classes
        for threshold in thresholds
    ]
    return 100 * sum(precisions) / len(precisions)


def _select_class(found: Detections, label: int) -> Detections:
    own = found.labels == label
    return Detections(found.boxes[own], found.scores[own], found.labels[own])


def _compute_average_precision(found: Sequence[Detections], boxes: Sequence[Tensor], threshold: float) -> float:
    """Return the mean precision at `RECALLS`: at each, the best precision of any score with at least this recall."""
    scores = torch.cat([each.scores for each in found])
    matched = torch.cat([_match(each, own, threshold) for each, own in zip(found, boxes, strict=True)])
    matched = matched[scores.argsort(descending=True, stable=True)].double()
    count = sum(len(own) for own in boxes)
    if not len(matched):
        return 0.0
    hits = matched.cumsum(0)
    recalls = hits / count
    precisions = hits / torch.arange(1, len(hits) + 1)
    best = precisions.flip(0).cummax(0).values.flip(0)
    at = torch.searchsorted(recalls, RECALLS - 1e-9)
    return float(torch.where(at < len(best), best[at.clamp(max=len(best) - 1)], 0.0).mean())


def _match(found: Detections, boxes: Tensor, threshold: float) -> Tensor:
    """Return for each detection whether it matches a true box that no detection with a higher score matches."""
    matched = torch.zeros(len(found.boxes), dtype=torch.bool)
    if not len(boxes) or not len(found.boxes):
        return matched
    ious = compute_ious(found.boxes, boxes)
    for i in found.scores.argsort(descending=True, stable=True).tolist():
        overlap, j = ious[i].max(0)
        if overlap >= threshold:
            matched[i] = True
            ious[:, j] = -1.0
    return matched
