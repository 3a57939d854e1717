"""Operators that concatenate, stack and split tensors."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.accuracy import EXACT
from clika_ref.core.errors import ModelError
from clika_ref.core.operators import operator
from clika_ref.core.samples import Call
from clika_ref.core.traits import SHARED_QPARAMS, UNIFIED_QPARAMS
from clika_ref.core.types import Dim, TensorType
from clika_ref_aten import slicing
from clika_ref_aten.families import name_reference
from clika_ref_aten.size_arithmetic import (
    MOVABLE_DTYPES,
    clamp_to_zero,
    floor_quotient,
    min_size,
    normalize_size,
    replace_dim,
)

aten = torch.ops.aten


@operator(aten.cat.default, aten.concat.default, aten.concatenate.default, quant=UNIFIED_QPARAMS, error=EXACT)
def cat(*tensors: Tensor, dim: int = 0) -> Tensor:
    """Concatenate tensors along an existing dim."""
    return torch.cat(tensors, dim)


@cat.onnx
def _(op, *tensors, dim):
    kept = [t for t in tensors if op.shape(t) != (0,)]  # torch accepts empty vectors next to any shape
    return _concat(op, kept or tensors[:1], dim)


@cat.types
def _(*tensors, dim):
    kept = [t for t in tensors if t.shape != (0,)] or tensors[:1]
    length = sum(t.shape[dim] for t in kept)
    return replace_dim(
        TensorType(_dtype(tensors), _common_shape([replace_dim(t, dim, 0) for t in kept])), dim, normalize_size(length)
    )


@cat.samples
def _(draw, s):
    first = draw(s.tensor(rank=(1, 5), dtype=MOVABLE_DTYPES))
    dim = draw(s.integers(-first.rank, first.rank - 1))
    tensors = [first]
    for _ in range(draw(s.choice(1, 0, 2))):
        shape = list(first.shape)
        shape[dim] = draw(s.integers(0, 4))
        tensors.append(draw(s.tensor(shape=draw(s.choice(shape, shape, (0,))), dtype=MOVABLE_DTYPES)))
    return s.call(*tensors, dim=dim)


@operator(aten.stack.default, aten._stack.default, quant=UNIFIED_QPARAMS, error=EXACT)  # noqa: SLF001 - a name of ATen's
def stack(*tensors: Tensor, dim: int = 0) -> Tensor:
    """Stack tensors of one shape along a new dim at position ``dim``."""
    return torch.stack(tensors, dim)


@stack.onnx
def _(op, *tensors, dim):
    return _concat(op, [op.Unsqueeze(t, op.ints([dim])) for t in tensors], dim)


@stack.types
def _(*tensors, dim):
    shape = _common_shape(tensors)
    dim %= len(shape) + 1
    return TensorType(_dtype(tensors), (*shape[:dim], len(tensors), *shape[dim:]))


@stack.samples
def _(draw, s):
    first = draw(s.tensor(rank=(0, 3), dtype=MOVABLE_DTYPES))
    others = [draw(s.tensor(shape=first.shape, dtype=MOVABLE_DTYPES)) for _ in range(draw(s.integers(0, 2)))]
    return s.call(first, *others, dim=draw(s.integers(-first.rank - 1, first.rank)))


def _declare_stack(name, doc, dim, new_dims, *aliases):
    """Declare a concatenation along ``dim`` of tensors that first get new dims: ``new_dims`` lists them by rank."""
    join = getattr(torch, name)

    @operator(getattr(aten, name).default, *aliases, quant=UNIFIED_QPARAMS, error=EXACT)
    @name_reference(name, doc)
    def reference(*tensors: Tensor) -> Tensor:
        return join(tensors)

    @reference.onnx
    def _(op, *tensors):
        return _concat(op, [_add_dims(op, t, new_dims) for t in tensors], min(dim, op.result.rank - 1))

    @reference.samples
    def _(draw, s):
        """Draw tensors of one rank that may differ in size along ``dim`` only."""
        first = draw(s.tensor(dtype=MOVABLE_DTYPES))
        shape = list(first.shape)
        if first.rank > max(dim, 1):
            shape[dim] = draw(s.integers(1, 4))
        return s.call(
            first, *(draw(s.tensor(shape=shape, dtype=MOVABLE_DTYPES)) for _ in range(draw(s.integers(0, 2))))
        )

    return reference


hstack = _declare_stack(
    "hstack",
    "Concatenate tensors along their second dim, vectors along their only one; 0-d tensors become vectors.",
    1,
    {0: [0]},
)
vstack = _declare_stack(
    "vstack",
    "Concatenate tensors along their first dim; a vector becomes a row of a matrix.",
    0,
    {0: [0, 1], 1: [0]},
    aten.row_stack.default,
)
dstack = _declare_stack(
    "dstack",
    "Concatenate tensors along their third dim; a vector becomes ``[1, n, 1]``, a matrix ``[n, m, 1]``.",
    2,
    {0: [0, 1, 2], 1: [0, 2], 2: [2]},
)
column_stack = _declare_stack(
    "column_stack",
    "Concatenate tensors along their second dim; a vector becomes a column of a matrix.",
    1,
    {0: [0, 1], 1: [1]},
)


def _add_dims(op: Any, x: Any, axes: dict[int, list[int]]) -> Any:
    """Unsqueeze an operand at the axes that ``axes`` lists for its rank."""
    new = axes.get(op.rank(x))
    return op.Unsqueeze(x, op.ints(new)) if new else x


def _concat(op: Any, tensors: Any, dim: int) -> Any:
    tensors = op.promote(*tensors)
    return op.Concat(*tensors, axis=dim) if len(tensors) > 1 else tensors[0]


def _dtype(tensors: Any) -> torch.dtype:
    return reduce(torch.promote_types, (t.dtype for t in tensors))


def _common_shape(tensors: Any) -> tuple[Dim, ...]:
    """Return the common shape; sizes that tracing found equal may be different expressions."""
    shapes = [t.shape for t in tensors]
    agreed: list[Dim] = []
    for sizes in zip(*shapes, strict=True):
        numbers = {n for n in sizes if isinstance(n, int)}
        if len(numbers) > 1:
            raise ValueError(f"the shapes {', '.join(map(str, shapes))} do not match")
        agreed.append(numbers.pop() if numbers else sizes[0])
    return tuple(agreed)


@operator(
    aten.split_with_sizes.default,
    aten.split_with_sizes_copy.default,
    aten.unsafe_split_with_sizes.default,
    quant=SHARED_QPARAMS,
    error=EXACT,
)
def split_with_sizes(x: Tensor, *, split_sizes: tuple[int, ...], dim: int = 0) -> tuple[Tensor, ...]:
    """Split ``dim`` into pieces of the given sizes."""
    return torch.split_with_sizes(x, split_sizes, dim)


@split_with_sizes.onnx
def _(op, x, *, split_sizes, dim):
    if len(split_sizes) == 1:
        return x
    return op.Split(x, op.ints(split_sizes), axis=dim, outputs=len(split_sizes))


@split_with_sizes.types
def _(x, *, split_sizes, dim):
    counts = sum(split_sizes), x.shape[dim]
    if all(isinstance(n, int) for n in counts) and counts[0] != counts[1]:
        raise ValueError(f"split_with_sizes({x}, {split_sizes}, dim={dim}): the sizes do not add up to {x.shape[dim]}")
    return tuple(replace_dim(x, dim, normalize_size(n)) for n in split_sizes)


@split_with_sizes.samples
def _(draw, s):
    x = draw(s.tensor(rank=(1, 5), size=(2, 6), dtype=MOVABLE_DTYPES))
    dim = draw(s.integers(-x.rank, x.rank - 1))
    length = x.shape[dim]
    cut = draw(s.integers(0, length))
    return s.call(x, split_sizes=draw(s.choice((cut, length - cut), (length,), (1,) * length)), dim=dim)


@split_with_sizes.write_back
def _(build, base, new, *, split_sizes, dim, index=None):
    if index is None:
        (index,) = range(len(split_sizes))  # omitted for a split into one piece
    start = normalize_size(sum(split_sizes[:index]))
    end = normalize_size(start + split_sizes[index])
    return build(slicing.slice_scatter, base, new, dim=dim, start=start, end=end, types=(base.type,))


@split_with_sizes.from_torch(aten.split.sizes)
def _(x, split_size, dim=0):
    return split_with_sizes.call(x, split_sizes=tuple(split_size), dim=dim)


@split_with_sizes.from_torch(aten.split.Tensor, aten.split_copy.Tensor, aten.unsafe_split.Tensor)
def _(x, split_size, dim=0):
    length = x.type.shape[dim]
    count = (
        length if split_size == 0 else -floor_quotient(-length, split_size)
    )  # rounded up; torch allows 0 / 0 elements
    if not isinstance(count, int):
        raise ModelError(
            f"split({x.type}, {split_size}, dim={dim}): the number of pieces, {count}, is dynamic, but a graph has a "
            "fixed number of values. Use chunk(n), or give the size of every piece."
        )
    count = max(count, 1)
    rest = normalize_size(length - split_size * (count - 1))
    return split_with_sizes.call(x, split_sizes=(*(split_size,) * (count - 1), rest), dim=dim)


@split_with_sizes.from_torch(aten.chunk.default, aten.unsafe_chunk.default)
def _(x, chunks, dim=0):
    length = x.type.shape[dim]
    size: Any = floor_quotient(length if _is_divisible(chunks, length) else length + chunks - 1, chunks)
    count = -(-length // size) if isinstance(length, int) and length else chunks
    return split_with_sizes.call(
        x, split_sizes=(*(size,) * (count - 1), normalize_size(length - size * (count - 1))), dim=dim
    )


def _declare_tensor_split(sections, indices, dim):
    """Declare a split into a number of pieces, and one at indices; ``dim`` is the default, or 0 for vectors."""

    @split_with_sizes.from_torch(sections)
    def _(x, sections, dim=dim):
        return _split_in_sections(x, sections, min(dim, x.type.rank - 1))

    @split_with_sizes.from_torch(indices)
    def _(x, indices, dim=dim):
        return _split_at_indices(x, indices, min(dim, x.type.rank - 1))


_declare_tensor_split(aten.tensor_split.sections, aten.tensor_split.indices, 0)
_declare_tensor_split(aten.hsplit.int, aten.hsplit.array, 1)
_declare_tensor_split(aten.vsplit.int, aten.vsplit.array, 0)
_declare_tensor_split(aten.dsplit.int, aten.dsplit.array, 2)


def _is_divisible(count: int, length: Dim) -> bool:
    return not isinstance(length, int) and bool((length / count).is_integer)


def _split_in_sections(x: Any, sections: int, dim: int) -> Call:
    """Split ``dim`` into ``sections`` pieces; if its size is not divisible, the first pieces are longer by one."""
    length = x.type.shape[dim]
    if _is_divisible(sections, length):
        return split_with_sizes.call(x, split_sizes=(floor_quotient(length, sections),) * sections, dim=dim)
    sizes = (floor_quotient(length + (sections - 1 - i), sections) for i in range(sections))
    return split_with_sizes.call(x, split_sizes=tuple(sizes), dim=dim)


def _split_at_indices(x: Any, indices: tuple[Any, ...], dim: int) -> Call:
    length = x.type.shape[dim]
    ends = [
        min_size(i, length) if not isinstance(i, int) or i >= 0 else clamp_to_zero(normalize_size(length + i))
        for i in indices
    ]
    sizes = [normalize_size(b - a) for a, b in zip([0, *ends], [*ends, length], strict=True)]
    if any(isinstance(n, int) and n < 0 for n in sizes):
        raise ModelError(
            f"tensor_split({x.type}, {indices}, dim={dim}): the indices are not increasing, so the pieces overlap. "
            "Take them one by one with slices."
        )
    return split_with_sizes.call(x, split_sizes=tuple(sizes), dim=dim)
