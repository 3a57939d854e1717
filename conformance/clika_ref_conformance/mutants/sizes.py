"""Faults of dynamic shapes: sizes that are hard-coded or read from elsewhere, and code paths for unknown sizes."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import clika_ref_aten.adaptive_pooling
import clika_ref_aten.attention
import clika_ref_aten.resampling
import clika_ref_aten.slicing
import clika_ref_aten.striding
import clika_ref_aten.variance
import torch

from clika_ref.core.symbols import is_symbolic
from clika_ref.core.types import TensorType
from clika_ref.onnx_export.builder import OnnxBuilder
from clika_ref.onnx_export.sizes import EXPR_RULES, SizeEmitter
from clika_ref.torch_internals.symbols import FloorDiv, Mod, PythonMod
from clika_ref_conformance.mutants.patched_op import PatchedOp
from clika_ref_conformance.mutants.seeding import Catalogue

FAULTS = Catalogue("sizes", levels=("dynamic",))
DYNAMIC = ("dynamic",)


def _seed_expression_rule(change: str, *kinds: type) -> Any:
    """Seed a faulty rule for classes of expressions: ``(original, emitter, expression)``."""

    def declare(faulty):
        def patch_rules(registry):
            rules = {kind: partial(faulty, EXPR_RULES[kind]) for kind in kinds}
            with patch.dict(EXPR_RULES, rules):
                yield

        return FAULTS.patch("size expressions", change, levels=DYNAMIC)(patch_rules)

    return declare


@FAULTS.function("expand", "a size is a constant, its minimum", SizeEmitter, "bind")
def _(original, self, symbol, source):
    original(self, symbol, source)
    self._vectors[symbol.expr] = self.op.ints([max(symbol.low or 0, 1)])


@FAULTS.function("reshape", "every size is read from the first dim", SizeEmitter, "bind")
def _(original, self, symbol, source):
    original(self, symbol, source)
    self._sources[symbol.expr] = (source, 0)


@FAULTS.function("size expressions", "sums and products stop after their second term", SizeEmitter, "_fold")
def _(original, self, op_type, expr):
    first, *rest = self._promote(*expr.args)
    return self.op.node(op_type, first, rest[0])


@_seed_expression_rule("a quotient of sizes is rounded up", FloorDiv)
def _(original, emitter, expr):
    a, b = emitter._promote(*expr.args)
    return emitter.op.Div(emitter.op.Sub(emitter.op.Add(a, b), emitter.op.ints([1])), b)


@FAULTS.function("expand", "dims without a symbol come first", SizeEmitter, "vector")
def _(original, self, sides):
    return original(self, tuple(sorted(sides, key=is_symbolic)))


@FAULTS.function("reshape", "a dynamic dim is copied from the operand's dim of the same index", OnnxBuilder, "reshape")
def _(original, self, x, shape):
    own = self._types[x]
    rank = len(own.shape) if isinstance(own, TensorType) else 0
    return self.Reshape(x, self.ints([0 if is_symbolic(n) and i < rank else n for i, n in enumerate(shape)]))


@FAULTS.function(
    "reshape", "the unknown dim of an empty tensor is computed by a division by zero", OnnxBuilder, "reshape"
)
def _(original, self, x, shape):
    sizes = list(shape)
    symbolic = [i for i, size in enumerate(sizes) if is_symbolic(size)]
    if symbolic:
        sizes[symbolic[-1]] = -1
    return self.Reshape(x, self.ints(sizes))


@FAULTS.function(
    "scaled_dot_product_attention",
    "a causal mask of unknown length is transposed",
    clika_ref_aten.attention,
    "_causal_mask",
)
def _(original, op, rows, columns):
    mask = original(op, rows, columns)
    if not is_symbolic((rows, columns)):
        return mask
    return op.Transpose(original(op, columns, rows), perm=[1, 0])


@FAULTS.function(
    "adaptive_avg_pool1d",
    "computed ends of windows are rounded down",
    clika_ref_aten.adaptive_pooling,
    "_window_indices_at_runtime",
)
def _(original, op, n, m):
    length, count, one = (op.scalar(v, torch.int64) for v in (n, m, 1))
    i = op.Unsqueeze(clika_ref_aten.adaptive_pooling.make_index_range(op, m), op.ints([1]))
    starts = op.Div(op.Mul(i, length), count)
    ends = op.Max(op.Div(op.Mul(op.Add(i, one), length), count), op.Add(starts, one))
    widest = clika_ref_aten.adaptive_pooling.ceil_divide(n, m) + 1
    positions = op.Add(starts, clika_ref_aten.adaptive_pooling.make_index_range(op, widest))
    return op.Min(positions, op.Sub(ends, one)), op.Less(positions, ends)


@FAULTS.function(
    "adaptive_max_pool1d",
    "computed windows are one element too short",
    clika_ref_aten.adaptive_pooling,
    "ceil_divide",
)
def _(original, a, b):
    return original(a, b) - 1


@FAULTS.function(
    "upsample_nearest1d",
    "computed positions are rounded to the nearest",
    clika_ref_aten.resampling,
    "_lower_source_indices",
)
def _(original, op, n, m, scale, **how):
    if not is_symbolic((n, m)):
        return original(op, n, m, scale, **how)
    return original(PatchedOp(op, Floor=lambda op, x: op.Round(x)), n, m, scale, **how)


@FAULTS.function(
    "upsample_nearest2d",
    "a plane of unknown size is treated as a large one, but eager's rounding depends on each factor",
    clika_ref_aten.resampling,
    "_small_plane_cases",
)
def _(original, sizes):
    return (False,) if is_symbolic(tuple(sizes)) else original(sizes)


@FAULTS.function(
    "upsample_nearest_exact1d",
    "computed positions are rounded at each step",
    clika_ref_aten.resampling,
    "_lower_source_indices",
)
def _(original, op, n, m, scale, **how):
    if not is_symbolic((n, m)):
        return original(op, n, m, scale, **how)
    single = PatchedOp(
        op,
        cast=lambda op, x, dtype: op.cast(x, torch.float32 if dtype == torch.float64 else dtype),
        scalar=lambda op, number, dtype: op.scalar(number, torch.float32 if dtype == torch.float64 else dtype),
    )
    return original(single, n, m, scale, **how)


@FAULTS.function(
    "var", "a sample that is too small has negative degrees of freedom", clika_ref_aten.variance, "_degrees_of_freedom"
)
def _(original, op, x, count, correction):
    if not is_symbolic(count):
        return original(op, x, count, correction)
    return op.Sub(op.like(x, count), op.like(x, correction))


@FAULTS.function(
    "unfold",
    "windows of a dim of unknown length overlap as if step were 1",
    clika_ref_aten.striding,
    "make_strided_indices",
)
def _(original, op, sizes, strides, offset):
    return original(op, sizes, (1, *strides[1:]) if is_symbolic(sizes) else strides, offset)


@FAULTS.function(
    "slice_scatter", "positions along a dim of unknown length count from 1", clika_ref_aten.slicing, "make_index_range"
)
def _(original, op, length):
    numbers = original(op, length)
    return numbers if isinstance(length, int) else op.Add(numbers, op.scalar(1, torch.int64))


@FAULTS.lowering("flip", "the first element of a dim of unknown length is moved to the end", levels=DYNAMIC)
def _(original, op, x, *, dims):
    def write(op, x, starts, ends, axes, steps):
        return op.Slice(x, op.ints([-2] * len(dims)) if is_symbolic(op.shape(x)) else starts, ends, axes, steps)

    return original(PatchedOp(op, Slice=write), x, dims=dims)


@FAULTS.lowering("mean", "the mean divides by the traced length", levels=DYNAMIC)
def _(original, op, x, **attrs):
    if not is_symbolic(op.shape(x)):
        return original(op, x, **attrs)

    def write(op, x, *axes, **how):
        return op.Div(op.ReduceSum(x, *axes, **how), op.like(x, 4))

    return original(PatchedOp(op, ReduceMean=write), x, **attrs)


@FAULTS.lowering("layer_norm", "a weight of unknown length is treated as missing", levels=DYNAMIC)
def _(original, op, x, weight=None, bias=None, **attrs):
    gone = weight is not None and is_symbolic(op.shape(weight))
    return original(op, x, None if gone else weight, bias, **attrs)


@FAULTS.lowering("group_norm", "with a dynamic batch, each image is one group", levels=DYNAMIC)
def _(original, op, x, *operands, num_groups, **attrs):
    return original(op, x, *operands, num_groups=1 if is_symbolic(op.shape(x)[:1]) else num_groups, **attrs)


def _seed_dynamic_type_rule(subject: str, change: str) -> Any:
    """Seed a type rule that is wrong for dynamic dims only: ``(types, *operand types, **attributes)``."""

    def declare(faulty):
        def rule(original, *operands, **attrs):
            types = original(*operands, **attrs)
            types = types if isinstance(types, tuple) else (types,)
            if any(isinstance(o, TensorType) and not o.is_static for o in operands):
                types = tuple(faulty(t, *operands, **attrs) for t in types)
            return types

        return FAULTS.type_rule(subject, change)(rule)

    return declare


def _lengthen_dim(type: TensorType, dim: int, more: int) -> TensorType:
    sizes = list(type.shape)
    sizes[dim] = sizes[dim] + more
    return TensorType(type.dtype, tuple(sizes))


@_seed_dynamic_type_rule("max_pool2d", "a dynamic dim has one window more")
def _(type, x, **attrs):
    return _lengthen_dim(type, -1, 1) if is_symbolic(x.shape[-1:]) else type


@_seed_dynamic_type_rule("conv2d", "dilation is ignored along a dynamic dim")
def _(type, x, weight, *rest, dilation, **attrs):
    return _lengthen_dim(type, -1, dilation[-1] - 1) if is_symbolic(x.shape[-1:]) else type


@_seed_dynamic_type_rule("cat", "a dynamic dim is that of the first operand")
def _(type, x, *others, dim):
    return TensorType(type.dtype, x.shape)


@_seed_dynamic_type_rule("slice", "a dynamic dim keeps its length")
def _(type, x, **attrs):
    return TensorType(type.dtype, x.shape)


@_seed_dynamic_type_rule("pad", "a dynamic dim is only padded at its start")
def _(type, x, *, pad, **attrs):
    return _lengthen_dim(type, -1, -pad[1]) if is_symbolic(x.shape[-1:]) else type


@_seed_dynamic_type_rule("permute", "dynamic dims are not permuted")
def _(type, x, **attrs):
    return TensorType(type.dtype, x.shape)


@_seed_expression_rule("a quotient is rounded towards zero", FloorDiv)
def _(original, emitter, expr):
    return emitter.op.Div(*emitter._promote(*expr.args))


@_seed_expression_rule("a quotient is only rounded down if the dividend may be negative", FloorDiv)
def _(original, emitter, expr):
    if expr.args[0].is_nonnegative:
        return emitter.op.Div(*emitter._promote(*expr.args))
    return original(emitter, expr)


@_seed_expression_rule("a remainder has the sign of the dividend", Mod, PythonMod)
def _(original, emitter, expr):
    return emitter.op.Mod(*emitter._promote(*expr.args), fmod=1)


@FAULTS.function("size expressions", "every rounding is down", SizeEmitter, "_round")
def _(original, self, op_type, expr):
    return original(self, "Floor", expr)


@FAULTS.function(
    "size expressions", "a number is treated as a length, which is not negative", SizeEmitter, "_emit_atom"
)
def _(original, self, expr):
    value = original(self, expr)
    return value if expr.is_nonnegative or expr not in self._sources else self.op.Max(value, self.op.ints([0]))


@FAULTS.lowering("multi_margin_loss", "the mean over no rows is that of the runtime, 0", levels=DYNAMIC)
def _(original, op, x, *others, **attrs):
    lower = original.__wrapped__ if is_symbolic(op.shape(x)) else original
    return lower(op, x, *others, **attrs)


@FAULTS.lowering(
    "rms_norm", "rows of unknown length are normalized by a fused kernel, which rejects empty ones", levels=DYNAMIC
)
def _(original, op, x, weight, *, normalized_shape, eps):
    return original(PatchedOp(op, Mul=_multiply_or_square), x, weight, normalized_shape=normalized_shape, eps=eps)


def _multiply_or_square(op, a, b):
    return op.Pow(a, op.like(a, 2)) if a is b else op.Mul(a, b)
