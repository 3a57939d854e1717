"""Generic operators: ATen overloads that no plugin declares, used unchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch

from clika_ref.core.accuracy import COMPOSE
from clika_ref.core.ir import Value
from clika_ref.core.operators import Operator
from clika_ref.core.samples import Call
from clika_ref.core.traits import KEEP_FLOAT
from clika_ref.torch_internals.operators import OpOverload, get_schema


class GenericOperator(Operator):
    """An ATen overload as an operator: its tensors are the operands, all other arguments one attribute.

    The attribute ``arguments`` holds a pair of name and value for each given argument. The string ``%i`` refers to
    operand ``i``, also inside lists.
    """

    def __init__(self, overload: OpOverload) -> None:
        def reference(*operands: Any, arguments: tuple[Any, ...] = ()) -> Any:
            return overload(**{name: fill_operands(value, operands) for name, value in arguments})

        many = len(get_schema(overload).returns) > 1 or isinstance(get_schema(overload).returns[0].type, torch.ListType)
        reference.__annotations__["return"] = "tuple" if many else "Tensor"
        reference.__name__ = reference.__qualname__ = str(overload).replace(".", "_")
        reference.__doc__ = f"``{get_schema(overload)}``, as PyTorch computes it."
        random = torch.Tag.nondeterministic_seeded in overload.tags
        super().__init__(reference, (), KEEP_FLOAT, COMPOSE, random=random)
        self.name = str(overload)
        self.overload = overload
        self.converters[overload] = self.convert

    def convert(self, *args: Any, **kwargs: Any) -> Call:
        """Separate the tensors from the other arguments of an ATen call."""
        names = [a.name for a in get_schema(self.overload).arguments]
        operands: list[Any] = []

        def replace_tensors(item: Any) -> Any:
            if isinstance(item, Value):
                operands.append(item)
                return f"%{len(operands) - 1}"
            return tuple(map(replace_tensors, item)) if isinstance(item, tuple | list) else item

        given = [*zip(names, args, strict=False), *kwargs.items()]
        arguments = tuple((name, replace_tensors(value)) for name, value in given)
        return Call(tuple(operands), {"arguments": arguments})


def fill_operands(item: Any, operands: Sequence[Any]) -> Any:
    """Replace each ``%i`` by operand ``i``."""
    if isinstance(item, str) and item.startswith("%"):
        return operands[int(item[1:])]
    return [fill_operands(i, operands) for i in item] if isinstance(item, tuple) else item


@cache
def torchlib_operator(overload: OpOverload) -> Operator | None:
    """Return the generic operator of an overload with torchlib's lowering, or None if torchlib has none.

    It is always the same one, with the name of the overload: ``aten.erfinv.default``.
    """
    if not _load_torchlib_lowerings().has_lowering(overload):
        return None
    op = GenericOperator(overload)
    op.onnx(partial(_lower_with_torchlib, overload))
    return op


def _load_torchlib_lowerings() -> Any:
    return import_module("clika_ref.onnx_export.torchlib")  # takes 1.5 s, and few models need it


def _lower_with_torchlib(overload: OpOverload, op: Any, *operands: Any, arguments: tuple[tuple[str, Any], ...]) -> Any:
    def bind_arguments(values: Sequence[Any]) -> dict[str, Any]:
        return {name: fill_operands(value, values) for name, value in arguments}

    return _load_torchlib_lowerings().lower(overload, op, operands, bind_arguments)


def find_operator(
    name: str, declared: Mapping[str, Operator], generic: Callable[[OpOverload], Operator | None]
) -> Operator | None:
    """Return the operator of a name: a declared one, or the result of ``generic`` for the overload of that name.

    The name may come from a file, so ``generic`` must reject overloads that no model calls: ATen can open files too.
    """
    if name in declared:
        return declared[name]
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(getattr(torch.ops, namespace, None), packet, None), overload, None) if overload else None
    return generic(found) if isinstance(found, OpOverload) else None
