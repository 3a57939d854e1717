"""The two detectors, their training on rendered shapes, and the cache of their weights."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from clika_ref_torchvision.kernels import use_python_kernels
from torch import Tensor, nn

from benchmarks.detection.average_precision import Detections
from benchmarks.detection.shapes import CLASSES, SIZE, Scene, render_scene
from benchmarks.measuring import ROOT
from benchmarks.ptq.detection import compute_ious

use_python_kernels()

CACHE = ROOT / "build" / "detectors"
"""The folder of trained weights."""

MAX_TRAINING_SECONDS = 300.0
"""Limit of the processor time of the training of a detector."""

LEARNING_RATE, WEIGHT_DECAY = 4e-3, 1e-3

WARM_UP_SHARE = 0.05
"""Share of the steps until the learning rate is at its maximum."""

MIN_SCORE, NMS_IOU = 0.01, 0.6
"""Score of a detection, and the overlap of two of them that suppresses one."""

MAX_CANDIDATES, MAX_DETECTIONS = 100, 50
"""Number of detections in an image before and after suppression, for one class or for all."""

EXPANSION_INDEX = 9
"""Index of the block whose expanded features are the first map of SSDlite: the last one with a stride."""

ANCHOR_SCALES = (0.1, 0.2, 0.35, 0.55, 0.75, 0.9, 1.0)
"""Sizes of the anchors of each map relative to an image, and the upper end of the last ones."""

TEST_SEED, CALIBRATION_SEED, TRAINING_SEED = 0, 100_000, 200_000
"""First seeds of the scenes."""


@dataclass(frozen=True)
class DetectorSpec:
    """How one of the detectors is built, trained, called and read."""

    build: Callable[[], nn.Module]
    compute_loss: Callable[[nn.Module, Sequence[Scene]], Tensor]
    make_inputs: Callable[[Sequence[Tensor]], Any]
    """The argument of the model for images ``float32[3, size, size]``."""
    read_detections: Callable[[Any], list[Detections]]
    """The detections in each image, from the outputs of the model."""
    steps: int
    """Number of training steps."""
    batch: int
    """Number of scenes in a training step."""
    max_images: int
    """Number of images in one call."""


def build_yolo() -> nn.Module:
    """Return YOLOv8 with half of the channels of its nano form; in eval mode, it returns boxes and scores as one."""
    from ultralytics.nn.tasks import DetectionModel, yaml_model_load  # noqa: PLC0415 - only needed here
    from ultralytics.utils import DEFAULT_CFG  # noqa: PLC0415

    config: Any = yaml_model_load("yolov8n.yaml") | {"nc": len(CLASSES), "scales": {"n": [0.33, 0.125, 1024]}}
    model: Any = DetectionModel(config, ch=3, nc=len(CLASSES), verbose=False)
    model.args = DEFAULT_CFG  # weights of the parts of the loss
    model.model[-1].export = True
    return model


def _compute_yolo_loss(model: Any, scenes: Sequence[Scene]) -> Tensor:
    boxes = torch.cat([scene.boxes for scene in scenes]) / SIZE
    batch = {
        "img": torch.stack([scene.image for scene in scenes]),
        "batch_idx": torch.cat([torch.full((len(scene.boxes),), float(i)) for i, scene in enumerate(scenes)]),
        "cls": torch.cat([scene.labels for scene in scenes])[:, None].float(),
        "bboxes": torch.cat(((boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]), 1),
    }
    return model(batch)[0].sum() / len(scenes)


def read_yolo(outputs: Tensor) -> list[Detections]:
    """Return the detections in ``outputs[n, 4 + classes, cells]``: centers and sizes in pixels, then scores."""
    found: list[Detections] = []
    for one in outputs:
        centers, sizes = one[:2].T, one[2:4].T
        boxes = torch.cat((centers - sizes / 2, centers + sizes / 2), 1)
        cells, labels = (one[4:].T > MIN_SCORE).nonzero(as_tuple=True)
        found.append(_suppress(boxes[cells], one[4:].T[cells, labels], labels))
    return found


def _suppress(boxes: Tensor, scores: Tensor, labels: Tensor) -> Detections:
    """Return the boxes with the highest scores that overlap no better one of their class."""
    order = scores.argsort(descending=True, stable=True)[:MAX_CANDIDATES]
    found = Detections(boxes[order], scores[order], labels[order])
    overlaps = (compute_ious(found.boxes, found.boxes) > NMS_IOU) & (found.labels[:, None] == found.labels)
    kept: list[int] = []
    for i in range(len(order)):
        if not overlaps[i, kept].any():
            kept.append(i)
    kept = kept[:MAX_DETECTIONS]
    return Detections(found.boxes[kept], found.scores[kept], found.labels[kept])


def build_ssdlite() -> nn.Module:
    """Return SSDlite on MobileNetV3-Small with half of its channels; its first map has a cell for each 8 pixels."""
    from torchvision.models import detection, mobilenet_v3_small  # noqa: PLC0415 - only needed here
    from torchvision.models.detection import anchor_utils, ssdlite  # noqa: PLC0415

    norm = functools.partial(nn.BatchNorm2d, eps=1e-3, momentum=0.03)
    backbone: Any = mobilenet_v3_small(width_mult=0.5, reduced_tail=True, norm_layer=norm).features
    backbone[0][0].stride = (1, 1)  # images of 128 pixels need no stride of 32
    features = ssdlite.SSDLiteFeatureExtractorMobileNet(backbone, EXPANSION_INDEX, norm, width_mult=0.25)
    with torch.no_grad():
        channels = [x.shape[1] for x in features.eval()(torch.zeros(1, 3, SIZE, SIZE)).values()]
    anchors = anchor_utils.DefaultBoxGenerator([[2] for _ in channels], scales=[*ANCHOR_SCALES])
    classes = len(CLASSES) + 1  # and the background
    head = ssdlite.SSDLiteHead(channels, anchors.num_anchors_per_location(), classes, norm)
    return detection.ssd.SSD(
        features,
        anchors,
        (SIZE, SIZE),
        classes,
        head=head,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        score_thresh=MIN_SCORE,
        nms_thresh=NMS_IOU,
        detections_per_img=MAX_DETECTIONS,
        topk_candidates=MAX_CANDIDATES,
    )


def _compute_ssdlite_loss(model: nn.Module, scenes: Sequence[Scene]) -> Tensor:
    targets = [{"boxes": scene.boxes, "labels": scene.labels + 1} for scene in scenes]
    return sum(model([scene.image for scene in scenes], targets).values(), torch.zeros(()))


def read_ssdlite(outputs: Sequence[Mapping[str, Tensor]]) -> list[Detections]:
    """Return the detections; label 0 of the model is the background."""
    return [Detections(each["boxes"], each["scores"], each["labels"] - 1) for each in outputs]


DETECTORS: Mapping[str, DetectorSpec] = {
    "YOLOv8": DetectorSpec(
        build_yolo, _compute_yolo_loss, lambda images: torch.stack([*images]), read_yolo, 700, 16, max_images=16
    ),
    "SSDlite": DetectorSpec(build_ssdlite, _compute_ssdlite_loss, list, read_ssdlite, 900, 8, max_images=1),
}


def render_scenes(seed: int, count: int) -> list[Scene]:
    """Return scenes with the seeds from ``seed`` on."""
    return [render_scene(seed + i) for i in range(count)]


def load_detector(name: str) -> tuple[nn.Module, Mapping[str, float]]:
    """Return a detector in eval mode, trained before or now, with the processor seconds and steps of its training."""
    detector = DETECTORS[name]
    torch.manual_seed(0)
    model = detector.build()
    path = CACHE / f"{name.lower()}.pt"
    if path.exists():
        stored = torch.load(path)
        model.load_state_dict(stored["weights"])
        return model.eval(), stored["facts"]
    facts = train_detector(model, detector)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"weights": model.state_dict(), "facts": facts}, path)
    return model.eval(), facts


def train_detector(model: nn.Module, detector: DetectorSpec) -> dict[str, float]:
    """Train a model on new scenes in each step; return the processor seconds, and the number of steps."""
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=detector.steps, pct_start=WARM_UP_SHARE
    )
    start = time.process_time()
    model.train()
    for step in range(detector.steps):
        loss = detector.compute_loss(model, render_scenes(TRAINING_SEED + step * detector.batch, detector.batch))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        schedule.step()
    return {"seconds": time.process_time() - start, "steps": detector.steps}
