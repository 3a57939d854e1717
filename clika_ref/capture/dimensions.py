"""Find dynamic dims by comparing the inputs, and choose tracing inputs with distinct sizes for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from clika_ref.capture.signature import is_same_constant
from clika_ref.core.errors import ModelError


@dataclass(frozen=True)
class InputDim:
    """Dim ``dim`` of leaf ``leaf`` of a call, or the leaf itself (an integer) if ``dim`` is None."""

    leaf: int
    dim: int | None


@dataclass
class InputComparison:
    """The differences between the calls: the leaves of each call, and the sizes of every dim that differs."""

    names: list[str]
    calls: list[list[Any]]
    sizes: dict[InputDim, tuple[int, ...]] = field(default_factory=dict)

    @property
    def groups(self) -> list[list[InputDim]]:
        """The dynamic dims, grouped by equal sizes in all calls."""
        by_lengths: dict[tuple[int, ...], list[InputDim]] = {}
        for dim, lengths in self.sizes.items():
            by_lengths.setdefault(lengths, []).append(dim)
        return list(by_lengths.values())

    def label(self, dim: InputDim) -> str:
        """Return a readable name of a dim."""
        name = self.names[dim.leaf]
        return name if dim.dim is None else f"dim {dim.dim} of {name!r}"


def compare_inputs(
    names: list[str], calls: Sequence[Sequence[Any]], labels: Sequence[str], *, dynamic: bool
) -> InputComparison:
    """Find the differences between the leaves of several calls, which messages name by their labels.

    Raises:
        ModelError: calls differ in a property that no graph can vary, or differ at all with ``dynamic`` off.
    """
    result = InputComparison(names, [list(c) for c in calls])
    for index, (name, *values) in enumerate(zip(names, *calls, strict=True)):
        first = values[0]
        if isinstance(first, torch.Tensor):
            _compare_tensors(result, index, values, labels, marks_count=dynamic)
        elif isinstance(first, int) and not isinstance(first, bool) and all(type(v) is int for v in values):
            if len(set(values)) > 1:
                result.sizes[InputDim(index, None)] = tuple(values)
        elif not all(is_same_constant(v, first) for v in values):
            kinds = _join_by_value([f"{v!r} ({type(v).__name__})" for v in values], labels)
            raise ModelError(
                f"input {name!r} is {kinds}, but only integers and dims of tensors can be dynamic. Make it a tensor, "
                "or compile once for each value."
            )
    if result.sizes and not dynamic:
        shown = "; ".join(f"{result.label(s)}: {', '.join(map(str, v))}" for s, v in result.sizes.items())
        raise ModelError(
            f"the inputs differ ({shown}), but dynamic=False makes every dim static. Give inputs of one shape."
        )
    return result


def _join_by_value(values: Sequence[str], labels: Sequence[str]) -> str:
    """Return each distinct value with the first input that has it.

    >>> _join_by_value(["1.5", "1.5", "2.5"], ["tracing input 1", "tracing input 2", "tracing input 3"])
    '1.5 in tracing input 1 and 2.5 in tracing input 3'
    """
    first = dict(zip(reversed(values), reversed(labels), strict=True))
    return " and ".join(f"{value} in {first[value]}" for value in dict.fromkeys(values))


def _compare_tensors(
    result: InputComparison, index: int, values: list[Any], labels: Sequence[str], *, marks_count: bool
) -> None:
    first = values[0]
    kinds = {
        (v.dtype, v.dim()) if isinstance(v, torch.Tensor) else type(v).__name__: number
        for number, v in reversed([*enumerate(values)])
    }
    if len(kinds) > 1:
        shown = sorted(kinds.values())
        described = [f"{v.dtype}{list(v.shape)}" if isinstance(v, torch.Tensor) else repr(v) for v in values]
        raise ModelError(
            f"input {result.names[index]!r} is "
            f"{_join_by_value([described[n] for n in shown], [labels[n] for n in shown])}. Use one dtype and one "
            "number of dims for it; data_transform_fn can convert each input."
        )
    marked = set().union(*(getattr(v, "_dynamo_dynamic_indices", set()) for v in values if marks_count))
    for dim in range(first.dim()):
        lengths = tuple(v.shape[dim] for v in values)
        if len(set(lengths)) > 1 or dim in marked:
            result.sizes[InputDim(index, dim)] = lengths


def choose_tracing_inputs(comparison: InputComparison) -> list[list[Any]]:
    """Return leaves to trace with, best first: all dynamic dims distinct and at least 2, resized if necessary.

    With a size of 1 or two equal sizes, a tracer would specialize on that input. The largest given call is the
    fallback.
    """
    groups = comparison.groups
    volume = [sum(math.log(max(v[i], 1)) for v in comparison.sizes.values()) for i in range(len(comparison.calls))]
    by_size = sorted(range(len(comparison.calls)), key=lambda i: -volume[i])
    if not groups:
        return [comparison.calls[0]]
    columns = [comparison.sizes[g[0]] for g in groups]
    for i in by_size:
        lengths = [column[i] for column in columns]
        if min(lengths) >= 2 and len(set(lengths)) == len(lengths):
            return [comparison.calls[i]]
    chosen = _choose_distinct_sizes(columns)
    sizes = {dim: size for group, size in zip(groups, chosen, strict=True) for dim in group}
    return [resize_leaves(comparison.calls[by_size[0]], sizes), comparison.calls[by_size[0]]]


def _choose_distinct_sizes(columns: list[tuple[int, ...]]) -> list[int]:
    """Choose one size per column, all distinct and at least 2; multiples of given sizes if none is free."""
    taken: set[int] = set()
    result: list[int] = []
    for column in columns:
        given = sorted({c for c in column if c >= 2}, reverse=True)
        largest = max(*column, 1)
        candidates = [*given, *(largest * factor for factor in range(2, len(columns) + 3))]
        size = next(c for c in candidates if c not in taken and c >= 2)
        taken.add(size)
        result.append(size)
    return result


def resize_leaves(leaves: list[Any], sizes: dict[InputDim, int]) -> list[Any]:
    """Return leaves with some dims repeated or cut to the given sizes."""
    result = list(leaves)
    for dim, size in sizes.items():
        leaf = result[dim.leaf]
        if dim.dim is None:
            result[dim.leaf] = size
        elif leaf.shape[dim.dim] != size and leaf.shape[dim.dim] > 0:
            index = torch.arange(size, device=leaf.device) % leaf.shape[dim.dim]
            result[dim.leaf] = leaf.index_select(dim.dim, index)
    return result


def count_elements(leaves: Sequence[Any]) -> int:
    """Return the number of tensor elements in a call, an estimate of its cost."""
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))
