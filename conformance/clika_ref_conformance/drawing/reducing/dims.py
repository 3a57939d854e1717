"""Reduction of the dynamic dims of a failing case: shorter ones, and static ones if it still fails."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import sympy
import torch

from clika_ref.core.execution import read_sizes
from clika_ref.core.symbols import evaluate
from clika_ref.core.types import Dim
from clika_ref.export.symbol_substitution import substitute_symbols
from clika_ref_conformance.cases import CaseRun, GraphCase

MAX_REDUCED_LENGTH = 3
"""Maximum length that dims are cut to; failures that need longer dims keep theirs."""


def fix_symbols(case: GraphCase, run: CaseRun, names: Collection[str] | None = None) -> GraphCase:
    """Return a case of one run with some symbols, by default all, replaced by their sizes in the run.

    Symbols read from values that nodes compute are kept.
    """
    graph = case.graph.clone()
    sizes = read_sizes(graph, run.inputs)
    gone = {name: length for name, length in sizes.items() if names is None or name in names}
    mapping = {graph.symbols.pop(name).expr: sympy.Integer(length) for name, length in gone.items()}
    substitute_symbols(graph, mapping)
    return replace(case, graph=graph, runs=[run])


def reduce_symbols(case: GraphCase, accepts: Callable[[GraphCase], bool]) -> GraphCase:
    """Return a case of one run with short dims, and static ones where possible, as far as accepted."""
    for name in list(case.graph.symbols):
        run = case.runs[0]
        length = read_sizes(case.graph, run.inputs).get(name)
        if length is None:
            continue
        cuts = (_resize_symbol(case, name, shorter) for shorter in range(1, min(length, MAX_REDUCED_LENGTH + 1)))
        case = next(filter(accepts, cuts), case)
        fixed = fix_symbols(case, case.runs[0], [name])
        if accepts(fixed):
            case = fixed
    return case


def _resize_symbol(case: GraphCase, name: str, length: int) -> GraphCase:
    """Return a case of one run with another length for one symbol."""
    run = case.runs[0]
    sizes = {**read_sizes(case.graph, run.inputs), name: length}
    inputs = [
        _resize_tensor(t, value.type.shape, sizes) for t, value in zip(run.inputs, case.graph.inputs, strict=True)
    ]
    return replace(case, runs=[replace(run, inputs=tuple(inputs))])


def _resize_tensor(tensor: torch.Tensor, shape: Sequence[Dim], sizes: Mapping[str, int]) -> torch.Tensor:
    """Return a tensor cut to its new sizes; longer dims repeat elements, and empty ones get zeros."""
    for dim, size in enumerate(shape):
        known = not isinstance(size, int) and {str(s) for s in size.free_symbols} <= sizes.keys()
        length = evaluate(size, sizes) if known else tensor.shape[dim]
        if tensor.shape[dim] == 0 < length:
            tensor = tensor.new_zeros([length if d == dim else n for d, n in enumerate(tensor.shape)])
        elif length != tensor.shape[dim]:
            tensor = tensor.index_select(dim, torch.arange(length) % tensor.shape[dim])
    return tensor
