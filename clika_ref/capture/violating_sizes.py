"""Sizes that violate a guard: those to run, in order to see what happens there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any

import sympy
import torch

from clika_ref.core.guards import is_met
from clika_ref.core.symbols import Guard, Symbol, evaluate

MAX_SIZE = 4096
"""Largest size that is tried: beyond it, a run takes long."""

MAX_COST = 2**21
"""Maximum number of elements of the inputs of a run; an integer may select a row, and counts as `ROW_ELEMENTS`."""

ROW_ELEMENTS = 256

SMALL_SIZES = (*range(1, 10), 16, 32, 64)
"""Sizes of which all combinations are tried, for guards over two or three symbols."""

MAX_COMBINED_SYMBOLS = 3


def find_violating_sizes(
    guard: Guard, base: Mapping[str, int], symbols: Mapping[str, Symbol]
) -> Iterator[Mapping[str, int]]:
    """Yield sizes that violate a guard: changes of one symbol, of all to one size, and then of several.

    Among these, sizes close to ``base`` come first.

    Args:
        guard: the guard.
        base: the size of each symbol in a call that satisfies it.
        symbols: the symbols that may change, with their ranges. Sizes of dims are at least 1.
    """
    names = sorted(str(symbol) for symbol in guard.relation.free_symbols)
    if not names or not set(names) <= symbols.keys() & base.keys():
        return
    tried = {name: _list_sizes(guard, base[name], symbols[name]) for name in names}
    shared = [size for size in tried[names[0]] if all(size in sizes for sizes in tried.values())]
    changes = [{name: size} for name in names for size in tried[name]]
    changes += [dict.fromkeys(names, size) for size in shared]
    if 1 < len(names) <= MAX_COMBINED_SYMBOLS:
        changes += _combine({name: [size for size in tried[name] if size in SMALL_SIZES] for name in names}, base)
    seen: set[tuple[int, ...]] = set()
    for change in changes:
        sizes = {**base, **change}
        key = tuple(sizes[name] for name in names)
        if key not in seen and not is_met(guard, sizes):
            yield sizes
        seen.add(key)


def is_cheap(inputs: Iterable[torch.Tensor], known: Iterable[torch.Tensor]) -> bool:
    """Return whether inputs are few enough elements to run a model on, or no more than those of a known call."""
    return _estimate_cost(inputs) <= max(MAX_COST, _estimate_cost(known))


def _estimate_cost(inputs: Iterable[torch.Tensor]) -> int:
    return sum(x.numel() * (1 if x.is_floating_point() or x.is_complex() else ROW_ELEMENTS) for x in inputs)


def evaluate_shape(shape: tuple[Any, ...], sizes: Mapping[str, int]) -> tuple[int, ...] | None:
    """Return a shape for sizes of its symbols, None if it has no such form, as ``n // (m - 1)`` at ``m = 1``."""
    try:
        found = tuple(evaluate(size, sizes) for size in shape)
    except ArithmeticError:
        return None
    return found if all(size >= 0 for size in found) else None


def _list_sizes(guard: Guard, base: int, symbol: Symbol) -> list[int]:
    """Return the sizes to try for a symbol, close ones first."""
    low = max(-1 if symbol.source.dim is None else 1, -1 if symbol.low is None else symbol.low)
    powers = [2**power for power in range(MAX_SIZE.bit_length())]
    limits = [int(number) for number in guard.relation.atoms(sympy.Integer)]
    tried = {low, *SMALL_SIZES, *powers, *(near for size in (base, *limits) for near in range(size - 2, size + 3))}
    high = MAX_SIZE if symbol.high is None else min(symbol.high, MAX_SIZE)
    allowed = [size for size in tried if low <= size <= high]
    return sorted(allowed, key=lambda size: (abs(size - base), size))


def _combine(tried: Mapping[str, list[int]], base: Mapping[str, int]) -> list[dict[str, int]]:
    """Return all combinations of sizes, close ones first."""
    combined = [dict(zip(tried, sizes, strict=True)) for sizes in product(*tried.values())]
    return sorted(combined, key=lambda change: sum(abs(size - base[name]) for name, size in change.items()))
