"""Singular values, eigenvalues of symmetric matrices, and what is computed from them, by Jacobi rotations in float64.

The rotations are a `scan`, so that the graph does not grow with the matrices. Values are equal to those of LAPACK up to
rounding. Vectors may have the other sign, as they are unique only up to it.

Source: Demmel and Veselic, "Jacobi's method is more accurate than QR", 1992 (the one-sided method); Brent and Luk, "The
solution of singular-value and symmetric eigenvalue problems on multiprocessor arrays", 1985 (the order of pairs).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from clika_ref.capture.forms.matrix_decompositions import factor_qr, permute_rows, require_constant_size
from clika_ref.core.errors import ModelError
from clika_ref.torch_internals.operators import OpOverload, scan_op

aten = torch.ops.aten

MAX_ROTATED_COLUMNS = 256
"""Maximum number of columns (of rows, if there are fewer): the time grows with its cube."""

FIRST_SWEEPS = 7
"""Sweeps over all pairs of columns, to which the logarithm of their number is added. The last ones change nothing."""

TAYLOR_TERMS = 18
"""Terms of the exponential for norms of at most 1: the next one is below the rounding of float64."""

MAX_SQUARINGS = 64
"""Maximum number of squarings of an exponential: for norms of at most 2 to its power."""


def _rotate_pairs(rows: Tensor, length: int, following: Tensor) -> Tensor:
    """Make rows orthogonal in pairs: each of the first half to that below it; return them in the order of new pairs.

    Only the first ``length`` elements of the rows determine the rotations.
    """
    half = rows.shape[-2] // 2
    first, second = rows[..., :half, :], rows[..., half:, :]
    a, b = first[..., :length], second[..., :length]
    difference = (b * b).sum(-1, keepdim=True) - (a * a).sum(-1, keepdim=True)
    product = 2 * (a * b).sum(-1, keepdim=True)
    square = difference.square() + product.square()
    root = torch.where(square == 0, 1.0, square).sqrt()
    tangent = torch.where(difference < 0, -product, product) / (difference.abs() + root)
    cosine = (1 + tangent.square()).rsqrt()
    sine = cosine * tangent
    turned = torch.cat([cosine * first - sine * second, sine * first + cosine * second], -2)
    return turned.index_select(-2, following)


def _order_of_pairs(count: int) -> list[int]:
    """Return the order of rows in which all pairs meet in ``count - 1`` steps: a round-robin tournament."""
    half = count // 2
    circle = [*range(half), *range(count - 1, half - 1, -1)]
    moved = [circle[0], circle[-1], *circle[1:-1]]
    return [*moved[:half], *reversed(moved[half:])]


def _orthogonalize_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``(x V)^T[..., n, m]`` and ``V^T[..., n, n]`` of matrices ``x[..., m, n]``: V makes columns orthogonal."""
    length, count = require_constant_size(x.shape[-2], None), require_constant_size(x.shape[-1], MAX_ROTATED_COLUMNS)
    even = count + count % 2
    identity = torch.eye(even, count, dtype=x.dtype, device=x.device).expand((*x.shape[:-2], even, count))
    padding = x.new_zeros((*x.shape[:-2], even - count, length))
    rows = torch.cat([torch.cat([x.mT, padding], -2), identity], -1)
    if count > 1:
        following = torch.tensor(_order_of_pairs(even), device=x.device)
        step_count = (FIRST_SWEEPS + math.ceil(math.log2(even))) * (even - 1)
        # OpenVINO makes one step if no result reads the scanned zeros.
        zeros = torch.zeros((step_count,), dtype=torch.int64, device=x.device)

        def rotate(state: Tensor, zero: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
            return _rotate_pairs(state, length, order + zero), zero.clone()

        rows = scan_op(rotate, [rows], [zeros], [following])[0]
    rows = rows[..., :count, :]
    return rows[..., :length], rows[..., length:]


def _sort_columns(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return singular values in descending order, and `_orthogonalize_columns` in their order."""
    products, vectors = _orthogonalize_columns(x)
    norms = products.square().sum(-1).sqrt()
    if not x.shape[-1]:
        return norms, products, vectors
    values, order = torch.sort(norms, dim=-1, descending=True)
    rows = permute_rows(torch.cat([products, vectors], -1), order)  # OpenVINO cannot gather from the parts of a loop
    return values, rows[..., : x.shape[-2]], rows[..., x.shape[-2] :]


def _svd(
    x: Tensor,
    full_matrices: bool = False,  # noqa: FBT001, FBT002 - ATen's
    compute_uv: bool = True,  # noqa: FBT001, FBT002
    *,
    driver: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``U diag(S) Vh``; left vectors are completed by reflections if the matrix has a lower rank."""
    if x.shape[-2] < x.shape[-1]:
        left, values, right = _svd(x.mT, full_matrices, compute_uv, driver=driver)
        return (right.mT, values, left.mT) if compute_uv else (left, values, right)
    values, products, vectors = _sort_columns(x.double())
    if not compute_uv:
        return x.new_empty((0,)), values.to(x.dtype), x.new_empty((0,))
    left, triangle = factor_qr(products.mT, "complete" if full_matrices else "reduced")
    signs = torch.where(triangle.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
    signs = torch.cat([signs, signs.new_ones((*x.shape[:-2], left.shape[-1] - x.shape[-1]))], -1)
    return (left * signs[..., None, :]).to(x.dtype), values.to(x.dtype), vectors.to(x.dtype)


def _symmetric(x: Tensor, uplo: str = "L") -> Tensor:
    """Return the symmetric matrix with the lower triangle of x, or the upper one."""
    half = x.triu() if uplo.upper() == "U" else x.tril()
    return half + half.mT - torch.diag_embed(x.diagonal(dim1=-2, dim2=-1))


def _eigh(x: Tensor, uplo: str = "L", compute_v: bool = True) -> tuple[Tensor, Tensor]:  # noqa: FBT001, FBT002 - ATen's
    """Eigenvalues in ascending order, and eigenvectors as columns."""
    whole = _symmetric(x.double(), uplo)
    shift = whole.square().sum((-2, -1), keepdim=True).sqrt().detach()  # no eigenvalue is below its negative
    identity = torch.eye(require_constant_size(x.shape[-1], None), dtype=whole.dtype, device=x.device)
    _, vectors = _orthogonalize_columns(whole + shift * identity)
    if not x.shape[-1]:
        return x.diagonal(dim1=-2, dim2=-1).clone(), x.clone() if compute_v else x.new_empty((0,))
    values, order = torch.sort(((vectors @ whole) * vectors).sum(-1), dim=-1)
    ordered = permute_rows(vectors, order).mT if compute_v else whole.new_empty((0,))
    return values.to(x.dtype), ordered.to(x.dtype)


def _pinv(x: Tensor, *, atol: Tensor | None = None, rtol: Tensor | None = None, hermitian: bool = False) -> Tensor:
    """``V diag(1 / S) U^T`` of the singular values above ``max(atol, rtol * max(S))``, else 0."""
    if rtol is None:
        default = torch.finfo(x.dtype).eps * max(x.shape[-2:])
        rtol = x.new_full((), default) if atol is None else torch.where(atol > 0, 0.0, default)
    atol = x.new_zeros(()) if atol is None else atol
    whole = (_symmetric(x) if hermitian else x).double()
    return _invert_columns(whole, atol, rtol).to(x.dtype)


def _invert_columns(x: Tensor, atol: Tensor, rtol: Tensor) -> Tensor:
    if x.shape[-2] < x.shape[-1]:
        return _invert_columns(x.mT, atol, rtol).mT
    if not x.shape[-1]:
        return x.mT
    products, vectors = _orthogonalize_columns(x)
    squares = products.square().sum(-1)
    limit = torch.maximum(atol[..., None], rtol[..., None] * squares.amax(-1, keepdim=True).sqrt())
    is_kept = squares.sqrt() > limit
    weights = torch.where(is_kept, 1 / torch.where(is_kept, squares, 1.0), 0.0)
    return vectors.mT @ (weights[..., None] * products)


def solve_least_squares(
    x: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Solve ``min |x y - b|``: y, the squared residuals, the ranks and singular values, as ``torch.linalg.lstsq``.

    Results that the driver does not compute are empty, and residuals are computed for matrices of full rank.
    """
    rows, columns = x.shape[-2:]
    driver = driver or "gelsy"
    limit = torch.finfo(x.dtype).eps * max(rows, columns) if rcond is None else rcond
    is_vector = b.dim() == 1 or (b.dim() == x.dim() - 1 and b.shape == x.shape[:-1])
    whole = x.double()
    right = (b[..., None] if is_vector else b).double()
    solution = _pinv(whole, rtol=whole.new_full((), limit)) @ right
    none = x.new_empty((0,))
    residuals, ranks, values = none, torch.zeros((0,), dtype=torch.int64, device=x.device), none
    if driver != "gels":
        values = _svd(x, compute_uv=False)[1]
        ranks = (values > limit * values.amax(-1, keepdim=True)).sum(-1)
    if rows > columns and driver != "gelsy":
        residuals = (whole @ solution - right).square().sum(-2).to(x.dtype)
    solution = (solution[..., 0] if is_vector else solution).to(x.dtype)
    return solution, residuals, ranks, values if driver in {"gelsd", "gelss"} else none


def find_matrix_norm(
    x: Tensor,
    order: float,
    dim: Sequence[int] = (-2, -1),
    keepdim: bool = False,  # noqa: FBT001, FBT002 - ATen's
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The largest or smallest singular value (order 2 or -2), or sum of a column (1) or row (inf), as ATen's."""
    wide = (x if dtype is None else x.to(dtype)).movedim(tuple(dim), (-2, -1))
    if abs(order) == 2:
        candidates = _svd(wide, compute_uv=False)[1]
    elif abs(order) in {1, math.inf}:
        candidates = wide.abs().sum(-2 if abs(order) == 1 else -1)
    else:
        raise ModelError(f"linalg.matrix_norm: the order {order} is not one of 1, -1, 2, -2, inf and -inf")
    found = candidates.amax(-1) if order > 0 else candidates.amin(-1)
    for own in sorted(d % x.dim() for d in dim) if keepdim else ():
        found = found.unsqueeze(own)
    return found


def find_norm(
    x: Tensor,
    order: float | None = None,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,  # noqa: FBT001, FBT002 - ATen's
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The norm of vectors, or of matrices if an order and two dims are given, as ``torch.linalg.norm``."""
    if order is None or (x.dim() if dim is None else len(dim)) == 1:
        return torch.linalg.vector_norm(x, 2 if order is None else order, dim, keepdim, dtype=dtype)
    return find_matrix_norm(x, order, (-2, -1) if dim is None else dim, keepdim, dtype=dtype)


def _matrix_exp(x: Tensor) -> Tensor:
    """``exp(x)`` by scaling and squaring: a Taylor polynomial of ``x / 2^k``, squared k times."""
    size = require_constant_size(x.shape[-1], None)
    wide = x.double()
    identity = torch.eye(size, dtype=wide.dtype, device=x.device).expand(x.shape)
    if not size:
        return x.clone()
    norm = wide.abs().sum(-2, keepdim=True).amax(-1, keepdim=True).detach()
    count = norm.clamp(min=1.0).log2().ceil().clamp(max=MAX_SQUARINGS)
    scaled = wide * torch.exp2(-count)
    result = identity
    for term in range(TAYLOR_TERMS, 0, -1):
        result = identity + scaled @ result / term

    def square(state: Tensor, step: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(step < limit, state @ state, state), step.clone()

    steps = torch.arange(MAX_SQUARINGS, device=x.device)
    return scan_op(square, [result], [steps], [count])[0].to(x.dtype)


SINGULAR_VALUE_FORMS: dict[OpOverload, Callable[..., Any]] = {
    aten._linalg_svd.default: _svd,
    aten._linalg_eigh.default: _eigh,
    aten.linalg_pinv.atol_rtol_tensor: _pinv,
    aten.linalg_matrix_exp.default: _matrix_exp,
}
"""Forms by the call of PyTorch that they replace."""
