"""Tensor contractions: einsum, trace and the cross product."""

from __future__ import annotations

import functools
import string
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.accuracy import COMPOSE, DOT
from clika_ref.core.operators import operator
from clika_ref.core.types import TensorType
from clika_ref_aten.elementwise import unary_sampler
from clika_ref_aten.float_layers import float_layer
from clika_ref_aten.linear import NUMBERS, lower_in_int32

aten = torch.ops.aten


def _expand_equation(equation, ranks):
    """Return an einsum equation in explicit form: no spaces or ellipses, an output, lower-case letters if they suffice.

    Runtimes reject equations that ONNX allows: ellipses of different lengths, capital letters.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    hidden = [
        rank - len(term.replace("...", "")) if "..." in term else 0 for term, rank in zip(terms, ranks, strict=True)
    ]
    letters = [c for c in string.ascii_letters if c not in equation]
    shared = letters[: max(hidden)]
    if not arrow:
        used = left.replace("...", "").replace(",", "")
        right = ("..." if "..." in left else "") + "".join(sorted(c for c in used if used.count(c) == 1))
    terms = [t.replace("...", "".join(shared[len(shared) - n :])) for t, n in zip(terms, hidden, strict=True)]
    whole = f"{','.join(terms)}->{right.replace('...', ''.join(shared))}"
    free_letters = iter(letters[len(shared) :])
    capitals = [c for c in dict.fromkeys(whole) if c.isupper()]
    return whole.translate({ord(c): next(free_letters, c) for c in capitals})


@operator(error=DOT, quant=float_layer(matrices=0))
def einsum(*tensors: Tensor, equation: str) -> Tensor:
    """Sum products of elements over the letters that are missing in the output: ``ij,jk->ik``."""
    return torch.einsum(equation, *tensors)


@einsum.types
def _(*tensors, equation):
    whole = _expand_equation(equation, [t.rank for t in tensors])
    left, _, right = whole.partition("->")
    sizes: dict[str, Any] = {}
    for term, tensor in zip(left.split(","), tensors, strict=True):
        for letter, size in zip(term, tensor.shape, strict=True):
            sizes[letter] = size if sizes.get(letter, 1) == 1 else sizes[letter]
    dtype = functools.reduce(torch.promote_types, [t.dtype for t in tensors])  # dtypes may differ if no dim is summed
    unshared = _single_operand_dims(whole, [t.shape for t in tensors])
    if not dtype.is_floating_point and (
        unshared if len(tensors) == 1 else any(size != 1 for size in unshared.values())
    ):
        dtype = torch.int64  # eager calls torch.sum for these dims
    return TensorType(dtype, tuple(sizes[letter] for letter in right))


def _single_operand_dims(equation, shapes):
    """Return the dims summed within one operand, as sizes by letter; other operands lack them or have size 1."""
    left, _, right = equation.partition("->")
    found: dict[str, list[Any]] = {}
    for term, shape in zip(left.split(","), shapes, strict=True):
        for letter, size in dict(zip(term, shape, strict=True)).items():
            found.setdefault(letter, []).append(size)
    longer = {letter: [size for size in sizes if size != 1] for letter, sizes in found.items() if letter not in right}
    return {c: (sizes or [1])[0] for c, sizes in longer.items() if len(sizes) == 1 or len(found[c]) == 1}


@einsum.onnx
def _(op, *tensors, equation):
    equation = _expand_equation(equation, [op.rank(t) for t in tensors])
    equation, tensors = _make_diagonals_adjacent(op, equation, tensors)
    if not op.result.dtype.is_floating_point:
        equation, tensors = _add_ones_factor(op, equation, tensors)
    return lower_in_int32(op, lambda *ts: op.Einsum(*ts, equation=equation), *op.promote(*tensors))


def _make_diagonals_adjacent(op, equation, tensors):
    """Make repeated letters of a term adjacent: ONNX Runtime divides by the size of an empty dim between them."""
    left, _, right = equation.partition("->")
    terms, operands = [], []
    for term, tensor in zip(left.split(","), tensors, strict=True):
        order = sorted(range(len(term)), key=lambda i, term=term: term.index(term[i]))
        terms.append("".join(term[i] for i in order))
        operands.append(tensor if order == [*range(len(term))] else op.Transpose(tensor, perm=order))
        shape = op.shape(tensor)
        op.declare(operands[-1], TensorType(op.dtype(tensor), tuple(shape[i] for i in order)))
    return f"{','.join(terms)}->{right}", tuple(operands)


def _add_ones_factor(op, equation, tensors):
    """Add a factor of ones along the dims that are summed within one integer operand.

    ONNX Runtime sums such dims in float64, which is exact up to 2 ** 53, but products of integers exactly. With
    three or more operands, eager lets the product of two wrap around in their own dtype; here it does not.
    """
    unshared = _single_operand_dims(equation, [op.shape(t) for t in tensors])
    if not unshared:
        return equation, tensors
    left, _, right = equation.partition("->")
    ones = op.Expand(op.like(tensors[0], 1), op.ints(list(unshared.values())))
    return f"{left},{''.join(unshared)}->{right}", (*tensors, ones)


SAMPLE_EQUATIONS = (
    "ij,jk->ik", "bhid,bhjd->bhij", "ij,jk", "ii->i", "ii", "bii,bi->b", "...ij,...jk->...ik", "i...,i...->...",
    "...ij,jk", "A b, b C -> C A", "aB,BC", "i,j,k->kij", "ij,k->ik", "bn,anm,bm->ba", "ij->ji", "...i->...", "bib->b",
)  # fmt: skip


@einsum.samples
def _(draw, s):
    equation, dtype = draw(s.choice(*SAMPLE_EQUATIONS)), draw(s.choice(*NUMBERS))
    sizes = {letter: draw(s.integers(1, 4)) for letter in sorted(set(equation) & set(string.ascii_letters))}
    hidden = [draw(s.integers(1, 3)) for _ in range(2)]
    tensors = []
    for term in equation.replace(" ", "").partition("->")[0].split(","):
        own = hidden[draw(s.integers(0, 2)) :]
        before, dots, after = term.partition("...")
        once = {c for c in sizes if term.count(c) == 1 and draw(s.choice(False, False, False, True))}  # these broadcast
        lengths = {c: 1 if c in once else size for c, size in sizes.items()}
        shape = [*(lengths[c] for c in before), *(own if dots else ()), *(lengths[c] for c in after)]
        tensors.append(draw(s.tensor(shape=shape, dtype=dtype)))
    return s.call(*tensors, equation=equation)


@einsum.from_torch(aten.einsum.default)
def _(equation, tensors, *, path=None):  # the path is an order of computation, which the runtime chooses
    return einsum.call(*tensors, equation=equation)


@einsum.from_torch(aten.tensordot.default)
def _(x, other, dims_self, dims_other):
    first = list(string.ascii_lowercase[: x.type.rank])
    second = list(string.ascii_uppercase[: other.type.rank])
    for i, j in zip(dims_self, dims_other, strict=True):
        second[j] = first[i]
    kept = [c for c in first if c not in second] + [c for c in second if c.isupper()]
    return einsum.call(x, other, equation=f"{''.join(first)},{''.join(second)}->{''.join(kept)}")


@einsum.from_torch(aten.inner.default)
def _(x, other):
    scalar = 0 in (x.type.rank, other.type.rank)
    first, second = string.ascii_lowercase[: x.type.rank], string.ascii_uppercase[: other.type.rank]
    if not scalar:
        first, second = first[:-1] + "z", second[:-1] + "z"
    return einsum.call(x, other, equation=f"{first},{second}->{(first + second).replace('z', '')}")


@einsum.from_torch(aten.linalg_vecdot.default)
def _(x, y, *, dim=-1):
    rank = max(x.type.rank, y.type.rank)
    letters = string.ascii_lowercase[:rank]
    summed = letters[dim % rank]
    first, second = (letters[rank - t.type.rank :] for t in (x, y))
    return einsum.call(x, y, equation=f"{first},{second}->{letters.replace(summed, '')}")


@operator(aten.trace.default, error=DOT)
def trace(x: Tensor) -> Tensor:
    """The sum of ``x[i, i]``; integers are summed as int64."""
    return torch.trace(x)


@trace.types
def _(x):
    return TensorType(x.dtype if x.dtype.is_floating_point else torch.int64, ())


@trace.onnx
def _(op, x):
    x = op.cast(x, op.result.dtype)
    if not op.result.dtype.is_floating_point:  # ONNX Runtime sums integers in float64, but multiplies them exactly
        row, column = op.Reshape(x, op.ints([1, -1])), op.Reshape(op.EyeLike(x), op.ints([-1, 1]))
        return op.Reshape(op.MatMul(row, column), op.ints([]))
    diagonal = op.cast(op.EyeLike(x), torch.bool)
    return op.ReduceSum(op.Where(diagonal, x, op.like(x, 0)), None, keepdims=0)


trace.samples(unary_sampler(rank=2, dtype=NUMBERS))


@operator(aten.linalg_cross.default, error=COMPOSE)
def linalg_cross(x: Tensor, other: Tensor, *, dim: int = -1) -> Tensor:
    """The cross product of vectors of 3 elements along ``dim``; the other dims broadcast."""
    return torch.linalg.cross(x, other, dim=dim)


@linalg_cross.from_torch(aten.cross.default)
def _(x, other, dim=None):
    if dim is None:
        dim = next(i for i, size in enumerate(x.type.shape) if size == 3)  # PyTorch's rule: the first dim of size 3
    return linalg_cross.call(x, other, dim=dim)


@linalg_cross.onnx
def _(op, x, other, *, dim):
    def roll(value, order):
        return op.Gather(value, op.ints(order), axis=dim)

    def product(x, y):
        plus = op.Mul(roll(x, [1, 2, 0]), roll(y, [2, 0, 1]))
        return op.Sub(plus, op.Mul(roll(x, [2, 0, 1]), roll(y, [1, 2, 0])))

    return lower_in_int32(op, product, x, other)


@linalg_cross.samples
def _(draw, s):
    shape = list(draw(s.tensor(rank=(1, 5))).shape)
    dim = draw(s.integers(-len(shape), len(shape) - 1))
    other = [draw(s.choice(size, 1)) for size in shape]
    shape[dim] = other[dim] = 3
    dtype = draw(s.choice(*NUMBERS))
    return s.call(draw(s.tensor(shape=shape, dtype=dtype)), draw(s.tensor(shape=other, dtype=dtype)), dim=dim)
