"""``check_sizes``: fail where sizes do not satisfy a guard, in the module and in its file."""

from __future__ import annotations

import sympy
from torch import Tensor

from clika_ref.core.accuracy import EXACT
from clika_ref.core.errors import ModelError
from clika_ref.core.operators import operator
from clika_ref.core.traits import SHARED_QPARAMS
from clika_ref_aten.size_arithmetic import MOVABLE_DTYPES

IMPOSSIBLE_SIZE = 2**30
"""A size that no dim has, so that a reshape to it fails."""


@operator(quant=SHARED_QPARAMS, error=EXACT)
def check_sizes(x: Tensor, *, holds: bool, guard: str) -> Tensor:
    """``x`` itself, of rank 1 or more, if a relation between sizes ``holds``; else an error that names the guard.

    Raises:
        ModelError: the relation does not hold.
    """
    if not holds:
        raise ModelError(f"the sizes of the inputs violate {guard}. Pass inputs of other sizes.")
    return x.clone()


@check_sizes.types
def _(x, *, holds, guard):
    return x


@check_sizes.onnx
def _(op, x, *, holds, guard):
    """ONNX has no assertion. A reshape fails in each runtime if the number of elements differs, and moves no data."""
    rank = len(op.shape(x))
    dynamic = next((dim for dim, size in enumerate(op.shape(x)) if not isinstance(size, int)), 0)
    same = [0] * rank  # the sizes of x
    impossible = [IMPOSSIBLE_SIZE if dim == dynamic else 0 for dim in range(rank)]
    return op.Reshape(x, op.Where(op.sizes.emit_vector(sympy.sympify(holds)), op.ints(same), op.ints(impossible)))


@check_sizes.samples
def _(draw, s):
    x = draw(s.tensor(rank=(1, 5), dtype=MOVABLE_DTYPES))
    return s.call(x, holds=sympy.Le(x.shape[0], draw(s.integers(64, 99))), guard="n <= limit")
