"""Lines that read an element of a tensor in functions that run in Python are breaks."""

import torch

from clika_ref.partial_graphs.breaks import Break
from clika_ref.partial_graphs.tensor_reads import READ_REASON, list_reads


def read_total(x):
    return float(x.sum()) + x.prod().tolist()


def read_elsewhere(x):
    return x.max().item()


def test_list_reads_names_lines_of_skipped_functions():
    """The innermost line outside PyTorch is named once, and only in the functions given."""
    code = read_total.__code__
    line = code.co_firstlineno
    skipped = [Break("read_total", code.co_filename, line + 1, "a loop", is_skipped=True, first_line=line)]
    x = torch.tensor([1.0, 2.0])
    found = list_reads(lambda: (read_total(x), read_total(x), read_elsewhere(x)), skipped)
    assert found == [Break("read_total", code.co_filename, line + 1, READ_REASON)]
