"""Non-maximum suppression."""

from __future__ import annotations

import torch
from torch import Tensor

from clika_ref.core.accuracy import EXACT
from clika_ref.core.errors import PassError
from clika_ref.core.operators import operator


@operator(error=EXACT)
def nms(boxes: Tensor, scores: Tensor, *, iou_threshold: float) -> Tensor:
    """Return the indices of the boxes to keep, by descending score; equal scores keep their order.

    A box ``boxes[n] = (x1, y1, x2, y2)`` is removed if its intersection over union with a kept box of a higher score
    exceeds ``iou_threshold``.

    Source: torchvision/csrc/ops/cpu/nms_kernel.cpp
    """
    order = scores.argsort(descending=True, stable=True)
    x1, y1, x2, y2 = boxes[order].unbind(1)
    areas = (x2 - x1) * (y2 - y1)
    removed = torch.zeros(len(order), dtype=torch.bool, device=boxes.device)
    kept: list[int] = []
    for i in range(len(order)):
        if removed[i]:
            continue
        kept.append(i)
        later = slice(i + 1, None)
        width = (torch.minimum(x2[i], x2[later]) - torch.maximum(x1[i], x1[later])).clamp(min=0)
        height = (torch.minimum(y2[i], y2[later]) - torch.maximum(y1[i], y1[later])).clamp(min=0)
        shared = width * height
        removed[later] |= shared / (areas[i] + areas[later] - shared) > iou_threshold
    return order[torch.tensor(kept, dtype=torch.int64, device=boxes.device)]


@nms.from_torch("torchvision.nms.default")
def _(boxes, scores, iou_threshold):
    return nms.call(boxes, scores, iou_threshold=iou_threshold)


@nms.types
def _(boxes, scores, *, iou_threshold):
    raise PassError("the number of boxes that non-maximum suppression keeps depends on the data. Give the types.")


@nms.onnx
def _(op, boxes, scores, *, iou_threshold):
    dtype = torch.float32
    # Corners in the wrong order give an area of 0 in PyTorch; the runtime would exchange them.
    first, last = op.Split(op.cast(boxes, dtype), op.ints([2, 2]), axis=1, outputs=2)
    ordered = op.Concat(first, op.Max(first, last), axis=1)
    batched = op.Unsqueeze(ordered, op.ints([0]))
    by_class = op.Unsqueeze(op.cast(scores, dtype), op.ints([0, 1]))
    limit = op.Reshape(op.Shape(scores), op.ints([1]))
    found = op.NonMaxSuppression(batched, by_class, limit, op.constant([iou_threshold], dtype))
    return op.Gather(found, op.constant(2, torch.int64), axis=1)  # (batch, class, box)


@nms.samples
def _(draw, s):
    count = draw(s.integers(1, 8))
    boxes = s.tensor(shape=(count, 4), low=0, high=8, domain=(0, 1e3), nan=False)
    scores = s.tensor(shape=(count,), low=0, high=1, domain=(0, 1), nan=False, unique=True)
    return s.call(draw(boxes), draw(scores), iou_threshold=draw(s.choice(0.5, 0.3, 0.7)))
