"""Facts from the schemas of ATen calls: the arguments that they write, and their functional forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import guard_or_false

from clika_ref.core.errors import ModelError
from clika_ref.torch_internals.operators import (
    OpOverload,
    OpOverloadPacket,
    find_schema,
    get_overload_name,
    get_schema,
    is_contiguous_or_false,
)

aten = torch.ops.aten

RENAMED_OVERLOADS = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.floor_divide_.Tensor: aten.floor_divide.default,
    aten.pow_.Tensor: aten.pow.Tensor_Tensor,
    aten.float_power_.Tensor: aten.float_power.Tensor_Tensor,
}
"""In-place overloads whose functional form has another overload name."""


@cache
def _find_written_names(overload: OpOverload) -> tuple[tuple[int, str], ...]:
    arguments = get_schema(overload).arguments
    return tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def find_written_arguments(overload: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that a call writes to."""
    return [
        args[i] if i < len(args) else kwargs[name]
        for i, name in _find_written_names(overload)
        if i < len(args) or name in kwargs
    ]


METADATA_MUTATIONS: dict[OpOverload, OpOverload] = {
    aten.detach_.default: aten.detach.default,
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.swapdims_.default: aten.swapdims.default,
    aten.swapaxes_.default: aten.swapaxes.default,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.as_strided_.default: aten.as_strided.default,
}
"""In-place calls that change the metadata of a tensor but no memory, and the corresponding views."""


RESIZING_CALLS = frozenset({aten.resize_.default, aten.resize_as_.default})
"""In-place calls that give a tensor another shape of the same memory, or of more."""


SKIPPED_CALLS = frozenset(
    {
        aten._assert_tensor_metadata.default,
        aten._assert_scalar.default,
        aten._assert_async.msg,
        aten._assert_async.default,
        aten.sym_constrain_range.default,
        aten.sym_constrain_range_for_size.default,
    }
)
"""Calls that only check facts that the types of the graph state anyway."""


def find_functional_overload(
    overload: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[OpOverload, tuple[Any, ...], dict[str, Any]]:
    """Return the functional form of an in-place call: ``relu`` for ``relu_``, ``__and__`` for ``__iand__``.

    Raises:
        ModelError: there is none.
    """
    packet, name = overload.overloadpacket, get_overload_name(overload)
    base = packet.__name__
    namespace = getattr(torch.ops, overload.namespace)
    if base.endswith("_"):
        candidates = (f"__{base[3:]}",) if base.startswith("__i") else (base[:-1], f"{base[:-1]}_functional")
        for candidate in candidates:
            pure = getattr(namespace, candidate, None)
            if pure is not None and name in pure.overloads():
                return getattr(pure, name), args, kwargs
        if overload in RENAMED_OVERLOADS:
            return RENAMED_OVERLOADS[overload], args, kwargs
    else:
        results = {written for _, written in _find_written_names(overload)}
        pure = _find_overload_without(packet, overload, results)
        if pure is not None:
            return pure, args, {k: v for k, v in kwargs.items() if k not in results}
    raise ModelError(f"the in-place call {overload} has no out-of-place variant. Use an out-of-place operation.")


def _find_overload_without(packet: OpOverloadPacket, overload: OpOverload, results: set[str]) -> OpOverload | None:
    """Return the overload that takes the same arguments without the written ones."""

    def list_arguments(schema: Any) -> list[tuple[str, str]]:
        return [(a.name, str(a.type)) for a in schema.arguments if a.name not in results]

    for name in packet.overloads():
        schema = find_schema(packet, name)
        if schema.overload_name != get_overload_name(overload) and list_arguments(schema) == list_arguments(
            get_schema(overload)
        ):
            return getattr(packet, name)
    return None


def find_squeezed_dims(rank: int, dims: int | Sequence[int] | None = None) -> list[int]:
    """Return the dims that ``squeeze`` drops if their size is 1: all of them, or the given ones."""
    if dims is None:
        return list(range(rank))
    return [d % rank for d in ([dims] if isinstance(dims, int) else dims)] if rank else []


def has_failed(node: fx.Node) -> bool:
    """Whether a call raised an error that the model caught, as in eager: the tracer records no result for it."""
    returns = isinstance(node.target, OpOverload) and get_schema(node.target).returns
    return bool(returns) and node.meta.get("val") is None and not node.users


def is_contiguous_at_start(source: Any) -> bool:
    """Whether a traced tensor is contiguous and starts at the first element of its memory."""
    fake = source.meta["val"]  # checked without a guard, which would exclude sizes that eager accepts
    return is_contiguous_or_false(fake) and guard_or_false(fake.storage_offset() == 0)


def find_resized_view(node: fx.Node) -> tuple[OpOverload, list[Sequence[Any]]]:
    """Return the view that a call of `RESIZING_CALLS` makes of its tensor, and its further arguments.

    Raises:
        ModelError: the tensor is not contiguous, or has fewer elements than the result.
    """
    source: Any = node.args[0]
    old, new = source.meta["val"], node.meta["val"]
    if not is_contiguous_at_start(source):
        raise ModelError(f"{node.target} of a view that is not contiguous is not supported. Use reshape instead.")
    if guard_or_false(old.numel() == new.numel()):
        return aten.view.default, [new.shape]
    if not guard_or_false(new.numel() < old.numel()):
        raise ModelError(
            f"{node.target} from {list(old.shape)} to {list(new.shape)} reads uninitialized memory. Use "
            "torch.nn.functional.pad instead."
        )
    return aten.as_strided.default, [new.shape, new.stride()]
