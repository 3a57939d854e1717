"""Results whose number of rows depends on the data agree in any order."""

import pytest
import torch

from clika_ref import clika_compile
from clika_ref.capture.detections import has_same_detections


@pytest.fixture(scope="module")
def graph():
    """A graph with two outputs of equal, data-dependent numbers of rows."""

    def select(boxes, scores):
        kept = torch.where(scores > 0.5)[0]
        return boxes[kept], kept

    inputs = [(torch.rand(n, 4), torch.linspace(0, 1, n)) for n in (5, 7)]
    return clika_compile(select, tracing_inputs=inputs).graph


def make_results(count=100):
    """Return boxes and labels."""
    torch.manual_seed(0)
    return [torch.rand(count, 4) * 100, torch.randint(5, (count,))]


def test_detections_in_another_order_agree(graph):
    """Rows in another order, with numbers within the tolerance, are the same detections."""
    boxes, labels = make_results()
    order = torch.randperm(100)
    assert has_same_detections(graph, [boxes, labels], [(boxes + 0.01)[order], labels[order]])


def test_detections_near_a_threshold_may_differ_in_number(graph):
    """Two rows of a hundred may be missing, three may not."""
    boxes, labels = make_results()
    assert has_same_detections(graph, [boxes, labels], [boxes[2:], labels[2:]])
    assert not has_same_detections(graph, [boxes, labels], [boxes[3:], labels[3:]])


def test_detections_with_other_labels_or_columns_differ(graph):
    """A label belongs to its box, and each box matches once."""
    boxes, labels = make_results()
    assert not has_same_detections(graph, [boxes, labels], [boxes, labels.roll(1)])
    assert not has_same_detections(graph, [boxes, labels], [boxes[:1].expand(100, 4), labels])
    assert not has_same_detections(graph, [boxes, labels], [boxes[:, :2], labels])
    assert has_same_detections(graph, [boxes[:0], labels[:0]], [boxes[:0], labels[:0]])


def test_detections_outputs_of_fixed_size_not_matched():
    """A graph whose outputs have the sizes of its inputs is compared element by element."""
    fixed = clika_compile(lambda x: x * 2, tracing_inputs=[torch.rand(n, 4) for n in (5, 7)]).graph
    x = torch.rand(5, 4)
    assert not has_same_detections(fixed, [x], [x.flip(0)])
