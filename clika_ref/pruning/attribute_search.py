"""Find the attributes of a node with shorter dims, by trying candidates and comparing the results."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.ir import Node, Value
from clika_ref.pruning.dependency_graph import DependencyGraph
from clika_ref.pruning.node_probes import NodeProbe

RESULT_TOLERANCE = 1e-4
"""Relative and absolute tolerance of results: shorter sums are summed in another order."""


def check_removable(asked: NodeProbe, found: DependencyGraph) -> str:
    """Try to remove every other unit of a node, and fix units where that fails; return the reason if none can go."""
    node, units = asked.node, found.units
    families: dict[frozenset[int], list[int]] = {}
    for unit in found.free_units(node):
        families.setdefault(units.families(unit), []).append(unit)
    if find_attributes(asked, found, _every_other(families.values())) is not None:
        return ""
    for some in families.values():
        if find_attributes(asked, found, _every_other([some])) is None:
            for unit in some:
                units.fix(unit, f"{node!r} computes a different result without some of them")
    rest = [[u for u in some if not units.reason(u)] for some in families.values()]
    return "" if find_attributes(asked, found, _every_other(rest)) is not None else "its sizes cannot change"


def _every_other(families: Iterable[Sequence[int]]) -> frozenset[int]:
    return frozenset(unit for some in families for unit in some[1::2])


def find_attributes(asked: NodeProbe, found: DependencyGraph, gone: frozenset[int]) -> dict[str, Any] | None:
    """Return attributes that give the same results without some units, or None if there are none."""
    node = asked.node
    kept = {v: found.remaining_indices(v, gone) for v in (*node.inputs, *node.outputs) if isinstance(v, Value)}
    if not any(kept.values()):
        return node.attrs
    if any(not len(indices) for some in kept.values() for indices in some.values()):
        return None
    operands = [
        select_indices(o, kept[v]) if isinstance(v, Value) else o
        for v, o in zip(node.inputs, asked.operands, strict=True)
    ]
    expected = [select_indices(r, kept[v]) for v, r in zip(node.outputs, asked.results, strict=True)]
    shapes = {v.type.shape: found.compute_shape(v, kept[v]) for v in node.outputs}
    lengths = [(len(found.units_of(v)[axis]), indices) for v, some in kept.items() for axis, indices in some.items()]
    for attrs in _candidates(node, lengths, shapes):
        if _is_equivalent(asked, operands, attrs, expected):
            return attrs
    return None


def select_indices(tensor: Tensor, kept: Mapping[int, Tensor]) -> Tensor:
    """Return a tensor with only the kept indices along some dims, by axis."""
    for axis, indices in kept.items():
        tensor = tensor.index_select(axis, indices.to(tensor.device))
    return tensor


def _is_equivalent(
    asked: NodeProbe, operands: Sequence[Any], attrs: Mapping[str, Any], expected: Sequence[Tensor]
) -> bool:
    """Whether a node returns the expected results; operators raise various errors for operands that do not fit."""
    try:
        results = asked.run(operands, attrs)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError):
        return False
    return len(results) == len(expected) and all(
        r.shape == w.shape and torch.allclose(r.double(), w.double(), rtol=RESULT_TOLERANCE, atol=RESULT_TOLERANCE)
        for r, w in zip(results, expected, strict=True)
    )


def _candidates(
    node: Node, lengths: Sequence[tuple[int, Tensor]], shapes: Mapping[Any, Any]
) -> Iterator[dict[str, Any]]:
    """Yield candidate attributes for shorter dims, those with the fewest changes first."""
    choices = {name: _value_candidates(value, shapes, lengths) for name, value in node.attrs.items()}
    combined = itertools.product(*([(name, i) for i in range(len(some))] for name, some in choices.items()))
    for picked in sorted(combined, key=lambda pairs: sum(i > 0 for _, i in pairs)):
        yield {name: choices[name][i] for name, i in picked}


def _value_candidates(value: Any, shapes: Mapping[Any, Any], lengths: Sequence[tuple[int, Tensor]]) -> list[Any]:
    """Return candidates for an attribute: itself, the shape of a result, counts of indices, or lengths of splits."""
    found = [value]
    if isinstance(value, tuple) and value in shapes:
        found.append(shapes[value])
    for length, indices in lengths:
        if isinstance(value, tuple) and value and all(type(n) is int for n in value):
            found.append(tuple(_count_kept(n, length, indices) for n in value))
            if sum(value) == length:
                found.append(_split_lengths(value, indices))
        elif type(value) is int:
            found += [_count_kept(value, length, indices), value * len(indices) // length]
    return [v for i, v in enumerate(found) if v not in found[:i]]


def _count_kept(bound: int, length: int, indices: Tensor) -> int:
    """Return the number of kept indices before a bound; a negative bound counts from the end."""
    if 0 <= bound <= length:
        return int((indices < bound).sum())
    return -int((indices >= length + bound).sum()) if -length <= bound < 0 else bound


def _split_lengths(pieces: Sequence[int], indices: Tensor) -> tuple[int, ...]:
    """Return the kept length of each split of a dim."""
    stops = list(itertools.accumulate(pieces))
    return tuple(int(((indices >= end - n) & (indices < end)).sum()) for n, end in zip(pieces, stops, strict=True))
