"""Which sizes the dynamic sides of inputs had, and how often: what a target builds its engine for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from clika_ref.core.execution import read_sizes
from clika_ref.core.ir import Graph

Sizes = tuple[tuple[str, int], ...]
"""The sizes in one call, by the names of symbols."""


def sizes_of(graph: Graph, inputs: Sequence[torch.Tensor]) -> Sizes:
    """Return the sizes that the inputs of a graph have."""
    return tuple(sorted(read_sizes(graph, inputs).items()))


def sizes_in_file(seen: Mapping[Sizes, int], names: Mapping[str, str | int]) -> Counter[Sizes]:
    """Return how often which sizes were seen together, of the symbols of an artifact and in the calls that it takes.

    Args:
        seen: how often which sizes were those of a call of the module.
        names: of each symbol of the module the name that it has in the artifact, or the length that it is fixed to.
    """
    found = Counter[Sizes]()
    for sizes, count in seen.items():
        pairs = {(names[symbol], size) for symbol, size in sizes if symbol in names}
        is_taken = len(dict(pairs)) == len(pairs) and all(name == size for name, size in pairs if isinstance(name, int))
        if is_taken:
            found[tuple(sorted((name, size) for name, size in pairs if isinstance(name, str)))] += count
    return found
