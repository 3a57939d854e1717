"""Helpers for elementwise operators: lowerings to one ONNX node, dtype promotion and samplers."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from sympy import Expr
from torch import Tensor

from clika_ref.core.ir import Value
from clika_ref.core.operators import Operator, operator
from clika_ref.core.symbols import is_symbolic
from clika_ref.core.traits import KEEP_FLOAT, QuantizationTrait
from clika_ref.torch_internals.operators import OpOverload
from clika_ref_aten.families import name_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from clika_ref.core.accuracy import ErrorClass

FLOATS = (torch.float32, torch.float16, torch.float64)
HALF_DTYPES = (torch.float16, torch.bfloat16)
"""Dtypes that ONNX Runtime computes in float32, or imprecisely."""

INTS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
NUMBERS = (torch.float32, torch.int64, torch.float16, torch.float64, torch.int32, torch.int16, torch.uint8, torch.int8)
ALL_DTYPES = (*NUMBERS, torch.bool)
DTYPES_VIA_FLOAT32 = (torch.float32, torch.float16, torch.int64, torch.bool)
"""Dtypes to draw for functions that ONNX Runtime computes in float32 even for float64 (see `VIA_FLOAT32`)."""

VIA_FLOAT32 = {torch.float64: torch.float32}
"""For ONNX operators without a float64 kernel in ONNX Runtime: less precision is better than an unsupported model."""


def add_node_via(op, op_type: str, *operands, via: Mapping[torch.dtype, torch.dtype]):
    """Add one node on operands of one dtype, computed in the dtype that ``via`` gives where runtimes lack a kernel."""
    dtype = op.dtype(operands[0])
    if dtype not in via:
        return op.node(op_type, *operands)
    return op.cast(op.node(op_type, *op.promote(*operands, to=via[dtype])), dtype)


def choose(op, condition, x, y):
    """Return ``x`` where the condition is True, else ``y`` of the same dtype."""
    dtype = op.dtype(x)
    # ONNX Runtime lacks Where for these dtypes; TensorRT has uint8 for inputs and outputs only.
    wide = torch.int32 if dtype in (torch.bool, torch.int16) else dtype
    return op.cast(op.Where(condition, *op.promote(x, y, to=wide)), dtype)


def unary_operator(
    function: Callable[..., Any],
    *overloads: OpOverload,
    error: ErrorClass,
    quant: QuantizationTrait = KEEP_FLOAT,
    **description: Any,
) -> Callable[[Callable[..., Any]], Operator]:
    """Declare an elementwise operator of one tensor by its ONNX lowering, which has its name and docstring.

    The reference is ``function``. The lowering gets the operand in the dtype of the result. Samples have the given
    ``description``.
    """

    def declare(lowering: Callable[..., Any]) -> Operator:
        def reference(x: Tensor) -> Tensor:
            return function(x)

        @functools.wraps(lowering)
        def lower(op, x):
            return lowering(op, *op.promote(x))

        reference.__module__ = lowering.__module__
        named = name_reference(lowering.__name__, lowering.__doc__ or "")(reference)
        declared = operator(*overloads, quant=quant, error=error)(named)
        declared.onnx(lower)
        declared.samples(unary_sampler(**description))
        return declared

    return declare


def binary_lowering(op_type: str, *, logical: str | None = None) -> Callable[..., Any]:
    """Return a lowering to one node, on operands cast to the result's dtype; ``logical`` is the op type for bools."""

    def lower(op, x, y):
        kind = logical if logical and op.result.dtype == torch.bool else op_type
        return op.cast(op.node(kind, *op.promote(x, y, to=compute_dtype(op, x, y))), op.result.dtype)

    return lower


def reshape_per_channel(op, vector, rank: int):
    """Reshape ``vector[c]`` to broadcast with ``x[n, c, ...]`` of the given rank."""
    return vector if rank <= 2 else op.Reshape(vector, op.ints([-1] + [1] * (rank - 2)))


def compute_dtype(op, *operands) -> torch.dtype:
    """Return the dtype to compute in: the result's, or float32 if FP16 or BF16 has no normal number for a scalar.

    Eager reads scalars in float32: in FP16, ``x / 1e5`` is not a division by infinity.
    """
    dtype = op.result.dtype
    if dtype not in HALF_DTYPES:
        return dtype
    known = torch.finfo(dtype)
    sizes = [abs(o) for o in operands if isinstance(o, int | float)]
    is_representable = all(n == 0 or known.tiny <= n <= known.max or not math.isfinite(n) for n in sizes)
    return dtype if is_representable else torch.float32


def common_dtype(op, *operands) -> torch.dtype:
    """Return torch's result dtype of two operands: scalars and 0-d tensors have lower priority."""
    return torch.result_type(*(_promotion_proxy(op, o) for o in operands))


def python_type_of(number: Any) -> type:
    """Return the Python type of a scalar, also of a size expression or a tensor that is read as a scalar."""
    if isinstance(number, Value):  # integers read from tensors are symbols instead
        return float
    if not is_symbolic(number):
        return type(number)
    if not isinstance(number, Expr):  # a symbol is an instance of Boolean, too
        return bool
    return int if number.is_integer else float


def _promotion_proxy(op, operand: Any) -> Any:
    if is_symbolic(operand) or isinstance(operand, int | float):
        return python_type_of(operand)(1)
    return torch.empty((1,) * op.rank(operand), dtype=op.dtype(operand), device="meta")


def truncate(op, x):
    """Round a float towards zero."""
    return op.Where(op.Less(x, op.like(x, 0)), op.Ceil(x), op.Floor(x))


def sign_bit(op, x):
    """Return whether a float is negative, -0.0 included. ONNX cannot read the sign of NaN."""
    zero = op.like(x, 0)
    return op.Or(op.Less(x, zero), op.Less(op.Reciprocal(x), zero))  # 1 / -0.0 is -inf, but 1 / -inf is not less than 0


def unary_sampler(*, attrs: Mapping[str, Sequence[Any]] | None = None, **description: Any) -> Callable[..., Any]:
    """Return a sampler for an operator of one tensor with the given description; ``attrs`` lists values to draw."""

    def sample(draw, s):
        x = draw(s.tensor(**description))
        return s.call(x, **{name: draw(s.choice(*values)) for name, values in (attrs or {}).items()})

    return sample


def binary_sampler(
    *, dtype: Sequence[torch.dtype] = (torch.float32,), number: bool = True, mixed: bool = True, **description: Any
) -> Callable[..., Any]:
    """Return a sampler for an operator of two tensors that broadcast; with ``number``, the second may be a scalar."""

    def sample(draw, s):
        x = draw(s.tensor(dtype=dtype, **description))
        dtypes = dtype if mixed else (x.dtype,)
        return s.call(x, draw_operand_for(draw, s, x, dtype=dtypes, number=number, **description))

    return sample


def draw_operand_for(draw, s, x, *, dtype: Sequence[torch.dtype], number: bool, low: float = -3.0, high: float = 3.0):
    """Draw an operand that broadcasts with ``x``: a tensor, or a scalar if ``number`` allows it."""
    forms = ("same", "ones", "tail", "more", "scalar", *(("number",) * 2 if number else ()))
    match draw(s.choice(*forms)):
        case "number" if x.dtype.is_floating_point and draw(s.booleans()):
            return draw(s.floats(low, high))
        case "number":
            lowest = max(0, round(low)) if x.dtype == torch.uint8 else round(low)
            return draw(s.integers(lowest, round(high)))
        case form:
            shapes = {"same": x.shape, "ones": (1,) * x.rank, "tail": x.shape[1:], "more": (2, *x.shape), "scalar": ()}
            return draw(s.tensor(shape=shapes[form], dtype=dtype, low=low, high=high))
