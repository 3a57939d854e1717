"""A drawn call, before its tensors are filled in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from clika_ref.core.operators import Operator
from clika_ref.core.samples import Call, TensorSample


@dataclass(frozen=True)
class DrawnCall:
    """A call, the seed of its elements, and the index of the vector to run in addition to typical elements.

    ``beyond`` means that the call has a dtype that its samples do not list. ``error`` is the sampler's error, if it
    raised instead of returning a call.
    """

    call: Call
    seed: int = 0
    vector: int = 0
    has_unlisted_dtype: bool = False
    error: str = ""


def fill_operands(call: Call, tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return the operands of a call with its samples and tensors replaced by ``tensors``, in order."""
    rest = iter(tensors)
    return [next(rest) if isinstance(o, TensorSample | torch.Tensor) else o for o in call.operands]


def format_call(op: Operator, call: Call) -> str:
    """Return a call as one line: ``add(float32[2, 3], 1.5, alpha=2)``."""
    operands = [
        f"{str(o.dtype).removeprefix('torch.')}{list(o.shape)}" if isinstance(o, TensorSample) else repr(o)
        for o in call.operands
    ]
    return f"{op.name}({', '.join([*operands, *(f'{k}={v!r}' for k, v in call.attrs.items())])})"
