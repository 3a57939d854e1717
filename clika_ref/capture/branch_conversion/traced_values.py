"""Conditions whose value is not known during a trace, as 0-d bool tensors or symbols."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.overrides import TorchFunctionMode

from clika_ref.torch_internals.tensors import FakeTensor
from clika_ref.torch_internals.trees import pytree


def is_traced(value: Any) -> bool:
    """Whether the truth value depends on elements of traced tensors, so that Python cannot branch on it."""
    if isinstance(value, FakeTensor):
        return value.constant is None
    if isinstance(value, torch.SymBool | torch.SymInt | torch.SymFloat):
        return bool(free_unbacked_symbols(value))
    return False


def to_predicate(value: Any) -> torch.Tensor | torch.SymBool:
    """Return a traced condition as a 0-d bool tensor, or as a symbol.

    Raises:
        RuntimeError: a tensor does not have one element; eager raises the same error.
    """
    if isinstance(value, torch.SymBool):
        return value
    if not isinstance(value, torch.Tensor):
        return value != 0
    if value.dtype != torch.bool:
        value = value != 0  # also for NaN, which is true
    if value.ndim:
        if isinstance(count := value.numel(), int) and count != 1:
            raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")
        value = value.reshape(())
    return value


def combine_conditions(function: Callable[..., torch.Tensor], *conditions: Any) -> torch.Tensor:
    """Return a logical function of conditions, one of which is traced, as a 0-d bool tensor."""
    return function(*map(_to_tensor, conditions))


def _to_tensor(condition: Any) -> torch.Tensor:
    if not is_traced(condition):
        return torch.full((), bool(condition))
    predicate = to_predicate(condition)
    return predicate if isinstance(predicate, torch.Tensor) else number_to_tensor(torch.sym_ite(predicate, 1, 0)) != 0


def number_to_tensor(value: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a number as a 0-d tensor, which promotes like a Python number."""
    if isinstance(value, torch.SymBool):
        value, dtype = torch.sym_ite(value, 1, 0), dtype or torch.bool
    return mark_as_number(torch.full((), value, dtype=dtype or number_dtype(value)))


_NUMBER_MARK = "_clika_ref_number"
"""The attribute of tensors that are numbers in eager."""


def is_number_tensor(value: Any) -> bool:
    """Whether a value is a traced tensor where eager has a Python number."""
    return isinstance(value, torch.Tensor) and hasattr(value, _NUMBER_MARK)


def mark_as_number(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a tensor as a Python number in eager, and return it."""
    setattr(tensor, _NUMBER_MARK, True)
    return tensor


def restore_leaves(leaves: Iterable[tuple[Any, bool, bool]], tensors: Iterable[torch.Tensor]) -> list[Any]:
    """Return the leaves of variables with their tensors.

    Args:
        leaves: the value of each leaf, whether it is a constant, and whether it is a Python number in eager.
        tensors: the values of those that are no constants, in order.
    """
    remaining = iter(tensors)
    found: list[Any] = []
    for value, is_constant, is_number in leaves:
        tensor = None if is_constant else next(remaining)
        found.append(value if tensor is None else mark_as_number(tensor) if is_number else tensor)
    return found


class NumberScope(TorchFunctionMode):
    """Marks 0-d tensors that are computed from marked ones only."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        mark_result(result, pytree.tree_leaves((args, kwargs)))
        return result


def mark_result(result: Any, operands: Sequence[Any]) -> None:
    """Mark the 0-d result of a call as a number if all its tensors are numbers."""
    if isinstance(result, torch.Tensor) and not result.ndim and not hasattr(result, _NUMBER_MARK):
        tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
        if tensors and all(map(is_number_tensor, tensors)):
            mark_as_number(result)


def number_dtype(value: Any) -> torch.dtype:
    """Return the dtype of the tensor for a number."""
    if isinstance(value, bool | torch.SymBool):
        return torch.bool
    return torch.int64 if isinstance(value, int | torch.SymInt) else torch.get_default_dtype()


def read_number(tensor: torch.Tensor, kind: type) -> Any:
    """Return the element of a traced tensor as a bool or float in a 0-d tensor, or as a symbol of an integer.

    A float in a tensor can be an operand of a condition, and promotes like a Python number.
    """
    if kind is bool:
        return to_predicate(tensor)
    if kind is int:
        return tensor.detach().to(torch.int64).item()
    value = tensor.detach().reshape(())
    return mark_as_number(value if value.is_floating_point() else value.to(torch.get_default_dtype()))
