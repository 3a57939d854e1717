"""Fold padding into the convolution or pooling after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import sympy

from clika_ref.core.accuracy import DOT
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Node, Value
from clika_ref.core.passes import Phase
from clika_ref.core.rewriter import Skip, rule
from clika_ref.core.symbols import evaluate, is_symbolic
from clika_ref_cleanup import fold_padding_motifs as motifs
from clika_ref_cleanup.cleanup_pass import RulePass, keep_name

CONVOLUTIONS = {f"conv{dims}d": dims for dims in (1, 2, 3)}
MAX_POOLS = {f"max_pool{dims}d": dims for dims in (1, 2, 3)}
AVERAGE_POOLS = {f"avg_pool{dims}d": dims for dims in (1, 2, 3)}
"""Operators, and their number of spatial dims."""

NONNEGATIVE_OPERATORS = frozenset({"relu", "relu6", "sigmoid", "hardsigmoid", "softmax", "exp", "abs"})
ELEMENT_MOVES = frozenset({*MAX_POOLS, "cat", "permute", "reshape", "view", "flatten", "slice", "expand"})
"""Operators whose results have the elements of their operands only."""

SAME_UPPER = "same_upper"
"""Padding of a layer by TensorFlow's "same" formula."""

MAX_INTEGER, CHECKED_SIZES = 16, 512
"""If all numbers are at most ``MAX_INTEGER``, padding is equal for all sizes if it is for these: it is periodic."""


@dataclass(frozen=True)
class _Padding:
    """A ``pad`` before a layer, over the layer's spatial dims."""

    operand: Value
    begins: Sequence[Any]
    ends: Sequence[Any]
    value: float


@rule(*CONVOLUTIONS)
def fold_padding_into_convolution(node: Node, build: Builder):
    """``conv(pad(x, 0))`` is ``conv(x)`` with the sum of both paddings."""
    x, weight, *bias = node.inputs
    dims = CONVOLUTIONS[node.op_type]
    match _padding_before(x, dims):
        case Skip() as skip:
            return skip
        case padding if padding.value:
            return Skip(f"the layer before it pads with {padding.value:g}; a convolution pads with 0", 1)
        case padding:
            pass
    kernel = weight.type.shape[2:]
    stride, dilation = _expand(node.attrs["stride"], dims), _expand(node.attrs["dilation"], dims)
    total = _add(padding, _own_ends(node.attrs["padding"], kernel, dilation), (kernel, stride, dilation))
    if isinstance(total, Skip):
        return total
    is_even = total != SAME_UPPER and total[:dims] == total[dims:]  # ATen's own form
    attrs = {**node.attrs, "padding": total[:dims] if is_even else total}
    folded = build(node.op, padding.operand, weight, *bias, types=(node.output.type,), **attrs)
    return keep_name(build.graph, node.output, folded)


@rule(*MAX_POOLS, *AVERAGE_POOLS)
def fold_padding_into_pooling(node: Node, build: Builder):
    """``pool(pad(x))`` is ``pool(x)`` with the sum of both paddings, where these do not change the result.

    A maximum ignores padding: it is -inf, or 0 next to elements that are 0 at least. A mean includes padding with 0.
    """
    (x,), attrs = node.inputs, node.attrs
    dims = (MAX_POOLS | AVERAGE_POOLS)[node.op_type]
    padding = _padding_before(x, dims)
    if isinstance(padding, Skip):
        return padding
    if attrs["ceil_mode"]:
        return Skip("ceil_mode: its last window may be shorter than the kernel", 1)
    kernel, dilation = _expand(attrs["kernel_size"], dims), _expand(attrs.get("dilation", 1), dims)
    own = _own_ends(attrs["padding"], kernel, dilation)
    if node.op_type in AVERAGE_POOLS:
        counts = attrs["count_include_pad"] or attrs.get("divisor_override") is not None
        if padding.value or (any(map(any, own or ())) and not counts):
            return Skip("its mean excludes its own padding, or the padding before it is not 0", 2)
        changed = {"count_include_pad": True}
    else:
        changed = {}
        if padding.value != -math.inf and (padding.value or not _is_nonnegative(padding.operand) or {*dilation} != {1}):
            return Skip("a maximum could include the padding before it", 2)
    if not x.type.dtype.is_floating_point:
        return Skip("pools integers", 3)
    total = _add(padding, own, (kernel, _expand(attrs["stride"] or kernel, dims), dilation))
    if isinstance(total, Skip):
        return total
    if total != SAME_UPPER and any(n >= k for n, k in zip(total, (*kernel, *kernel), strict=True)):
        return Skip("the sum of both paddings reaches the size of the kernel", 3)
    attrs = {**attrs, "padding": total, **changed}
    return keep_name(build.graph, node.output, build(node.op, padding.operand, types=(node.output.type,), **attrs))


def _padding_before(x: Value, dims: int) -> _Padding | Skip:
    """Return the padding of a layer's operand, or why there is none to fold."""
    match x.producer:
        case Node(op_type="pad", inputs=(Value() as operand,), attrs=attrs):
            pass
        case _:
            return Skip("its operand is not padded")
    if attrs["mode"] != "constant":
        return Skip(f"the padding before it has the mode {attrs['mode']!r}", 1)
    pads = [*attrs["pad"], *[0] * (2 * dims - len(attrs["pad"]))]
    if any(n != 0 for n in pads[2 * dims :]):
        return Skip("the batch or channel dim is padded before it", 1)
    if any(isinstance(n, int) and n < 0 for n in pads):
        return Skip("the padding before it is negative, which crops", 1)
    begins, ends = pads[: 2 * dims : 2][::-1], pads[1 : 2 * dims : 2][::-1]
    return _Padding(operand, begins, ends, 0.0 if attrs["value"] is None else attrs["value"])


def _expand(value: Any, dims: int) -> tuple[Any, ...]:
    entries = tuple(value) if isinstance(value, tuple) else (value,)
    return entries if len(entries) == dims else entries * dims


def _own_ends(
    padding: Any, kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[Sequence[int], Sequence[int]] | None:
    """Return the begins and ends of a layer's own padding; None if they depend on the size of its operand."""
    dims = len(kernel)
    if padding == SAME_UPPER:
        return None
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return [total // 2 for total in totals], [total - total // 2 for total in totals]
    if padding == "valid":
        return [0] * dims, [0] * dims
    if len(padding) == 2 * dims:
        return padding[:dims], padding[dims:]
    return _expand(padding, dims), _expand(padding, dims)


def _add(
    padding: _Padding,
    own: tuple[Sequence[int], Sequence[int]] | None,
    windows: tuple[Sequence[int], Sequence[int], Sequence[int]],
) -> Any:
    """Return the padding of a layer with that before it included, begins and then ends, or why it cannot be expressed.

    It is `SAME_UPPER` if it depends on the size of the operand.
    """
    kernel, stride, _ = windows
    if own is None or is_symbolic((*windows, *map(tuple, own))):
        return Skip("its kernel, stride, dilation or own padding is dynamic", 2)
    if is_symbolic((*padding.begins, *padding.ends)):
        lengths = padding.operand.type.shape[-len(kernel) :]
        spatial = zip(padding.begins, padding.ends, lengths, *windows, strict=True)
        if any(map(any, own)) or not all(_is_same_upper(*dim) for dim in spatial):
            return Skip("the padding before it depends on sizes, and not by TensorFlow's 'same' formula", 2)
        if {*stride} != {1}:
            return SAME_UPPER
        begins, ends = zip(*(_compute_same_ends(k, k, 1) for k in kernel), strict=True)  # equal for all sizes
        return (*begins, *ends)
    return tuple(a + b for a, b in zip((*padding.begins, *padding.ends), (*own[0], *own[1]), strict=True))


def _is_same_upper(begin: Any, end: Any, n: Any, kernel: int, stride: int, dilation: int) -> bool:
    """Whether the padding of one dim of size ``n`` follows TensorFlow's "same" formula, for each size."""
    if dilation != 1 or stride > kernel or max(kernel, stride) > MAX_INTEGER:
        return False
    if isinstance(n, int):
        return (begin, end) == _compute_same_ends(n, kernel, stride)
    size = sympy.Dummy("n", integer=True, nonnegative=True)
    constant, rest = n.as_coeff_Add()
    expressions = (e if isinstance(e, sympy.Basic) else sympy.Integer(e) for e in (begin, end))
    ends = [e.xreplace({rest: size - constant}) for e in expressions]
    if any(e.free_symbols - {size} or any(abs(i) > MAX_INTEGER for i in e.atoms(sympy.Integer)) for e in ends):
        return False
    expected = (_compute_same_ends(k, kernel, stride) for k in range(CHECKED_SIZES))
    return all(tuple(evaluate(e, {size.name: k}) for e in ends) == wanted for k, wanted in enumerate(expected))


def _compute_same_ends(n: int, kernel: int, stride: int) -> tuple[int, int]:
    """Return TensorFlow's "same" padding before and after a dim of size ``n``."""
    total = max((-(-n // stride) - 1) * stride + kernel - n, 0)
    return total // 2, total - total // 2


def _is_nonnegative(value: Value) -> bool:
    """Whether all elements of a value are known to be 0 or larger; NaN counts as such."""
    node = value.producer
    if node is None:
        return False
    if node.op_type in {"clamp", "hardtanh"}:
        low = node.attrs.get("min_val", node.inputs[1] if len(node.inputs) > 1 else None)
        return isinstance(low, int | float) and low >= 0
    if node.op_type in ELEMENT_MOVES:
        return all(_is_nonnegative(v) for v in node.inputs if isinstance(v, Value))
    return node.op_type in NONNEGATIVE_OPERATORS


class FoldPadding(RulePass):
    """Fold padding with 0 into convolutions and means, and padding with -inf into maxima.

    Between two INT8 layers, a Pad runs in float in most runtimes. A pad with several readers folds into each that can
    take it. Operators with the sum have a padding with separate begins and ends, or ``same_upper``.
    """

    name = "fold-padding"
    rules = (fold_padding_into_convolution, fold_padding_into_pooling)
    motifs: ClassVar[tuple[Callable[[Builder], Value], ...]] = (
        motifs.convolution_after_pad,
        motifs.maximum_after_pad,
        motifs.positive_maximum_after_pad,
        motifs.mean_after_pad,
    )
    phase = Phase.FUSE
    after = ("fold-constants", "remove-identities")
    error = DOT
    removes = "padding"
