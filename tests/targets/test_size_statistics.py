"""The observed sizes in the form of an artifact: under its names, and only of calls that it accepts."""

import torch

from clika_ref import clika_compile
from clika_ref.targets.size_statistics import symbol_sizes_of, translate_sizes

SEEN = {(("a", 2), ("b", 2)): 3, (("a", 4), ("b", 4)): 1, (("a", 4), ("b", 5)): 7}


def test_symbol_sizes_of_inputs_by_symbol_names():
    """The sizes of inputs are listed by symbols."""
    module = clika_compile(lambda x: x * 2, tracing_inputs=[torch.zeros(2, 3), torch.zeros(5, 7)])
    assert symbol_sizes_of(module.graph, [torch.zeros(4, 6)]) == (("batch", 4), ("x_1", 6))


def test_translate_sizes_renamed_symbols_count_all_calls():
    """With a separate name for each dim, every call counts."""
    found = translate_sizes(SEEN, {"a": "rows", "b": "b"})
    assert found == {(("b", 2), ("rows", 2)): 3, (("b", 4), ("rows", 4)): 1, (("b", 5), ("rows", 4)): 7}


def test_translate_sizes_merged_symbols_count_equal_sizes():
    """If two dims share a name, only calls with equal sizes count."""
    assert translate_sizes(SEEN, {"a": "n", "b": "n"}) == {(("n", 2),): 3, (("n", 4),): 1}


def test_translate_sizes_fixed_dim_counts_matching_calls():
    """If a dim is fixed, only calls with this size count."""
    assert translate_sizes(SEEN, {"a": 4, "b": "b"}) == {(("b", 5),): 7, (("b", 4),): 1}
    assert translate_sizes(SEEN, {"a": 4, "b": 4}) == {(): 1}
    assert translate_sizes(SEEN, {"a": 3, "b": 4}) == {}


def test_translate_sizes_unknown_symbol_dropped():
    """Sizes of symbols that the artifact does not have are left out."""
    assert translate_sizes({(("n", 2), ("gone", 5)): 3}, {"n": "batch"}) == {(("batch", 2),): 3}
