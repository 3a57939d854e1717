"""Merge the values that two branches of a condition compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from clika_ref.capture.branch_conversion.site_record import SiteRecord
from clika_ref.capture.branch_conversion.traced_values import (
    is_number_tensor,
    number_dtype,
    number_to_tensor,
    restore_leaves,
)
from clika_ref.capture.branch_conversion.variables import Unbound, reject_unbound
from clika_ref.capture.messages import BranchConversionError, simplify_message
from clika_ref.torch_internals.trees import pytree

NUMBER_TYPES = (bool, int, float, torch.SymBool, torch.SymInt, torch.SymFloat)

PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
"""Immutable types whose equal values are the same."""


@dataclass(frozen=True)
class MergedLeaf:
    """A leaf of merged values: a constant, or a tensor that depends on the condition."""

    constant: Any = None
    dtype: torch.dtype | None = None
    """The dtype of the tensor; None for a constant."""
    is_number: bool = False
    """Whether it is a Python number in eager."""

    def convert(self, leaf: Any) -> torch.Tensor:
        """Return the value of one branch as a tensor of its own."""
        if not isinstance(leaf, torch.Tensor):
            return number_to_tensor(leaf, self.dtype)
        return leaf.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class MergePlan:
    """How to merge the values of two branches."""

    spec: pytree.TreeSpec
    leaves: tuple[MergedLeaf, ...]

    @classmethod
    def of(cls, site: SiteRecord, when_true: Any, when_false: Any) -> MergePlan:
        """Compare the values of two branches.

        Raises:
            BranchConversionError: they have different structures, types or shapes.
        """
        _reject_unbound_variables(site, when_true, when_false)
        (leaves, spec), (others, other_spec) = map(pytree.tree_flatten, (when_true, when_false))
        if spec != other_spec:
            raise _make_error(site, *_find_different_parts(when_true, when_false))
        paths = [path for path, _ in pytree.tree_flatten_with_path(when_true)[0]]
        return cls(spec, tuple(_merge(site, *leaf) for leaf in zip(paths, leaves, others, strict=True)))

    @property
    def output_count(self) -> int:
        """The number of tensors that depend on the condition."""
        return sum(leaf.dtype is not None for leaf in self.leaves)

    def convert(self, value: Any) -> tuple[torch.Tensor, ...]:
        """Return those leaves of the value of one branch that depend on the condition, as tensors."""
        leaves = pytree.tree_leaves(value)
        pairs = zip(self.leaves, leaves, strict=True)
        return tuple(merged.convert(leaf) for merged, leaf in pairs if merged.dtype is not None)

    def rebuild(self, outputs: Sequence[torch.Tensor]) -> Any:
        """Return the merged value from its tensors."""
        leaves = [(leaf.constant, leaf.dtype is None, leaf.is_number) for leaf in self.leaves]
        return pytree.tree_unflatten(restore_leaves(leaves, outputs), self.spec)


def _reject_unbound_variables(site: SiteRecord, when_true: Any, when_false: Any) -> None:
    if not isinstance(when_true, dict) or not isinstance(when_false, dict):
        return
    for name in when_true.keys() & when_false.keys():
        values = when_true[name], when_false[name]
        if (values[0] is Unbound) is not (values[1] is Unbound):
            truth = "true" if values[1] is Unbound else "false"
            raise reject_unbound(site, name, has_value=f"if the condition is {truth}")


def _merge(site: SiteRecord, path: tuple[Any, ...], one: Any, other: Any) -> MergedLeaf:
    if one is other or (type(one) is type(other) and isinstance(one, PLAIN_TYPES) and one == other):
        return MergedLeaf(one)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if has_same_type(one, other):
            return MergedLeaf(dtype=one.dtype, is_number=is_number_tensor(one) and is_number_tensor(other))
    elif isinstance(one, NUMBER_TYPES) and isinstance(other, NUMBER_TYPES):
        if is_same_number(one, other):
            return MergedLeaf(one)
        return MergedLeaf(dtype=torch.promote_types(number_dtype(one), number_dtype(other)), is_number=True)
    else:
        dtype = _find_common_dtype(one, other) or _find_common_dtype(other, one)
        if dtype is not None:
            tensor = one if isinstance(one, torch.Tensor) else other
            return MergedLeaf(dtype=dtype, is_number=is_number_tensor(tensor))
    raise _make_error(site, path, one, other)


def _find_common_dtype(tensor: Any, number: Any) -> torch.dtype | None:
    """Return the dtype of a 0-d tensor if a number promotes to it; else None."""
    if not isinstance(tensor, torch.Tensor) or tensor.ndim or not isinstance(number, NUMBER_TYPES):
        return None
    return tensor.dtype if torch.promote_types(tensor.dtype, number_dtype(number)) == tensor.dtype else None


def has_same_type(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, device and shape."""
    if (one.dtype, one.device, one.ndim) != (other.dtype, other.device, other.ndim):
        return False
    return all(statically_known_true(a == b) for a, b in zip(one.shape, other.shape, strict=True))


def is_same_number(one: Any, other: Any) -> bool:
    """Whether two numbers are surely equal, and of the same type."""
    return number_dtype(one) == number_dtype(other) and statically_known_true(one == other)


def _find_different_parts(one: Any, other: Any) -> tuple[tuple[Any, ...], Any, Any]:
    """Return the smallest parts of two values that have different structures, and their path."""
    if type(one) is type(other) and isinstance(one, dict | list | tuple) and len(one) == len(other):
        keys = one.keys() if isinstance(one, dict) else range(len(one))
        if not isinstance(other, dict) or keys == other.keys():
            for key in keys:
                if pytree.tree_structure(one[key]) != pytree.tree_structure(other[key]):
                    step = pytree.MappingKey(key) if isinstance(one, dict) else pytree.SequenceKey(key)
                    path, *parts = _find_different_parts(one[key], other[key])
                    return (step, *path), parts[0], parts[1]
    return (), one, other


def _make_error(site: SiteRecord, path: tuple[Any, ...], one: Any, other: Any) -> BranchConversionError:
    is_variable = bool(path) and isinstance(path[0], pytree.MappingKey) and path[0].key in site.description.merged
    name = f"{path[0].key}{pytree.keystr(path[1:])}" if is_variable else f"its result{pytree.keystr(path)}"
    return site.reject(
        f"{name} is {describe_value(one)} if the condition is true, and {describe_value(other)} if it is false. "
        "Compute the same type and shape in both"
    )


def describe_value(value: Any) -> str:
    """Describe a value for messages: a tensor by its type and shape."""
    if isinstance(value, torch.Tensor):
        shape = simplify_message(", ".join(map(str, value.shape)))
        return f"{str(value.dtype).removeprefix('torch.')}[{shape}]"
    if isinstance(value, NUMBER_TYPES):
        return f"the {type(value).__name__.removeprefix('Sym').lower()} {simplify_message(str(value))}"
    if isinstance(value, PLAIN_TYPES):
        return repr(value)
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
