"""Variants of a call that PyTorch accepts: memory layouts of inputs, types of literals, and negative dims."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from clika_ref.core.operators import Operator
from clika_ref.core.samples import Call, TensorSample
from clika_ref_conformance.cases import CaseRun

DIM_ATTRIBUTES = frozenset(
    {"dim", "dims", "axis", "dim0", "dim1", "dim1_", "dim2", "start_dim", "end_dim", "axis0", "axis1"}
)
"""Attributes that name dims of the first operand and may be negative."""

FLOAT_EDGE_NUMBERS = {"nan": math.nan, "inf": math.inf, "minus-inf": -math.inf, "beyond-single": 2**24 + 1}
HALF_EDGE_NUMBERS = {"beyond-half": 70000.0, "below-half": 1e-8}
INTEGER_EDGE_NUMBERS = {
    "inf": math.inf,
    "fraction": -2.5,
    "32-bits": 2**31,
    "beyond-double": 2**53 + 1,
    "40-bits": -(2**40) - 1,
}


def make_layout_runs(typical: CaseRun, operands: Sequence[Any]) -> list[CaseRun]:
    """Return the inputs of a run in other memory layouts: ``strided``, ``offset``, ``channels-last``, ``expanded``.

    The first three have the same elements. ``expanded`` repeats one slice with stride 0, except for operands that must
    not have equal elements.
    """
    tensors = [o for o in operands if isinstance(o, TensorSample | torch.Tensor)]
    are_ties_illegal = [isinstance(o, torch.Tensor) or o.unique for o in tensors]
    forms = {
        "strided": tuple(map(_make_strided, typical.inputs)),
        "offset": tuple(map(_make_offset, typical.inputs)),
        "channels-last": tuple(map(_make_channels_last, typical.inputs)),
        "expanded": tuple(
            t if is_illegal else _expand_first_slice(t)
            for t, is_illegal in zip(typical.inputs, are_ties_illegal, strict=True)
        ),
    }
    return [CaseRun(name, inputs) for name, inputs in forms.items() if _is_layout_changed(inputs, typical.inputs)]


def _is_layout_changed(inputs: tuple[torch.Tensor, ...], plain: tuple[torch.Tensor, ...]) -> bool:
    return any(a.stride() != b.stride() or a.storage_offset() for a, b in zip(inputs, plain, strict=True))


def _make_strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with reversed dim order in memory, where every second element is unused."""
    if not tensor.ndim:
        return tensor
    reversed_dims = tensor.permute(*reversed(range(tensor.ndim)))
    storage = reversed_dims.new_zeros((*reversed_dims.shape[:-1], 2 * reversed_dims.shape[-1]))
    storage[..., ::2] = reversed_dims
    return storage[..., ::2].permute(*reversed(range(tensor.ndim)))


def _make_offset(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with a storage offset of three elements and further elements after it."""
    storage = tensor.new_ones(tensor.numel() + 5)
    storage[3 : 3 + tensor.numel()] = tensor.reshape(-1)
    return storage[3 : 3 + tensor.numel()].view(tensor.shape)


def _make_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """Return 4-D and 5-D tensors in channels-last format, others unchanged."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    form = formats.get(tensor.ndim)
    return tensor if form is None else tensor.contiguous(memory_format=form)


def _expand_first_slice(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with stride 0 along its first dim longer than 1, so that all slices are the first one."""
    for dim, length in enumerate(tensor.shape):
        if length > 1:
            return tensor.narrow(dim, 0, 1).expand(tensor.shape)
    return tensor


def make_literal_variants(op: Operator, call: Call, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """Yield a name and a call for each variant of one literal that PyTorch may accept.

    - A float without a fraction becomes an integer; an integer becomes a float where the schema has a float.
    - A number becomes True, and numbers at the limits of dtypes, where the schema has a scalar.
    - A dim becomes negative, or positive if it was negative.

    The caller must run eager to find out whether a variant is legal. Lists have no variant, as a graph stores tuples.

    Args:
        op: the operator.
        call: a call of it.
        dtype: the dtype of the other operands.
    """
    annotations = op.reference.__annotations__
    rank = next((o.rank for o in call.operands if isinstance(o, TensorSample)), 0)
    for name, value in call.attrs.items():
        forms = (
            _make_dim_forms(value, rank)
            if name in DIM_ATTRIBUTES
            else _make_number_forms(value, str(annotations.get(name)), dtype)
        )
        for form, other in forms:
            yield f"{name}-{form}", Call(call.operands, {**call.attrs, name: other})
    for index, (value, parameter) in enumerate(zip(call.operands, op.operands, strict=False)):
        for form, other in _make_number_forms(value, str(annotations.get(parameter.name)), dtype):
            yield f"x{index}-{form}", Call((*call.operands[:index], other, *call.operands[index + 1 :]), call.attrs)


def _make_dim_forms(value: Any, rank: int) -> Iterator[tuple[str, Any]]:
    values = value if isinstance(value, tuple) else (value,)
    if values and all(type(v) is int and -rank <= v < rank for v in values):
        flipped = tuple(v - rank if v >= 0 else v + rank for v in values)
        yield "other-end", flipped if isinstance(value, tuple) else flipped[0]


def _make_edge_numbers(dtype: torch.dtype) -> dict[str, float]:
    """Return numbers to combine with a dtype: those that narrower dtypes cannot represent, or represent differently."""
    if not dtype.is_floating_point:
        return INTEGER_EDGE_NUMBERS
    return FLOAT_EDGE_NUMBERS | (HALF_EDGE_NUMBERS if dtype.itemsize < torch.float32.itemsize else {})


def _make_number_forms(value: Any, annotation: str, dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    if type(value) is float and value.is_integer():
        yield "integer", int(value)
    elif type(value) is int and ("float" in annotation or "Number" in annotation):
        yield "float", float(value)
    if type(value) in (int, float) and ("bool" in annotation or "Number" in annotation):
        yield "boolean", True
        yield from ((form, number) for form, number in _make_edge_numbers(dtype).items() if repr(number) != repr(value))
