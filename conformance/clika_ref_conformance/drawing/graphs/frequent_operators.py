"""The most frequently used operators, which the suite tests in all pairs."""

from __future__ import annotations

from collections.abc import Sequence

from clika_ref.core.operators import Operator
from clika_ref.core.registry import Registry

FREQUENT_OPERATORS = (
    *("linear", "add", "conv2d", "dropout", "reshape", "mul", "permute", "adaptive_avg_pool2d", "cat", "batch_norm"),
    *("slice", "layer_norm", "gelu", "scaled_dot_product_attention", "relu", "unsqueeze", "mean", "expand", "index"),
    *("to", "max_pool2d", "embedding", "bitwise_and", "softmax", "select", "matmul", "sigmoid", "avg_pool2d"),
    *("unbind", "le", "neg", "silu", "pow", "pad", "sub", "split_with_sizes", "ge", "tanh", "rsqrt", "div"),
    *("hardsigmoid", "gather", "sum", "stack", "ne", "cumsum", "hardswish", "upsample_bilinear2d", "roll"),
    *("linalg_vector_norm", "masked_fill", "eq", "einsum", "clamp", "squeeze", "conv3d", "repeat_interleave", "repeat"),
    *("upsample_bicubic2d", "leaky_relu", "upsample_nearest2d", "group_norm", "gt", "topk", "sort", "exp", "conv1d"),
)
"""Sorted by the number of architectures that call them, among 152 exported image, text, video and speech models."""

FOREIGN_PARTNER_COUNT = 12
"""Number of the most frequent operators to pair with each operator of another plugin."""


def select_frequent_operators(registry: Registry, count: int) -> list[Operator]:
    """Return the first ``count`` operators of the list that are registered and have samples."""
    found = [registry.operators[name] for name in FREQUENT_OPERATORS if name in registry.operators]
    return [op for op in found if op.sampler is not None and op.random is not True][:count]


def select_foreign_operators(registry: Registry) -> list[Operator]:
    """Return the operators of plugins that declare none of the frequent operators."""
    strangers = [p for p in registry.plugins if not any(op.name in FREQUENT_OPERATORS for op in p.operators)]
    return [op for p in strangers for op in p.operators if op.sampler is not None and op.random is not True]


def select_partners(registry: Registry, first: Operator, count: int) -> Sequence[Operator]:
    """Return the operators that may follow ``first``.

    They are all frequent operators, or the first `FOREIGN_PARTNER_COUNT` of them if ``first`` comes from another
    plugin.
    """
    known, strangers = select_frequent_operators(registry, count), select_foreign_operators(registry)
    if first in strangers:
        return [*known[:FOREIGN_PARTNER_COUNT], first]
    return [*known, *(strangers if first in known[:FOREIGN_PARTNER_COUNT] else ())]
