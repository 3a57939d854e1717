"""Sizes of dims: that of a batch, and how often dynamic ones occur, which a target builds its engine for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from clika_ref.core.execution import read_sizes
from clika_ref.core.ir import Graph, Value
from clika_ref.core.types import Dim

SymbolSizes = tuple[tuple[str, int], ...]
"""The sizes in one call, by symbol name."""


def find_batch_size(values: Iterable[Value]) -> Dim | None:
    """Return the size of dim 0, if all values have the same: that of a batch. None if they differ."""
    sizes = {value.type.shape[:1] for value in values}
    return next(iter(sizes.pop()), None) if len(sizes) == 1 else None


def symbol_sizes_of(graph: Graph, inputs: Sequence[torch.Tensor]) -> SymbolSizes:
    """Return the symbol sizes of the inputs of a graph."""
    return tuple(sorted(read_sizes(graph, inputs).items()))


def translate_sizes(frequencies: Mapping[SymbolSizes, int], names: Mapping[str, str | int]) -> Counter[SymbolSizes]:
    """Translate the frequencies of sizes to the symbols of an artifact, for the calls that it accepts.

    Args:
        frequencies: how often each combination of sizes occurred in calls of the module.
        names: for each symbol of the module its name in the artifact, or the length that it is fixed to.
    """
    found = Counter[SymbolSizes]()
    for sizes, count in frequencies.items():
        pairs = {(names[symbol], size) for symbol, size in sizes if symbol in names}
        is_taken = len(dict(pairs)) == len(pairs) and all(name == size for name, size in pairs if isinstance(name, int))
        if is_taken:
            found[tuple(sorted((name, size) for name, size in pairs if isinstance(name, str)))] += count
    return found
