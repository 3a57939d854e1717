"""In which formats ONNX Runtime computes on a CPU: in those that are declared, but for very small numbers."""

from __future__ import annotations

import torch

from clika_ref import processor
from clika_ref.arithmetic import FLUSHED_FLOAT32, Arithmetic

FLUSHING_EXP = (Arithmetic(torch.float32, compute=FLUSHED_FLOAT32, kinds=("softmax", "compose")),)
"""``Softmax`` takes ``exp(x)`` for 0 where it is below the smallest normal number, which ``Exp`` itself does not.

Source: onnxruntime 1.31, ``MlasExpConstants.LowerRangeSumExp`` in ``mlas/lib/compute.cpp``; its kernel for vectors of
512 bits does not. Attention, of class ``compose``, has a softmax within.
"""


def arithmetic_of(flags: frozenset[str]) -> tuple[Arithmetic, ...]:
    """Return what is right on a processor that can do what its flags say."""
    return () if processor.WIDE_VECTORS in flags else FLUSHING_EXP


def arithmetic_here() -> tuple[Arithmetic, ...]:
    """Return what is right on this processor."""
    return arithmetic_of(processor.flags())
