"""The detection benchmark: rendered shapes, mAP compared with values computed by hand, and the reading of outputs."""

import dataclasses

import pytest
import torch

from benchmarks.detection import detectors
from benchmarks.detection.average_precision import IOU_THRESHOLDS, Detections, compute_mean_average_precision
from benchmarks.detection.shapes import CLASSES, MAX_SHAPES, SIZE, render_scene


def make_detections(*rows):
    """Return detections from rows of x0, y0, x1, y1, score and class."""
    table = torch.tensor(rows).reshape(-1, 6)
    return Detections(table[:, :4], table[:, 4], table[:, 5].long())


BOXES = torch.tensor([[0.0, 0, 10, 10], [20, 20, 30, 30]])
LABELS = torch.tensor([0, 0])


def compute_at_half(found, boxes=BOXES, labels=LABELS):
    """Return the mAP of one image at an IoU of 0.5."""
    return compute_mean_average_precision([found], [boxes], [labels], (0.5,))


def test_mean_average_precision_of_exact_boxes_is_100():
    """Each box found once, without others, at every threshold; without any, it is 0."""
    found = make_detections([0, 0, 10, 10, 0.9, 0], [20, 20, 30, 30, 0.8, 0])
    assert compute_mean_average_precision([found], [BOXES], [LABELS], IOU_THRESHOLDS) == pytest.approx(100)
    assert compute_at_half(make_detections()) == 0


def test_mean_average_precision_wrong_box_lowers_later_precision():
    """Precision is 1 up to a recall of 0.5 (51 of 101 recalls), and 2/3 after it: the wrong box has the second rank."""
    found = make_detections([0, 0, 10, 10, 0.9, 0], [50, 50, 60, 60, 0.8, 0], [20, 20, 30, 30, 0.7, 0])
    assert compute_at_half(found) == pytest.approx(100 * (51 + 50 * 2 / 3) / 101)


def test_mean_average_precision_second_box_of_one_object_is_wrong():
    """The box with the highest score matches; a missing object leaves a precision of 0 from its recall on."""
    found = make_detections([0, 0, 10, 10, 0.9, 0], [0, 0, 10, 9, 0.8, 0])
    assert compute_at_half(found) == pytest.approx(100 * 51 / 101)
    found = make_detections([50, 50, 60, 60, 0.9, 0], [0, 0, 10, 10, 0.8, 0])
    assert compute_at_half(found) == pytest.approx(100 * 51 / 2 / 101)


def test_mean_average_precision_counts_thresholds_and_classes():
    """A box at an IoU of 0.72 is right at five of ten thresholds; a class that is not found counts as 0."""
    found = make_detections([0, 0, 10, 7.2, 0.9, 0])
    whole = compute_mean_average_precision([found], [BOXES[:1]], [LABELS[:1]], IOU_THRESHOLDS)
    assert whole == pytest.approx(50)
    assert compute_at_half(found, labels=torch.tensor([0, 1])) == pytest.approx(50)
    assert compute_at_half(make_detections([0, 0, 10, 10, 0.9, 1]), BOXES[:1], LABELS[:1]) == 0


def test_render_scene_boxes_contain_their_shapes():
    """Equal seeds give equal images; boxes lie within the image, and the pixels in them differ from its border."""
    scenes = [render_scene(seed) for seed in range(20)]
    for seed, scene in enumerate(scenes):
        assert torch.equal(scene.image, render_scene(seed).image)
        assert scene.image.shape == (3, SIZE, SIZE)
        assert 1 <= len(scene.boxes) <= MAX_SHAPES
        assert (scene.boxes >= 0).all()
        assert (scene.boxes <= SIZE).all()
        assert (scene.boxes[:, 2:] - scene.boxes[:, :2] > 6).all()
    assert {int(label) for scene in scenes for label in scene.labels} == {*range(len(CLASSES))}


def test_read_yolo_suppresses_and_converts_corners():
    """Centers and sizes become corners; a box that overlaps a better one of its class is removed."""
    outputs = torch.zeros(1, 4 + len(CLASSES), 3)
    outputs[0, :4] = torch.tensor([[20.0, 20, 10, 8], [21, 20, 10, 8], [20, 20, 10, 8]]).T
    outputs[0, 4, :2], outputs[0, 5, 2] = torch.tensor([0.9, 0.8]), 0.7
    (found,) = detectors.read_yolo(outputs)
    assert found.boxes.tolist() == [[15, 16, 25, 24]] * 2
    assert (found.labels.tolist(), found.scores.tolist()) == ([0, 1], pytest.approx([0.9, 0.7]))


@pytest.mark.slow_cases("SSDlite")
@pytest.mark.parametrize("name", ["YOLOv8", "SSDlite"])
def test_detector_loss_falls_in_training(name):
    """Each detector is built and trained on rendered scenes; in eval mode, its detections can be read."""
    if name == "YOLOv8":
        pytest.importorskip("ultralytics")
    torch.manual_seed(0)
    detector = dataclasses.replace(detectors.DETECTORS[name], steps=4, batch=2)
    model, scenes = detector.build(), detectors.render_scenes(0, 2)
    before = detector.compute_loss(model.train(), scenes).item()
    facts = detectors.train_detector(model, detector)
    assert facts["steps"] == 4
    assert detector.compute_loss(model.train(), scenes).item() < before
    with torch.no_grad():
        found = detector.read_detections(model.eval()(detector.make_inputs([scenes[0].image])))
    assert [each.boxes.shape[1:] for each in found] == [(4,)]
