"""Faults of random operators: shapes, ranges, probabilities and masks."""

from __future__ import annotations

import torch

from clika_ref.core.types import TensorType
from clika_ref_conformance.mutants.patched_op import PatchedOp
from clika_ref_conformance.mutants.seeding import Catalogue

FAULTS = Catalogue("randomness")


@FAULTS.lowering("rand", "one number is drawn, whatever the size")
def _(original, op, *, size, dtype, device):
    return op.node("RandomUniform", shape=[1], dtype=op.result.dtype)


@FAULTS.lowering("randint", "the upper end is drawn too")
def _(original, op, *, high, **attrs):
    return original(op, high=high + 1, **attrs)


@FAULTS.lowering("native_dropout", "the mask says what is dropped")
def _(original, op, x, *, p, train):
    result, mask = original(op, x, p=p, train=train)
    return (result, op.Not(mask)) if train else (result, mask)


@FAULTS.lowering("dropout", "what is kept is not rescaled")
def _(original, op, x, *, p, train):
    result = original(op, x, p=p, train=train)
    return op.Mul(result, op.like(x, 1 - p)) if train and p < 1 else result


@FAULTS.lowering("normal", "mean and deviation are swapped")
def _(original, op, mean, std=1.0, **attrs):
    return original(op, std, mean, **attrs)


@FAULTS.lowering("bernoulli", "ones are as likely as zeros should be")
def _(original, op, x, p=None):
    return original(PatchedOp(op, Less=lambda op, a, b: op.GreaterOrEqual(a, b)), x, p)


@FAULTS.lowering("randperm", "the numbers are in order")
def _(original, op, *, n, dtype, device):
    return op.cast(op.Range(*(op.scalar(v, torch.int64) for v in (0, n, 1))), op.result.dtype)


@FAULTS.lowering("multinomial", "all chances are alike")
def _(original, op, x, **attrs):
    alike = op.declare(op.Add(op.Mul(x, op.like(x, 0)), op.like(x, 1)), TensorType(op.dtype(x), op.shape(x)))
    return original(op, alike, **attrs)
