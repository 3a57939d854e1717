"""Broadcasting operators: dims of size 1 expand to any size, without copies."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.accuracy import EXACT
from clika_ref.core.errors import ModelError
from clika_ref.core.operators import operator
from clika_ref.core.traits import SHARED_QPARAMS, UNIFIED_QPARAMS
from clika_ref.core.types import Dim, TensorType
from clika_ref_aten import shaping
from clika_ref_aten.size_arithmetic import MOVABLE_DTYPES, normalize_size

aten = torch.ops.aten


@operator(quant=SHARED_QPARAMS, error=EXACT)
def expand(x: Tensor, *, size: tuple[int, ...]) -> Tensor:
    """``x`` with dims of size 1 expanded to ``size``, and new leading dims."""
    return x.expand(size)


@expand.onnx
def _(op, x, *, size):
    return lower_broadcast(op, x, op.shape(x), size)


@expand.types
def _(x, *, size):
    aligned = size[len(size) - x.rank :] if x.rank else ()
    pairs = list(zip(x.shape, aligned, strict=True))
    misfits = any(isinstance(a, int) and isinstance(b, int) and a not in (1, b) for a, b in pairs)
    if misfits or any(isinstance(n, int) and n < 0 for n in size):  # eager makes a tensor of shape (0, -1)
        raise ValueError(f"expand({x}, size={size}): {x} does not broadcast to this size")
    return TensorType(x.dtype, size)


@expand.samples
def _(draw, s):
    x = draw(s.tensor(dtype=MOVABLE_DTYPES, size=(1, 3)))
    known = {"one": 1, "last": (3, *x.shape)[-1]}

    def length():  # the new size of a dim of size 1; "one" keeps it, so that it may be drawn with any size
        drawn = draw(s.choice(2, "one", 3, "last", 4, 0))
        return known.get(drawn, drawn)

    new = [length() for _ in range(draw(s.integers(0, 2)))]
    longer = [length() for _ in x.shape]
    return s.call(x, size=(*new, *(to if n == 1 else n for n, to in zip(x.shape, longer, strict=True))))


@expand.write_back
def _(build, base, new, *, size):
    if 0 in size:
        return base
    if math.prod(new.type.shape) != math.prod(base.type.shape):
        raise ModelError("a write through an expanded view changes several elements at once. Write before expanding.")
    return build(shaping.reshape, new, shape=base.type.shape, types=(base.type,))


@expand.from_torch(aten.expand.default, aten.expand_copy.default, aten.broadcast_to.default)
def _(x, size, *, implicit=False):
    own = (None,) * (len(size) - x.type.rank) + x.type.shape
    sizes = (length if n == -1 else normalize_size(n) for n, length in zip(size, own, strict=True))
    return expand.call(x, size=tuple(sizes))


@expand.from_torch(aten.expand_as.default)
def _(x, other):
    return expand.call(x, size=other.type.shape)


@operator(aten.broadcast_tensors.default, quant=UNIFIED_QPARAMS, error=EXACT)
def broadcast_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
    """All tensors expanded to their common shape."""
    return tuple(torch.broadcast_tensors(*tensors))


@broadcast_tensors.onnx
def _(op, *tensors):
    return tuple(lower_broadcast(op, x, op.shape(x), op.result.shape) for x in tensors)


@broadcast_tensors.types
def _(*tensors):
    rank = max(x.rank for x in tensors)
    columns = zip(*((1,) * (rank - x.rank) + x.shape for x in tensors), strict=True)
    shape = tuple(map(_common_size, columns))
    return tuple(TensorType(x.dtype, shape) for x in tensors)


@broadcast_tensors.samples
def _(draw, s):
    first = draw(s.tensor(dtype=MOVABLE_DTYPES))
    lower = draw(s.integers(0, first.rank))
    shape = [draw(s.choice(1, n)) for n in first.shape[lower:]]
    return s.call(first, draw(s.tensor(shape=shape, dtype=MOVABLE_DTYPES)))


@operator(aten.meshgrid.default, aten.meshgrid.indexing, quant=UNIFIED_QPARAMS, error=EXACT)
def meshgrid(*tensors: Tensor, indexing: str = "ij") -> tuple[Tensor, ...]:
    """The coordinates of a grid: result ``i`` repeats ``tensors[i][n]`` along every dim but ``i``.

    ``indexing="xy"`` swaps the first two dims.
    """
    return tuple(torch.meshgrid(*tensors, indexing=indexing))


@meshgrid.onnx
def _(op, *tensors, indexing):
    axes = list(range(len(tensors)))
    if indexing == "xy":
        axes[:2] = reversed(axes[:2])
    results = []
    for x, axis in zip(tensors, axes, strict=True):
        others = [i for i in range(len(tensors)) if i != axis or not op.rank(x)]
        shape = tuple(op.result.shape[i] if i == axis and op.rank(x) else 1 for i in range(len(tensors)))
        lifted = op.Unsqueeze(x, op.ints(others)) if others else x
        results.append(lower_broadcast(op, lifted, shape, op.result.shape))
    return tuple(results)


@meshgrid.samples
def _(draw, s):
    dtype = draw(s.choice(*MOVABLE_DTYPES))
    tensors = [draw(s.tensor(rank=(0, 1), dtype=dtype)) for _ in range(draw(s.integers(1, 3)))]
    return s.call(*tensors, indexing=draw(s.choice("ij", "xy")))


def _common_size(sizes: tuple[Dim, ...]) -> Dim:
    """Return the common size of dims that broadcast; sizes other than 1 are equal, but may be different expressions."""
    longer = [n for n in sizes if n != 1]
    numbers = {n for n in longer if isinstance(n, int)}
    if len(numbers) > 1:
        raise ValueError(f"dims of the sizes {sizes} do not broadcast")
    return numbers.pop() if numbers else (longer or [1])[0]


def lower_broadcast(op: Any, x: Any, before: tuple[Dim, ...], after: tuple[Dim, ...]) -> Any:
    """Broadcast ``x`` from the shape ``before`` to ``after``, without reading the sizes that do not change."""
    if before == after:
        return x
    if 0 in after and 0 not in before:  # ONNX Runtime's Expand keeps size 1 where size 0 is requested
        return op.cast(op.declare(op.ConstantOfShape(op.ints(after)), torch.float32), op.dtype(x))
    own = (1,) * (len(after) - len(before)) + before
    sizes = op.ints([1 if a == b else b for a, b in zip(own, after, strict=True)])
    if op.dtype(x) == torch.bfloat16:  # ONNX Runtime has bfloat16 casts, but no Expand
        return op.cast(op.Expand(op.cast(x, torch.float32), sizes), torch.bfloat16)
    return op.Expand(x, sizes)
