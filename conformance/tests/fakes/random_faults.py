"""Further faults of random operators; at least a third of them are blind."""

import torch
from clika_ref_conformance.mutants.patched_op import PatchedOp
from clika_ref_conformance.mutants.seeding import Catalogue

FAULTS = Catalogue("further")


@FAULTS.lowering("uniform", "the lower end is ignored")
def _(original, op, x, *, low, high):
    return original(op, x, low=0.0, high=high)


@FAULTS.lowering("feature_dropout", "elements are dropped, not channels")
def _(original, op, x, *, p, train):
    if not train or p in (0, 1):
        return original(op, x, p=p, train=train)
    share = op.declare(op.node("RandomUniformLike", op.cast(x, torch.float32)), torch.float32)
    kept = op.cast(op.GreaterOrEqual(share, op.scalar(p, torch.float32)), op.dtype(x))
    return op.Mul(x, op.Mul(kept, op.like(x, 1 / (1 - p))))


@FAULTS.lowering("log_normal", "mean and deviation are swapped")
def _(original, op, x, *, mean, std):
    return original(op, x, mean=std, std=mean)


@FAULTS.lowering("exponential", "lambd multiplies")
def _(original, op, x, *, lambd):
    return original(op, x, lambd=1 / lambd)


@FAULTS.lowering("alpha_dropout", "dropped elements become zero")
def _(original, op, x, *, p, train):
    return original(PatchedOp(op, Add=lambda op, a, b: a), x, p=p, train=train)


@FAULTS.lowering("rrelu", "all elements have the mean slope")
def _(original, op, x, **attrs):
    return original(op, x, **{**attrs, "training": False})
