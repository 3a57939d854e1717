"""Complex tensors of a trace as entries of an importer: pairs of the entries of their parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from clika_ref.capture.aliasing import TracedTensor
from clika_ref.capture.complex_functions import real_dtype
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Value
from clika_ref.core.operators import Operator
from clika_ref.core.types import TensorType


@dataclass(frozen=True)
class ComplexEntry:
    """The entries of the real and imaginary parts of a complex tensor."""

    real: TracedTensor
    imag: TracedTensor


def list_parts(entries: Sequence[Any]) -> list[Any]:
    """Return entries with the parts of complex tensors instead of these."""
    return [p for e in entries for p in ((e.real, e.imag) if isinstance(e, ComplexEntry) else (e,))]


def view_as_real(entry: TracedTensor, op: Operator, build: Builder) -> TracedTensor:
    """Return a complex tensor as a real one whose last dim of size 2 holds the parts; ``op`` is ATen's call."""
    value = entry.value
    made = TensorType(real_dtype(value.type.dtype), (*value.type.shape, 2))
    call = op.convert_call(torch.ops.aten.view_as_real.default, value)
    real = build(op, *call.operands, types=(made,), **call.attrs)
    return TracedTensor(
        real, entry.memory, entry.version, entry, (op, tuple(call.operands[1:]), call.attrs, 0), (made,)
    )


def split_complex(joined: TracedTensor, build: Builder) -> ComplexEntry:
    """Return the entry of a complex tensor from that of a real one whose last dim holds the parts: views of it."""
    part = TensorType(joined.value.type.dtype, joined.value.type.shape[:-1])
    entries: list[TracedTensor] = []
    for index in range(2):
        attrs = {"dim": -1, "index": index}
        value = build("select", joined.value, types=(part,), **attrs)
        assert value.producer is not None
        view = value.producer.op, (), attrs, 0
        entries.append(TracedTensor(value, joined.memory, joined.version, joined, view, (part,)))
    return ComplexEntry(*entries)


def join_complex(parts: Sequence[Value], build: Builder) -> Value:
    """Return the parts of a complex tensor as one real value, with a last dim of size 2."""
    joined = TensorType(parts[0].type.dtype, (*parts[0].type.shape, 2))
    return build("stack", *parts, dim=-1, types=(joined,))
