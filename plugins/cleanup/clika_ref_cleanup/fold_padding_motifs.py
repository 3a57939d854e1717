"""Graphs for `FoldPadding` that random generation does not produce: padding right before a convolution or a pooling.

Each function takes a builder of an empty graph, as the conformance suite expects of ``motifs``.
"""

from __future__ import annotations

import math

import torch

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Value
from clika_ref.core.types import TensorType


def _pad_input(build: Builder, *, value: float | None = None, is_positive: bool = False) -> Value:
    x = build.graph.add_input(TensorType(torch.float32, (2, 4, 7, 6)), "x")
    return build("pad", build("relu", x) if is_positive else x, pad=(0, 1, 1, 0), value=value)


def convolution_after_pad(build: Builder) -> Value:
    """A convolution with padding of its own, after uneven padding with 0."""
    weight = torch.arange(2.0 * 4 * 3 * 3).reshape(2, 4, 3, 3) / 64 - 0.5
    return build("conv2d", _pad_input(build), build.constant(weight, "weight"), padding=(1, 0), stride=(2, 1))


def maximum_after_pad(build: Builder) -> Value:
    """The maximum of padded windows, after padding with -inf."""
    return build("max_pool2d", _pad_input(build, value=-math.inf), kernel_size=(3, 2), stride=(2, 1))


def positive_maximum_after_pad(build: Builder) -> Value:
    """The maximum of padded windows without negative elements, after padding with 0."""
    return build("max_pool2d", _pad_input(build, is_positive=True), kernel_size=(2, 3), stride=(1, 2))


def mean_after_pad(build: Builder) -> Value:
    """The mean of padded windows, after padding with 0."""
    return build("avg_pool2d", _pad_input(build), kernel_size=(2, 2), stride=(2, 2))
