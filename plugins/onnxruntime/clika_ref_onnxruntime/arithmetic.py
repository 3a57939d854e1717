"""Number formats of ONNX Runtime on a CPU: as declared, except for very small numbers."""

from __future__ import annotations

import torch

from clika_ref.core.arithmetic import FLUSHED_FLOAT32, Arithmetic
from clika_ref.targets import cpu

FLUSHING_EXP = (Arithmetic(torch.float32, compute=FLUSHED_FLOAT32, kinds=("softmax", "compose")),)
"""``Softmax`` flushes ``exp(x)`` to 0 below the smallest normal number; ``Exp`` itself does not.

Source: onnxruntime 1.31, ``MlasExpConstants.LowerRangeSumExp`` in ``mlas/lib/compute.cpp``; its AVX-512 kernel does
not. Attention, of class ``compose``, contains a softmax.
"""


def arithmetic_of(flags: frozenset[str]) -> tuple[Arithmetic, ...]:
    """Return the arithmetic on a processor with these flags."""
    return () if cpu.AVX512_FLAG in flags else FLUSHING_EXP


def arithmetic_here() -> tuple[Arithmetic, ...]:
    """Return the arithmetic on this processor."""
    return arithmetic_of(cpu.cpu_flags())
