"""Results whose number of rows depends on the data agree in any order."""

import pytest
import torch

from clika_ref import clika_compile
from clika_ref.capture.detections import has_same_detections, pair_rows


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
    assert not has_same_detections(graph, [boxes, labels], [boxes[:0], labels[:0]])


def test_detections_outputs_of_fixed_size_not_matched():
    """A graph whose outputs have the sizes of its inputs is compared element by element."""
    fixed = clika_compile(lambda x: x * 2, tracing_inputs=[torch.rand(n, 4) for n in (5, 7)]).graph
    x = torch.rand(5, 4)
    assert not has_same_detections(fixed, [x], [x.flip(0)])


def test_pair_rows_matches_rows_in_any_order():
    """Each row gets the closest one with its label, in the order of the reference."""
    boxes, labels = make_results(20)
    order = torch.randperm(20)
    (own, expected), (own_labels, expected_labels) = pair_rows([boxes[order] + 0.01, labels[order]], [boxes, labels])
    assert torch.equal(expected, boxes)
    assert torch.equal(own, boxes + 0.01)
    assert torch.equal(own_labels, expected_labels)


def test_pair_rows_without_match_paired_with_zeros():
    """Rows of another label, further away than zeros, or on one side only, have no match."""
    boxes = torch.tensor([[10.0, 10], [20, 20], [30, 30]])
    found = torch.tensor([[30.0, 33], [10, 10], [500, 500]])
    own, expected = pair_rows([found, torch.tensor([3, 9, 2])], [boxes, torch.tensor([1, 2, 3])])[0]
    assert own.tolist() == [[0, 0], [0, 0], [30, 33], [10, 10], [500, 500]]
    assert expected.tolist() == [[10, 10], [20, 20], [30, 30], [0, 0], [0, 0]]
    for pair in (pair_rows([found[:0]], [boxes]), pair_rows([boxes], [found[:0]])):
        assert [len(side) for side in pair[0]] == [3, 3]
