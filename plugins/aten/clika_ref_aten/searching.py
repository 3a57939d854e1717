"""Binary search in sorted sequences."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.types import Number

from clika_ref.core.accuracy import EXACT
from clika_ref.core.operators import operator
from clika_ref.core.types import TensorType

aten = torch.ops.aten


@operator(error=EXACT)
def searchsorted(
    sorted_sequence: Tensor,
    x: Tensor | Number,
    sorter: Tensor | None = None,
    *,
    out_int32: bool = False,
    right: bool = False,
) -> Tensor:
    """Count the elements of ``sorted_sequence[..., n]`` below ``x[..., m]`` (``right``: or equal to it)."""
    return torch.searchsorted(sorted_sequence, x, out_int32=out_int32, right=right, sorter=sorter)


@searchsorted.types
def _(sorted_sequence, x, sorter, *, out_int32, right):
    dtype = torch.int32 if out_int32 else torch.int64
    return TensorType(dtype, x.shape if isinstance(x, TensorType) else ())


@searchsorted.from_torch(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def _(sorted_sequence, x, *, out_int32=False, right=False, side=None, sorter=None):
    right = right or side == "right"
    return searchsorted.call(sorted_sequence, x, sorter, out_int32=out_int32, right=right)


@searchsorted.from_torch(aten.bucketize.Tensor, aten.bucketize.Scalar)
def _(x, boundaries, *, out_int32=False, right=False):
    return searchsorted.call(boundaries, x, None, out_int32=out_int32, right=right)


@searchsorted.onnx
def _(op, sorted_sequence, x, sorter, *, out_int32, right):
    if sorter is not None:
        sorted_sequence = op.GatherElements(sorted_sequence, sorter, axis=-1)
    rank = op.rank(sorted_sequence) if sorter is None else op.rank(sorter)
    dtype = op.dtype(sorted_sequence)
    if isinstance(x, float) and not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    sequence, values = op.promote(sorted_sequence, x, to=dtype)
    if rank > 1:
        sequence = op.Unsqueeze(sequence, op.ints([-2]))
    values = op.Unsqueeze(values, op.ints([-1]))
    beyond = op.Greater(sequence, values) if right else op.GreaterOrEqual(sequence, values)
    passed = op.cast(op.Not(beyond), op.result.dtype)  # negated, since NaN belongs at the end
    last = op.result.rank  # not -1: ONNX Runtime keeps dim -1 of empty tensors
    return op.ReduceSum(passed, op.ints([last]), keepdims=False)


def _draw_sorted(draw, s, shape, dtype):
    """Draw a sequence and the permutation that sorts it: all zeros, of any size, or numbers with ties.

    `torch.searchsorted` does not allow NaN in a sorted sequence.
    """
    if draw(s.booleans()):
        zeros = draw(s.tensor(shape=shape, dtype=dtype, low=0, high=0, domain=(0, 0), nan=False))
        return zeros, draw(s.tensor(shape=shape, dtype=torch.int64, low=0, high=0, domain=(0, 0)))
    steps = [draw(s.integers(0, 2)) for _ in range(shape[-1])]
    rising = (torch.tensor(steps).cumsum(0) - 2).to(dtype).expand(shape)
    if draw(s.booleans()):
        return rising.contiguous(), torch.arange(shape[-1]).expand(shape).contiguous()
    return rising.flip(-1).contiguous(), torch.arange(shape[-1]).flip(0).expand(shape).contiguous()


@searchsorted.samples
def _(draw, s):
    dtype = draw(s.choice(torch.float32, torch.int64))
    shape = tuple(draw(s.integers(1, 3)) for _ in range(draw(s.integers(0, 2))))
    sequence, order = _draw_sorted(draw, s, (*shape, draw(s.integers(1, 5))), dtype)
    if shape:
        x = draw(s.tensor(shape=(*shape, draw(s.integers(1, 4))), dtype=dtype))
    else:
        x = draw(s.choice(1, draw(s.tensor(dtype=dtype))))
    falls = isinstance(sequence, torch.Tensor) and bool((sequence.diff() < 0).any())
    sorter = order if falls or draw(s.booleans()) else None
    return s.call(sequence, x, sorter, out_int32=draw(s.booleans()), right=draw(s.booleans()))
