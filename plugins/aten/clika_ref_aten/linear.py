"""Matrix and vector products, also of one matrix per group of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from clika_ref.core.accuracy import DOT, EXACT, ulp
from clika_ref.core.errors import TargetError
from clika_ref.core.operators import operator
from clika_ref.core.symbols import is_symbolic
from clika_ref.core.traits import compute_trait
from clika_ref.core.types import TensorType
from clika_ref_aten.float_layers import FLOAT_PRODUCT, float_layer
from clika_ref_aten.reduction import is_nonempty

aten = torch.ops.aten

FLOATS = (torch.float32, torch.float32, torch.float64)
NUMBERS = (*FLOATS, torch.int64, torch.int32, torch.uint8)
NARROW_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int16})
"""Integer dtypes that ONNX Runtime cannot multiply; the product in int32 is equal modulo their range."""


def lower_in_int32(op, lowering, *operands):
    """Apply a lowering, in int32 if the operands are narrower integers."""
    dtype = op.dtype(operands[0])
    if dtype not in NARROW_INTEGERS:
        return lowering(*operands)
    return op.cast(lowering(*(op.cast(o, torch.int32) for o in operands)), dtype)


def _matmul(op, a, b):
    return lower_in_int32(op, op.MatMul, a, b)


def _matmul_vector(op, a, vector):
    """Return ``a[..., k] @ vector[k]``, as the product with a column.

    If ``a`` is transposed, ONNX Runtime 1.31 fuses that with a product of a vector, and returns wrong elements. For
    ``k = 0``, it leaves the result uninitialized.
    """
    terms, is_matrix = op.shape(a)[-1], op.rank(a) > 1
    product = _matmul(op, a, op.Unsqueeze(vector, op.ints([1])) if is_matrix else vector)
    product = op.Squeeze(product, op.ints([-1])) if is_matrix else product
    return op.Where(is_nonempty(op, terms), product, op.like(a, 0)) if op.sizes.may_be_zero(terms) else product


def _is_autocast_enabled(kind: str) -> bool:
    """Return whether autocast is enabled on a device type, and so casts the operands to one dtype."""
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


@operator(aten.linear.default, quant=compute_trait(weight=1, axis=0, bias=2), error=DOT)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x[..., k] @ weight[n, k].T + bias[n]``; a 1-d weight gives one number per row.

    Raises:
        ValueError: the bias has another dtype, and autocast is off; eager accepts or rejects it depending on the memory
            layout of ``x``.
    """
    if bias is not None and bias.dtype != x.dtype and not _is_autocast_enabled(x.device.type):
        raise ValueError(f"linear of {x.dtype} does not support a bias of {bias.dtype}. Convert it to {x.dtype}.")
    return F.linear(x, weight, bias)


@linear.onnx
def _(op, x, weight, bias=None):
    floating = op.result.dtype.is_floating_point
    if floating and op.rank(x) == 2 and op.rank(weight) == 2:
        return op.Gemm(x, weight, bias, transB=1)
    if op.rank(weight) == 1:
        product = _matmul_vector(op, x, weight)
    else:
        product = _matmul(op, x, op.Transpose(weight, perm=[1, 0]))
    return product if bias is None else lower_in_int32(op, op.Add, product, bias)


@linear.samples
def _(draw, s):
    x = draw(s.tensor(rank=(1, 5), dtype=NUMBERS))
    if draw(s.choice(False, False, True)):
        return s.call(x, draw(s.tensor(shape=x.shape[-1:], dtype=x.dtype)))
    shape = (draw(s.integers(1, 5)), x.shape[-1])
    bias = draw(s.tensor(shape=shape[:-1], dtype=x.dtype)) if draw(s.booleans()) else None
    return s.call(x, draw(s.tensor(shape=shape, dtype=x.dtype)), bias)


@operator(
    aten.matmul.default,
    aten.linalg_matmul.default,
    aten.mm.default,
    aten.bmm.default,
    aten.mv.default,
    aten.dot.default,
    aten.vdot.default,
    quant=compute_trait(weight=1, axis=-1),
    error=DOT,
)
def matmul(x: Tensor, other: Tensor) -> Tensor:
    """``x[..., n, k] @ other[..., k, m]``; a vector is a row on the left and a column on the right."""
    return torch.matmul(x, other)


@matmul.onnx
def _(op, x, other):
    return (_matmul_vector if op.rank(other) == 1 else _matmul)(op, x, other)


@matmul.samples
def _(draw, s):
    x = draw(s.tensor(rank=(1, 5), dtype=NUMBERS))
    batch = tuple(draw(s.choice(n, 1)) for n in x.shape[:-2])[draw(s.integers(0, 2)) :]
    columns = (draw(s.integers(1, 4)),) if draw(s.choice(True, True, False)) else ()
    shape = (*batch, x.shape[-1], *columns) if columns else x.shape[-1:]
    return s.call(x, draw(s.tensor(shape=shape, dtype=x.dtype)))


def multiply_unfused(op, x, number):
    """Return ``x * number`` next to a matrix product, so that ONNX Runtime does not fuse the factor as float32."""
    if op.dtype(x) != torch.float64 or is_exact_in_float32(number):
        return op.Mul(x, op.like(x, number))
    return op.Neg(op.Mul(op.Neg(x), op.like(x, number)))


def is_exact_in_float32(number):
    """Return whether a float32 ONNX attribute holds a number exactly; size expressions never become attributes."""
    return not isinstance(number, int | float) or torch.tensor(number, dtype=torch.float32).double().item() == number


def _blend(op, x, product, beta, alpha):
    """Return ``beta * x + alpha * product``; if ``beta`` is 0, ``x`` is ignored, NaN included."""

    def scale(value, number):
        return value if number == 1 else multiply_unfused(op, value, number)

    if beta == 0:
        return scale(product, alpha)
    return op.Add(scale(x, beta), scale(product, alpha))


def _multiply_and_blend(op, x, a, b, *, beta, alpha):
    return lower_in_int32(op, lambda x, a, b: _blend(op, x, _matmul(op, a, b), beta, alpha), x, a, b)


def _blend_nonzero_product(op, x, a, b, *, beta, alpha):
    """Lower like `_multiply_and_blend`, but omit the product where ``alpha`` is 0, as eager's BLAS does.

    A product without terms is omitted too: ONNX Runtime 1.31 does not compute it as 0 before adding a vector.
    """
    if op.shape(a)[-1] != 0 and (alpha != 0 or not op.result.dtype.is_floating_point):
        return _multiply_and_blend(op, x, a, b, beta=beta, alpha=alpha)
    blended = op.like(x, 0) if beta == 0 else lower_in_int32(op, lambda x: op.Mul(x, op.like(x, beta)), x)
    return op.Expand(blended, op.ints(op.result.shape))


def _product_type(x, a, b, **_):
    """Type rule of a blended product: fake tensors check whether a symbolic dim is 0, or need static sizes."""
    return TensorType(x.dtype, (*a.shape[:-1], *(b.shape[-1:] if b.rank > 1 else ())))


def _samples_of_blends(x_rank, a_rank, b_rank):
    def sample(draw, s):
        dtype = draw(s.choice(*NUMBERS))
        b, n, k, m = (draw(s.integers(1, 4)) for _ in range(4))
        first, second = (b, n, k)[-a_rank:], (b, k, m)[-b_rank:] if b_rank > 1 else (k,)
        result = (b, n, m)[-x_rank:] if b_rank > 1 else (n,)
        x_shape = tuple(draw(s.choice(size, 1)) for size in result)[draw(s.integers(0, x_rank)) :]
        whole = s.choice(1, 2, 0, -1)
        factor = s.choice(1, 2, 0.5, 0, -1.5) if dtype.is_floating_point else whole
        tensors = [draw(s.tensor(shape=shape, dtype=dtype)) for shape in (x_shape, first, second)]
        return s.call(*tensors, beta=draw(factor), alpha=draw(factor))

    return sample


@operator(aten.addmm.default, error=DOT, quant=FLOAT_PRODUCT)
def addmm(x: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``beta * x + alpha * (mat1[n, k] @ mat2[k, m])``, where ``x`` broadcasts to ``[n, m]``."""
    return torch.addmm(x, mat1, mat2, beta=beta, alpha=alpha)


@addmm.onnx
def _(op, x, mat1, mat2, *, beta, alpha):
    known = all(isinstance(n, int | float) for n in (alpha, beta))
    exact = known and (op.result.dtype != torch.float64 or (is_exact_in_float32(alpha) and is_exact_in_float32(beta)))
    if op.result.dtype.is_floating_point and exact and alpha and op.shape(mat1)[-1] != 0:
        return op.Gemm(mat1, mat2, x if beta else None, alpha=float(alpha), beta=float(beta))
    return _blend_nonzero_product(op, x, mat1, mat2, beta=beta, alpha=alpha)


addmm.types(_product_type)
addmm.samples(_samples_of_blends(2, 2, 2))


@operator(aten.baddbmm.default, error=DOT, quant=FLOAT_PRODUCT)
def baddbmm(x: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``beta * x + alpha * (batch1[b, n, k] @ batch2[b, k, m])``, where ``x`` broadcasts to ``[b, n, m]``."""
    return torch.baddbmm(x, batch1, batch2, beta=beta, alpha=alpha)


baddbmm.onnx(_multiply_and_blend)
baddbmm.types(_product_type)
baddbmm.samples(_samples_of_blends(3, 3, 3))


@operator(aten.addmv.default, error=DOT)
def addmv(x: Tensor, mat: Tensor, vec: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``beta * x + alpha * (mat[n, k] @ vec[k])``, where ``x`` broadcasts to ``[n]``."""
    return torch.addmv(x.expand(mat.shape[:1]), mat, vec, beta=beta, alpha=alpha)  # eager does not for 0 rows


addmv.onnx(_blend_nonzero_product)
addmv.types(_product_type)
addmv.samples(_samples_of_blends(1, 2, 1))


@operator(aten.addbmm.default, error=DOT, quant=FLOAT_PRODUCT)
def addbmm(x: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``beta * x + alpha * sum_b(batch1[b, n, k] @ batch2[b, k, m])``, where ``x`` broadcasts to ``[n, m]``."""
    return torch.addbmm(x, batch1, batch2, beta=beta, alpha=alpha)


@addbmm.types
def _(x, batch1, batch2, **_):
    return TensorType(x.dtype, (batch1.shape[1], batch2.shape[2]))


@addbmm.onnx
def _(op, x, batch1, batch2, *, beta, alpha):
    b, n, k = op.shape(batch1)
    rows = op.reshape(op.Transpose(batch1, perm=[1, 0, 2]), (n, b * k))
    op.declare(rows, TensorType(op.dtype(batch1), (n, b * k)))
    columns = op.reshape(batch2, (b * k, op.shape(batch2)[2]))
    return _blend_nonzero_product(op, x, rows, columns, beta=beta, alpha=alpha)


addbmm.samples(_samples_of_blends(2, 3, 3))


@operator(aten.addr.default, error=ulp(8, 10.0))
def addr(x: Tensor, vec1: Tensor, vec2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``beta * x + alpha * (vec1[n, 1] * vec2[m])``, where ``x`` broadcasts to ``[n, m]``."""
    dtype = torch.promote_types(x.dtype, torch.promote_types(vec1.dtype, vec2.dtype))  # even if x is 0-d
    return torch.addr(x, vec1, vec2, beta=beta, alpha=alpha).to(dtype)


@addr.onnx
def _(op, x, vec1, vec2, *, beta, alpha):
    def blend(x, vec1, vec2):
        column = op.Unsqueeze(vec1 if alpha == 1 else op.Mul(vec1, op.like(vec1, alpha)), op.ints([1]))
        return _blend(op, x, op.Mul(column, vec2), beta, 1)

    if op.result.dtype == torch.bool:  # ONNX has no bool Mul
        return op.cast(blend(*op.promote(x, vec1, vec2, to=torch.int32)), torch.bool)
    return lower_in_int32(op, blend, *op.promote(x, vec1, vec2))


@addr.samples
def _(draw, s):
    call = _samples_of_blends(2, 2, 2)(draw, s)
    x, mat1, mat2 = call.operands
    attrs = dict(call.attrs)
    if draw(s.choice(False, False, True)):
        x = draw(s.tensor(shape=x.shape, dtype=torch.bool))
        attrs = {"beta": draw(s.choice(1, 0)), "alpha": draw(s.choice(1, 0))}
    dtype = draw(s.choice(x.dtype, torch.float64, torch.int64)) if x.dtype.is_floating_point else x.dtype
    vectors = [draw(s.tensor(shape=size, dtype=dtype)) for size in (mat1.shape[:1], mat2.shape[1:])]
    return s.call(x, *vectors, **attrs)


@operator(aten.outer.default, aten.ger.default, error=EXACT)
def outer(x: Tensor, vec2: Tensor) -> Tensor:
    """``x[n, 1] * vec2[m]``."""
    return torch.outer(x, vec2)


@outer.onnx
def _(op, x, vec2):
    column = op.Unsqueeze(x, op.ints([1]))
    x, y = op.promote(column, vec2)
    return lower_in_int32(op, op.Mul, x, y)


@outer.samples
def _(draw, s):
    return s.call(draw(s.tensor(rank=1, dtype=NUMBERS)), draw(s.tensor(rank=1, dtype=NUMBERS)))


@operator(aten.bilinear.default, error=DOT, quant=float_layer(matrices=2))
def bilinear(x: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``y[..., o] = sum_ij x[..., i] * weight[o, i, j] * input2[..., j] + bias[o]``."""
    return F.bilinear(x, input2, weight, bias)


@bilinear.types
def _(x, input2, weight, bias=None):  # for the reason of addmm's
    return TensorType(x.dtype, (*x.shape[:-1], weight.shape[0]))


@bilinear.onnx
def _(op, x, input2, weight, bias=None):
    out, i, j = op.shape(weight)
    matrix = op.reshape(op.Transpose(weight, perm=[1, 0, 2]), (i, out * j))
    halfway = op.reshape(op.MatMul(x, matrix), (*op.shape(x)[:-1], out, j))
    product = op.Squeeze(op.MatMul(halfway, op.Unsqueeze(input2, op.ints([-1]))), op.ints([-1]))
    return product if bias is None else op.Add(product, bias)


@bilinear.samples
def _(draw, s):
    x = draw(s.tensor(rank=(1, 5), dtype=FLOATS))
    out, j = draw(s.integers(1, 4)), draw(s.integers(1, 4))
    bias = draw(s.tensor(shape=(out,), dtype=x.dtype)) if draw(s.booleans()) else None
    input2 = draw(s.tensor(shape=(*x.shape[:-1], j), dtype=x.dtype))
    return s.call(x, input2, draw(s.tensor(shape=(out, x.shape[-1], j), dtype=x.dtype)), bias)


# One matrix per group of rows, as in mixture-of-experts layers

OFFSET_DTYPES = (torch.int32, torch.int64)


@operator(error=DOT, quant=float_layer(matrices=1, axis=-1))
def grouped_mm(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """``x[offs[i - 1]:offs[i]] @ weight[i]``, concatenated: ``x[s, k]`` and ``weight[g, k, n]`` to ``[s, n]``.

    ``offs[g]`` is sorted; rows after the last end become zeros.

    Raises:
        IndexError: an offset is below the one before it, or beyond the rows.
    """
    parts, start, ends = [], 0, offs.tolist()
    if not torch.compiler.is_compiling() and [0, *ends, x.shape[0]] != sorted([0, *ends, x.shape[0]]):
        raise IndexError(f"the offsets {ends} are not sorted numbers of up to {x.shape[0]} rows")
    for matrix, end in zip(weight, ends, strict=True):
        parts.append(x[start:end] @ matrix)
        start = end
    rest = x.new_zeros(x.shape[0] - start, weight.shape[2])
    return torch.cat([*parts, rest])


@grouped_mm.types
def _(x, weight, offs):
    return TensorType(x.dtype, (x.shape[0], weight.shape[2]))


@grouped_mm.onnx
def _(op, x, weight, offs):
    groups, columns = op.shape(weight)[0], op.shape(weight)[2]
    if is_symbolic(groups):
        raise TargetError(
            f"grouped_mm over a number of groups known only at run time ({groups}) has no ONNX form; fix its length"
        )
    if not groups:
        return op.Expand(op.like(x, 0.0), op.ints(op.result.shape))
    first, rows, offs = op.ints([0]), op.Shape(x, start=0, end=1), op.cast(offs, torch.int64)
    stops = op.Split(offs, axis=0, num_outputs=groups, outputs=groups) if groups > 1 else [offs]
    parts = []
    for i, (start, stop) in enumerate(zip([first, *stops[:-1]], stops, strict=True)):
        matrix = op.Gather(weight, op.scalar(i, torch.int64), axis=0)
        parts.append(op.MatMul(op.Slice(x, start, stop, first), matrix))
    shape = op.Concat(op.Sub(rows, stops[-1]), op.ints([columns]), axis=0)
    return op.Concat(*parts, op.Expand(op.like(x, 0.0), shape), axis=0)


@grouped_mm.samples
def _(draw, s):
    groups, k, n = draw(s.integers(1, 4)), draw(s.integers(1, 4)), draw(s.integers(1, 4))
    dtype = draw(s.choice(torch.float32, torch.float64))
    rows = draw(s.integers(0, 9))
    x = draw(s.tensor(shape=(rows, k), dtype=dtype))
    offs = torch.tensor(sorted(draw(s.integers(0, rows)) for _ in range(groups)), dtype=draw(s.choice(*OFFSET_DTYPES)))
    return s.call(x, draw(s.tensor(shape=(groups, k, n), dtype=dtype)), offs)


@grouped_mm.from_torch("transformers.grouped_mm_fallback.default")
def _(input, weight, offs):
    return grouped_mm.call(input, weight, offs)
