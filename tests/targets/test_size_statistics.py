"""Which sizes were seen, as an artifact counts them: under its names, and only of calls that it takes."""

import torch

from clika_ref import clika_compile
from clika_ref.targets.size_statistics import symbol_sizes_of, translate_sizes

SEEN = {(("a", 2), ("b", 2)): 3, (("a", 4), ("b", 4)): 1, (("a", 4), ("b", 5)): 7}


def test_sizes_are_counted_by_symbols():
    module = clika_compile(lambda x: x * 2, tracing_inputs=[torch.zeros(2, 3), torch.zeros(5, 7)])
    assert symbol_sizes_of(module.graph, [torch.zeros(4, 6)]) == (("batch", 4), ("x_1", 6))


def test_of_sides_with_names_of_their_own_every_call_counts():
    found = translate_sizes(SEEN, {"a": "rows", "b": "b"})
    assert found == {(("b", 2), ("rows", 2)): 3, (("b", 4), ("rows", 4)): 1, (("b", 5), ("rows", 4)): 7}


def test_of_sides_that_are_one_only_calls_count_in_which_they_are_equal_and_once():
    assert translate_sizes(SEEN, {"a": "n", "b": "n"}) == {(("n", 2),): 3, (("n", 4),): 1}


def test_of_a_side_that_is_fixed_only_calls_of_that_length_count():
    assert translate_sizes(SEEN, {"a": 4, "b": "b"}) == {(("b", 5),): 7, (("b", 4),): 1}
    assert translate_sizes(SEEN, {"a": 4, "b": 4}) == {(): 1}
    assert translate_sizes(SEEN, {"a": 3, "b": 4}) == {}


def test_sizes_of_symbols_that_the_artifact_has_not_are_left_out():
    assert translate_sizes({(("n", 2), ("gone", 5)): 3}, {"n": "batch"}) == {(("batch", 2),): 3}
