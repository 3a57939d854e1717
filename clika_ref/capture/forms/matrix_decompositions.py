"""Decompositions of matrices and linear systems, as steps on rows and columns: ONNX has no operators for them.

The number of rows and columns must be constant, as each is a step. Any other dim may be dynamic. The steps are those of
LAPACK: rows are exchanged for the largest pivot, and reflections have its signs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.errors import ModelError
from clika_ref.torch_internals.operators import OpOverload

aten = torch.ops.aten

MAX_STEPS = 64
"""Maximum number of rows or columns: each adds about ten calls to the graph."""


def require_constant_size(size: Any, limit: int | None) -> int:
    """Return a size of a matrix as a number.

    Raises:
        ModelError: it is dynamic, or above the limit.
    """
    if not isinstance(size, int):
        raise ModelError(
            "a decomposition needs matrices of constant size. Leave their last two dims equal in all inputs"
        )
    if limit is not None and size > limit:
        raise ModelError(f"a decomposition of {size} rows or columns would be too long: at most {limit} are possible")
    return size


def _count_steps(size: Any) -> int:
    """Return a size as a number of steps."""
    return require_constant_size(size, MAX_STEPS)


def _no_info(x: Tensor) -> Tensor:
    """Return the code of success for each matrix, ``int32[...]``: the graph checks no errors."""
    return torch.zeros(x.shape[:-2], dtype=torch.int32, device=x.device)


# LU


def _factor_lu(x: Tensor, *, pivot: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Return both factors in one matrix, the row exchanged in each step, from 1, and the permutation of rows."""
    rows, columns = _count_steps(x.shape[-2]), _count_steps(x.shape[-1])
    numbers = torch.arange(rows, device=x.device).expand(x.shape[:-1])
    permutation, pivots = numbers, [numbers[..., :0]]
    for step in range(min(rows, columns)):
        if pivot:
            chosen = x[..., step:, step].abs().argmax(-1, keepdim=True) + step
            order = torch.where(numbers == step, chosen, torch.where(numbers == chosen, step, numbers))
            x = x.gather(-2, order[..., None].expand(x.shape))
            permutation = permutation.gather(-1, order)
        else:
            chosen = torch.full_like(numbers[..., :1], step)
        pivots.append(chosen + 1)
        if step + 1 < rows:
            factors = x[..., step + 1 :, step : step + 1] / x[..., step : step + 1, step : step + 1]
            rest = x[..., step + 1 :, step + 1 :] - factors * x[..., step : step + 1, step + 1 :]
            lower = torch.cat([x[..., step + 1 :, :step], factors, rest], -1)
            x = torch.cat([x[..., : step + 1, :], lower], -2)
    return x, torch.cat(pivots, -1).to(torch.int32), permutation


def _split_lu(lu: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower factor with ones on its diagonal, and the upper one."""
    rows, columns = lu.shape[-2:]
    steps = min(rows, columns)
    lower = lu[..., :, :steps].tril(-1) + torch.eye(rows, steps, dtype=lu.dtype, device=lu.device)
    return lower, lu[..., :steps, :].triu()


def _permutation_of(pivots: Tensor, rows: int) -> Tensor:
    """Return the permutation of rows that exchanges make, ``int64[..., rows]``."""
    numbers = torch.arange(rows, device=pivots.device).expand((*pivots.shape[:-1], rows))
    permutation = numbers
    for step in range(pivots.shape[-1]):
        chosen = pivots[..., step : step + 1].long() - 1
        order = torch.where(numbers == step, chosen, torch.where(numbers == chosen, step, numbers))
        permutation = permutation.gather(-1, order)
    return permutation


def permute_rows(x: Tensor, permutation: Tensor) -> Tensor:
    """Return the rows of ``x[..., rows, columns]`` at the positions ``permutation[..., rows]``."""
    shape = torch.broadcast_shapes(x.shape[:-2], permutation.shape[:-1])
    index = permutation[..., None].expand((*shape, permutation.shape[-1], x.shape[-1]))
    return x.expand((*shape, *x.shape[-2:])).gather(-2, index)


def _to_matrix(permutation: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix that undoes a permutation of rows."""
    numbers = torch.arange(permutation.shape[-1], device=permutation.device)
    return (numbers[:, None] == permutation[..., None, :]).to(dtype)


def _solve_triangular(a: Tensor, b: Tensor, *, upper: bool, unitriangular: bool = False) -> Tensor:
    """Solve ``a x = b`` by substitution."""
    rows = _count_steps(a.shape[-1])
    shape = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    b = b.expand((*shape, *b.shape[-2:]))
    if not rows:
        return b.clone()
    found: list[Tensor] = []
    for step in range(rows):
        row = rows - 1 - step if upper else step
        left = b[..., row : row + 1, :]
        if found:
            known = torch.cat(found, -2)
            columns = slice(row + 1, rows) if upper else slice(0, row)
            left = left - a[..., row : row + 1, columns] @ known
        value = left if unitriangular else left / a[..., row : row + 1, row : row + 1]
        found = [value, *found] if upper else [*found, value]
    return torch.cat(found, -2)


def _solve_lu(lu: Tensor, permutation: Tensor, b: Tensor) -> Tensor:
    forward = _solve_triangular(lu, permute_rows(b, permutation), upper=False, unitriangular=True)
    return _solve_triangular(lu, forward, upper=True)


def _lu_factor_ex(x: Tensor, *, pivot: bool = True, check_errors: bool = False) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001
    lu, pivots, _ = _factor_lu(x, pivot=pivot)
    return lu, pivots, _no_info(x)


def _lu(x: Tensor, *, pivot: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    lu, _, permutation = _factor_lu(x, pivot=pivot)
    matrix = _to_matrix(permutation, x.dtype) if pivot else x.new_empty((0,))
    return (matrix, *_split_lu(lu))


def _lu_unpack(
    lu: Tensor,
    pivots: Tensor,
    unpack_data: bool = True,  # noqa: FBT001, FBT002 - ATen's
    unpack_pivots: bool = True,  # noqa: FBT001, FBT002 - ATen's
) -> tuple[Tensor, Tensor, Tensor]:
    none = lu.new_empty((0,))
    rows = _count_steps(lu.shape[-2])
    matrix = _to_matrix(_permutation_of(pivots, rows), lu.dtype) if unpack_pivots else none
    return (matrix, *(_split_lu(lu) if unpack_data else (none, none)))


def _lu_solve(lu: Tensor, pivots: Tensor, b: Tensor, *, left: bool = True, adjoint: bool = False) -> Tensor:
    if not left:  # x a = b is the transposed system
        turned = _lu_solve(lu, pivots, b.mT, adjoint=not adjoint)
        return turned.mT
    permutation = _permutation_of(pivots, _count_steps(lu.shape[-2]))
    if not adjoint:
        return _solve_lu(lu, permutation, b)
    forward = _solve_triangular(lu.mT, b, upper=False)
    solved = _solve_triangular(lu.mT, forward, upper=True, unitriangular=True)
    return permute_rows(solved, permutation.argsort(-1))


def _solve_ex(
    a: Tensor,
    b: Tensor,
    *,
    left: bool = True,
    check_errors: bool = False,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lu, pivots, permutation = _factor_lu(a if left else a.mT)
    is_vector = b.dim() == 1 or (a.dim() - 1 == b.dim() and b.shape == a.shape[:-1])
    columns = b[..., None] if is_vector else b if left else b.mT
    solved = _solve_lu(lu, permutation, columns)
    result = solved[..., 0] if is_vector else solved if left else solved.mT
    return result, lu, pivots, _no_info(a)


def _inv_ex(x: Tensor, *, check_errors: bool = False) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    lu, _, permutation = _factor_lu(x)
    identity = torch.eye(_count_steps(x.shape[-1]), dtype=x.dtype, device=x.device).expand(x.shape)
    return _solve_lu(lu, permutation, identity), _no_info(x)


def _slogdet(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lu, pivots, _ = _factor_lu(x)
    diagonal = lu.diagonal(dim1=-2, dim2=-1)
    steps = torch.arange(1, _count_steps(x.shape[-1]) + 1, device=x.device)
    exchanges = (pivots != steps).sum(-1)
    sign = diagonal.sign().prod(-1) * (1 - 2 * (exchanges % 2)).to(x.dtype)
    return sign, diagonal.abs().log().sum(-1), lu, pivots


# Cholesky


def _factor_cholesky(x: Tensor) -> Tensor:
    """Return the lower factor of symmetric matrices, column by column."""
    size = _count_steps(x.shape[-1])
    if not size:
        return x.clone()
    columns: list[Tensor] = []
    for step in range(size):
        column = x[..., step:, step : step + 1]
        if columns:
            known = torch.cat(columns, -1)[..., step:, :]
            column = column - known @ known[..., :1, :].mT
        below = column / column[..., :1, :].sqrt()
        columns.append(torch.cat([torch.zeros_like(x[..., :step, :1]), below], -2))
    return torch.cat(columns, -1)


def _cholesky(x: Tensor, upper: bool = False) -> Tensor:  # noqa: FBT001, FBT002 - ATen's
    lower = _factor_cholesky(x.mT if upper else x)
    return lower.mT if upper else lower


def _cholesky_ex(x: Tensor, *, upper: bool = False, check_errors: bool = False) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return _cholesky(x, upper), _no_info(x)


def _cholesky_solve(b: Tensor, factor: Tensor, upper: bool = False) -> Tensor:  # noqa: FBT001, FBT002 - ATen's
    lower = factor.mT if upper else factor
    return _solve_triangular(lower.mT, _solve_triangular(lower, b, upper=False), upper=True)


def _cholesky_inverse(factor: Tensor, upper: bool = False) -> Tensor:  # noqa: FBT001, FBT002 - ATen's
    identity = torch.eye(_count_steps(factor.shape[-1]), dtype=factor.dtype, device=factor.device)
    return _cholesky_solve(identity.expand(factor.shape), factor, upper)


# Triangular systems


def _linalg_solve_triangular(
    a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    if left:
        return _solve_triangular(a, b, upper=upper, unitriangular=unitriangular)
    return _solve_triangular(a.mT, b.mT, upper=not upper, unitriangular=unitriangular).mT


def _triangular_solve(
    b: Tensor,
    a: Tensor,
    upper: bool = True,  # noqa: FBT001, FBT002 - ATen's
    transpose: bool = False,  # noqa: FBT001, FBT002 - ATen's
    unitriangular: bool = False,  # noqa: FBT001, FBT002
) -> tuple[Tensor, Tensor]:
    matrix, is_upper = (a.mT, not upper) if transpose else (a, upper)
    solved = _solve_triangular(matrix, b, upper=is_upper, unitriangular=unitriangular)
    return solved, a.expand((*solved.shape[:-2], *a.shape[-2:])).clone()


# QR


def _reflect(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return Householder's vectors below the diagonal of R, and their factors: LAPACK's geqrf."""
    rows, columns = _count_steps(x.shape[-2]), _count_steps(x.shape[-1])
    factors = [x[..., :0, 0] if columns else x.sum(-1)[..., :0]]
    for step in range(min(rows, columns)):
        column = x[..., step:, step : step + 1]
        first, below = column[..., :1, :], column[..., 1:, :]
        rest = below.square().sum(-2, keepdim=True)
        norm = (first.square() + rest).sqrt()
        end = torch.where(first >= 0, -norm, norm)
        is_done = rest == 0  # nothing to reflect
        end = torch.where(is_done, first, end)
        factor = torch.where(is_done, 0.0, (end - first) / torch.where(is_done, 1.0, end))
        vector = below / torch.where(is_done, 1.0, first - end)
        whole = torch.cat([torch.ones_like(first), vector], -2)
        later = x[..., step:, step + 1 :]
        later = later - factor * whole @ (whole.mT @ later)
        block = torch.cat([torch.cat([end, vector], -2), later], -1)
        x = torch.cat([x[..., :step, :], torch.cat([x[..., step:, :step], block], -1)], -2)
        factors.append(factor[..., 0])
    return x, torch.cat(factors, -1)


def _apply_reflections(vectors: Tensor, factors: Tensor, x: Tensor, *, in_order: bool) -> Tensor:
    """Multiply the rows of x by reflections, the last one first unless ``in_order``."""
    rows = _count_steps(vectors.shape[-2])
    steps = range(_count_steps(factors.shape[-1]))
    for step in steps if in_order else reversed(steps):
        below = vectors[..., step + 1 :, step : step + 1]
        whole = torch.cat(
            [below.new_zeros(()).expand((*below.shape[:-2], step, 1)), torch.ones_like(vectors[..., :1, :1])], -2
        )
        whole = torch.cat([whole, below], -2)[..., :rows, :]
        x = x - factors[..., step : step + 1, None] * whole @ (whole.mT @ x)
    return x


def _householder_product(vectors: Tensor, factors: Tensor) -> Tensor:
    rows, columns = vectors.shape[-2:]
    identity = torch.eye(rows, columns, dtype=vectors.dtype, device=vectors.device).expand(vectors.shape)
    return _apply_reflections(vectors, factors, identity, in_order=False)


def factor_qr(x: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    """Return Q and R of ``x[..., m, n]``, as ``torch.linalg.qr``."""
    packed, factors = _reflect(x)
    rows, columns = x.shape[-2:]
    width = rows if mode == "complete" else min(rows, columns)
    r = packed[..., : rows if mode == "complete" else min(rows, columns), :].triu()
    if mode == "r":
        return x.new_empty((0,)), r
    identity = torch.eye(rows, width, dtype=x.dtype, device=x.device).expand((*x.shape[:-2], rows, width))
    return _apply_reflections(packed, factors, identity, in_order=False), r


def _ormqr(
    vectors: Tensor,
    factors: Tensor,
    other: Tensor,
    left: bool = True,  # noqa: FBT001, FBT002 - ATen's
    transpose: bool = False,  # noqa: FBT001, FBT002
) -> Tensor:
    if left:
        return _apply_reflections(vectors, factors, other, in_order=transpose)
    return _apply_reflections(vectors, factors, other.mT, in_order=not transpose).mT


# PyTorch's own forms of these check the code of success, which a graph cannot.


def _inv(x: Tensor) -> Tensor:
    return _inv_ex(x)[0]


def _solve(a: Tensor, b: Tensor, *, left: bool = True) -> Tensor:
    return _solve_ex(a, b, left=left)[0]


def _lu_factor(x: Tensor, *, pivot: bool = True) -> tuple[Tensor, Tensor]:
    return _factor_lu(x, pivot=pivot)[:2]


def _sign_and_logarithm(x: Tensor) -> tuple[Tensor, Tensor]:
    return _slogdet(x)[:2]


def _linalg_cholesky(x: Tensor, *, upper: bool = False) -> Tensor:
    return _cholesky(x, upper)


def _tensorinv(x: Tensor, ind: int = 2) -> Tensor:
    size = math.prod(x.shape[ind:])
    return _inv(x.reshape(size, size)).reshape((*x.shape[ind:], *x.shape[:ind]))


def _tensorsolve(a: Tensor, b: Tensor, dims: Sequence[int] | None = None) -> Tensor:
    if dims:
        own = [dim % a.dim() for dim in dims]
        a = a.permute([d for d in range(a.dim()) if d not in own] + own)
    shape = a.shape[b.dim() :]
    return _solve(a.reshape(math.prod(shape), math.prod(shape)), b.flatten()).reshape(shape)


MATRIX_FORMS: dict[OpOverload, Callable[..., Any]] = {
    aten.linalg_lu_factor_ex.default: _lu_factor_ex,
    aten.linalg_lu.default: _lu,
    aten.lu_unpack.default: _lu_unpack,
    aten.linalg_lu_solve.default: _lu_solve,
    aten._linalg_solve_ex.default: _solve_ex,
    aten.linalg_inv_ex.default: _inv_ex,
    aten._linalg_slogdet.default: _slogdet,
    aten.cholesky.default: _cholesky,
    aten.linalg_cholesky_ex.default: _cholesky_ex,
    aten.cholesky_solve.default: _cholesky_solve,
    aten.cholesky_inverse.default: _cholesky_inverse,
    aten.linalg_solve_triangular.default: _linalg_solve_triangular,
    aten.triangular_solve.default: _triangular_solve,
    aten.geqrf.default: _reflect,
    aten.linalg_householder_product.default: _householder_product,
    aten.linalg_qr.default: factor_qr,
    aten.qr.default: lambda x, some=True: factor_qr(x, "reduced" if some else "complete"),
    aten.ormqr.default: _ormqr,
    aten.inverse.default: _inv,
    aten.linalg_inv.default: _inv,
    aten.linalg_solve.default: _solve,
    aten.linalg_lu_factor.default: _lu_factor,
    aten.linalg_slogdet.default: _sign_and_logarithm,
    aten.slogdet.default: _sign_and_logarithm,
    aten.linalg_cholesky.default: _linalg_cholesky,
    aten.linalg_tensorinv.default: _tensorinv,
    aten.linalg_tensorsolve.default: _tensorsolve,
}
"""Forms of decompositions, by the call of PyTorch that they replace."""
