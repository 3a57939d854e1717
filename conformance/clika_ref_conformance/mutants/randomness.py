"""Faults of random operators: shapes, ranges, probabilities and masks."""

from __future__ import annotations

import torch

from clika_ref.core.types import TensorType
from clika_ref_conformance.mutants.seeding import Catalogue

FAULTS = Catalogue("randomness")


@FAULTS.lowering("rand", "one number is drawn for all elements")
def _(original, op, *, size, dtype, device):
    return op.node("RandomUniform", shape=[1], dtype=op.result.dtype)


@FAULTS.lowering("randint", "the upper bound is drawn, too")
def _(original, op, *, high, **attrs):
    return original(op, high=high + 1, **attrs)


@FAULTS.lowering("native_dropout", "the mask selects the dropped elements")
def _(original, op, x, *, p, train):
    result, mask = original(op, x, p=p, train=train)
    return (result, op.Not(mask)) if train else (result, mask)


@FAULTS.lowering("dropout", "kept elements are not rescaled")
def _(original, op, x, *, p, train):
    result = original(op, x, p=p, train=train)
    return op.Mul(result, op.like(x, 1 - p)) if train and p < 1 else result


@FAULTS.lowering("normal", "mean and standard deviation are swapped")
def _(original, op, mean, std=1.0, **attrs):
    return original(op, std, mean, **attrs)


FAULTS.node_functions("bernoulli", "the probability is that of zeros", Less=lambda op, a, b: op.GreaterOrEqual(a, b))


@FAULTS.lowering("randperm", "the numbers are sorted")
def _(original, op, *, n, dtype, device):
    return op.cast(op.Range(*(op.scalar(v, torch.int64) for v in (0, n, 1))), op.result.dtype)


@FAULTS.lowering("multinomial", "all probabilities are equal")
def _(original, op, x, **attrs):
    alike = op.declare(op.Add(op.Mul(x, op.like(x, 0)), op.like(x, 1)), TensorType(op.dtype(x), op.shape(x)))
    return original(op, alike, **attrs)
