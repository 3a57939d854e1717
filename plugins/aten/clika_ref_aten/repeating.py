"""Operators that repeat elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.types import Number

from clika_ref.core.accuracy import EXACT
from clika_ref.core.operators import operator
from clika_ref.core.symbols import is_symbolic
from clika_ref.core.traits import KEEP_FLOAT, SHARED_QPARAMS
from clika_ref.core.types import TensorType
from clika_ref_aten.size_arithmetic import MOVABLE_DTYPES, make_index_range, normalize_size, numel_of, replace_dim

aten = torch.ops.aten


@operator(aten.repeat.default, quant=SHARED_QPARAMS, error=EXACT)
def repeat(x: Tensor, *, repeats: tuple[int, ...]) -> Tensor:
    """Tile ``x``: ``repeats[i]`` copies along dim ``i`` of the result, with new dims first."""
    return x.repeat(repeats)


@repeat.onnx
def _(op, x, *, repeats):
    new = len(repeats) - op.rank(x)
    lifted = op.Unsqueeze(x, op.ints(range(new))) if new else x
    return lifted if all(n == 1 for n in repeats) else op.Tile(lifted, op.ints(repeats))


@repeat.types
def _(x, *, repeats):
    own = (1,) * (len(repeats) - x.rank) + x.shape
    return TensorType(x.dtype, tuple(normalize_size(n * r) for n, r in zip(own, repeats, strict=True)))


@repeat.samples
def _(draw, s):
    x = draw(s.tensor(rank=(0, 3), dtype=MOVABLE_DTYPES))
    count = x.rank + draw(s.integers(0, 2))
    return s.call(x, repeats=tuple(draw(s.choice(1, 2, 3, 0)) for _ in range(count)))


@repeat.from_torch(aten.tile.default)
def _(x, dims):
    return repeat.call(x, repeats=(*(1,) * (x.type.rank - len(dims)), *dims))


@operator(
    aten.repeat_interleave.self_int, aten.repeat_interleave.self_Tensor, quant=SHARED_QPARAMS, error=EXACT
)  # fmt: skip
def repeat_interleave(
    x: Tensor, repeats: Tensor | Number, *, dim: int | None = None, output_size: int | None = None
) -> Tensor:
    """Repeat each element along ``dim`` ``repeats`` times in a row; a tensor holds one count per index.

    Without ``dim``, ``x`` is flattened. If ``repeats`` is a tensor, the size of the result depends on its elements;
    ``output_size`` gives it in advance.
    """
    return aten.repeat_interleave(x, repeats, dim, output_size=output_size)


@repeat_interleave.onnx
def _(op, x, repeats, *, dim, output_size):
    shape = _flatten_shape(op.shape(x), dim)
    dim = 0 if dim is None else dim % len(shape)
    flat = x if shape == op.shape(x) else op.reshape(x, shape)
    if not isinstance(repeats, int) and not is_symbolic(repeats):
        counts, size = op.cast(repeats, torch.int64), op.ints([shape[dim]])
        one = op.shape(repeats) in ((), (1,))  # if the size is 1 at run time only, the dim is not empty
        counts = op.Tile(op.Reshape(counts, op.ints([1])), size) if one else op.Expand(counts, size)
        return op.Gather(flat, _source_indices(op, counts, output_size), axis=dim)
    if repeats == 1:
        return flat
    copies = op.Unsqueeze(flat, op.ints([dim + 1]))
    times = [repeats if i == dim + 1 else 1 for i in range(len(shape) + 1)]
    copies = op.Tile(copies, op.ints(times))  # not Expand: ONNX Runtime's keeps size 1 where 0 is requested
    return op.reshape(copies, op.result.shape)


@repeat_interleave.types
def _(x, repeats, *, dim, output_size):
    flat = TensorType(x.dtype, _flatten_shape(x.shape, dim))
    dim = 0 if dim is None else dim
    if isinstance(repeats, TensorType):
        return replace_dim(flat, dim, _require_output_size(output_size))
    return replace_dim(flat, dim, normalize_size(flat.shape[dim] * repeats))


@repeat_interleave.samples
def _(draw, s):
    x = draw(s.tensor(rank=(0, 3), dtype=MOVABLE_DTYPES))
    dim = draw(s.choice(None, *range(-x.rank, x.rank)))
    size = _flatten_shape(x.shape, dim)[dim or 0]
    if draw(s.booleans()):
        return s.call(x, draw(s.integers(0, 3)), dim=dim)
    count = draw(s.choice(size, 1))
    repeats, output_size = _draw_counts(draw, s, count, size // count)
    return s.call(x, repeats, dim=dim, output_size=output_size)


@operator(aten.repeat_interleave.Tensor, quant=KEEP_FLOAT, error=EXACT)
def repeat_interleave_indices(repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    """Each index ``i``, ``repeats[i]`` times in a row."""
    return torch.repeat_interleave(repeats, output_size=output_size)


@repeat_interleave_indices.onnx
def _(op, repeats, *, output_size):
    return op.cast(_source_indices(op, op.cast(repeats, torch.int64), output_size), op.result.dtype)


@repeat_interleave_indices.types
def _(repeats, *, output_size):
    return TensorType(repeats.dtype, (_require_output_size(output_size),))


@repeat_interleave_indices.samples
def _(draw, s):
    repeats, output_size = _draw_counts(draw, s, draw(s.integers(1, 5)), 1)
    return s.call(repeats, output_size=output_size)


def _draw_counts(draw: Any, s: Any, size: int, times: int) -> tuple[Any, int | None]:
    """Draw counts, and ``times`` their sum or None; if the sum is given, all counts are equal."""
    low = draw(s.integers(0, 3))
    known = draw(s.booleans())
    span = (low, low if known else 4)
    counts = s.tensor(shape=(size,), dtype=(torch.int64, torch.int32), low=span[0], high=span[1], domain=span)
    return draw(counts), low * size * times if known else None


def _flatten_shape(shape: tuple[Any, ...], dim: int | None) -> tuple[Any, ...]:
    return (numel_of(shape),) if dim is None or not shape else shape


def _require_output_size(output_size: Any) -> Any:
    if output_size is None:
        raise ValueError(
            "the size of the result depends on the data (the elements of `repeats_check`); give output_size"
        )
    return output_size


def _source_indices(op: Any, counts: Any, length: Any) -> Any:
    """Return ``int64[sum of counts]``: the number of cumulative sums of ``counts`` that are at most each position."""
    ends = op.CumSum(counts, op.scalar(0, torch.int64))
    if length is None:
        numbers = (op.scalar(0, torch.int64), op.ReduceSum(counts, keepdims=0), op.scalar(1, torch.int64))
        positions = op.Range(*numbers)
    else:
        positions = make_index_range(op, length)
    passed = op.GreaterOrEqual(op.Unsqueeze(positions, op.ints([1])), op.Unsqueeze(ends, op.ints([0])))
    return op.ReduceSum(op.cast(passed, torch.int64), op.ints([1]), keepdims=0)
