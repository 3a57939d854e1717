"""Find the attributes of a node with shorter dims, by trying candidates and comparing the results."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.ir import Node, Value
from clika_ref.pruning.dependencies import Dependencies
from clika_ref.pruning.probing import Probe

CLOSE = 1e-4
"""Relative and absolute tolerance of results: shorter sums are summed in another order."""


def refusal(asked: Probe, found: Dependencies) -> str:
    """Try to remove every other unit of a node, and fix units where that fails; return the reason if none can go."""
    node, units = asked.node, found.units
    values = [*(v for v in node.inputs if isinstance(v, Value)), *node.outputs]
    free = units.free(u for v in values for some in found.of(v).values() for u in some.tolist())
    families: dict[frozenset[int], list[int]] = {}
    for unit in free:
        families.setdefault(units.families(unit), []).append(unit)
    if attributes_without(asked, found, _every_other(families.values())) is not None:
        return ""
    for some in families.values():
        if attributes_without(asked, found, _every_other([some])) is None:
            for unit in some:
                units.fix(unit, f"{node!r} does not compute the same with some of them")
    rest = [[u for u in some if not units.reason(u)] for some in families.values()]
    return "" if attributes_without(asked, found, _every_other(rest)) is not None else "its sizes are fixed"


def _every_other(families: Iterable[Sequence[int]]) -> frozenset[int]:
    return frozenset(unit for some in families for unit in some[1::2])


def attributes_without(asked: Probe, found: Dependencies, gone: frozenset[int]) -> dict[str, Any] | None:
    """Return attributes that give the same results without some units, or None if there are none."""
    node = asked.node
    kept = {v: found.kept(v, gone) for v in (*node.inputs, *node.outputs) if isinstance(v, Value)}
    if not any(kept.values()):
        return node.attrs
    if any(not len(places) for some in kept.values() for places in some.values()):
        return None
    operands = [
        without(o, kept[v]) if isinstance(v, Value) else o for v, o in zip(node.inputs, asked.operands, strict=True)
    ]
    wanted = [without(r, kept[v]) for v, r in zip(node.outputs, asked.results, strict=True)]
    shapes = {v.type.shape: found.shape(v, kept[v]) for v in node.outputs}
    lengths = [(len(found.of(v)[axis]), places) for v, some in kept.items() for axis, places in some.items()]
    for attrs in _candidates(node, lengths, shapes):
        if _computes(asked, operands, attrs, wanted):
            return attrs
    return None


def without(tensor: Tensor, kept: Mapping[int, Tensor]) -> Tensor:
    """Return a tensor with only the kept indices along some dims, by axis."""
    for axis, places in kept.items():
        tensor = tensor.index_select(axis, places.to(tensor.device))
    return tensor


def _computes(asked: Probe, operands: Sequence[Any], attrs: Mapping[str, Any], wanted: Sequence[Tensor]) -> bool:
    """Whether a node returns the expected results; operators raise various errors for operands that do not fit."""
    try:
        results = asked.run(operands, attrs)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError):
        return False
    return len(results) == len(wanted) and all(
        r.shape == w.shape and torch.allclose(r.double(), w.double(), rtol=CLOSE, atol=CLOSE)
        for r, w in zip(results, wanted, strict=True)
    )


def _candidates(
    node: Node, lengths: Sequence[tuple[int, Tensor]], shapes: Mapping[Any, Any]
) -> Iterator[dict[str, Any]]:
    """Yield candidate attributes for shorter dims, those with the fewest changes first."""
    choices = {name: _versions(value, shapes, lengths) for name, value in node.attrs.items()}
    combined = itertools.product(*([(name, i) for i in range(len(some))] for name, some in choices.items()))
    for picked in sorted(combined, key=lambda pairs: sum(i > 0 for _, i in pairs)):
        yield {name: choices[name][i] for name, i in picked}


def _versions(value: Any, shapes: Mapping[Any, Any], lengths: Sequence[tuple[int, Tensor]]) -> list[Any]:
    """Return candidates for an attribute: itself, the shape of a result, counts of indices, or lengths of splits."""
    found = [value]
    if isinstance(value, tuple) and value in shapes:
        found.append(shapes[value])
    for length, places in lengths:
        if isinstance(value, tuple) and value and all(type(n) is int for n in value):
            found.append(tuple(_counted(n, length, places) for n in value))
            if sum(value) == length:
                found.append(_pieces(value, places))
        elif type(value) is int:
            found += [_counted(value, length, places), _divided(value, length, places)]
    return [v for i, v in enumerate(found) if v not in found[:i]]


def _counted(bound: int, length: int, places: Tensor) -> int:
    """Return the number of kept indices before a bound; a negative bound counts from the end."""
    if 0 <= bound <= length:
        return int((places < bound).sum())
    return -int((places >= length + bound).sum()) if -length <= bound < 0 else bound


def _divided(count: int, length: int, places: Tensor) -> int:
    """Scale a number of parts by the kept share of a dim."""
    return count * len(places) // length


def _pieces(pieces: Sequence[int], places: Tensor) -> tuple[int, ...]:
    """Return the kept length of each split of a dim."""
    ends = list(itertools.accumulate(pieces))
    return tuple(int(((places >= end - n) & (places < end)).sum()) for n, end in zip(pieces, ends, strict=True))
