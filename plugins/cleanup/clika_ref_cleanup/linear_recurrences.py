"""Recognize steps ``h = a * h + b`` in the body of a loop, with ``a`` and ``b`` that do not depend on ``h``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Node, Value
from clika_ref.core.types import TensorType
from clika_ref_cleanup.vectorize import IterationValues, align

Number: TypeAlias = "int | float"


@dataclass(frozen=True)
class LinearForm:
    """A value as ``factor * h + term``, elementwise over the state ``h``."""

    factor: IterationValues
    term: IterationValues


IDENTITY_FORM = LinearForm(IterationValues(1, varies=False), IterationValues(0, varies=False))


def is_linear_step(nodes: Sequence[Node], state: Value) -> bool:
    """Whether nodes in order, all of which depend on a state, are linear in it, element by element."""
    dependent = {state, *(v for node in nodes for v in node.outputs)}
    return state.type.dtype.is_floating_point and all(_is_linear(node, dependent, state) for node in nodes)


def _is_linear(node: Node, dependent: set[Value], state: Value) -> bool:
    flags = [v in dependent for v in node.inputs]
    if len(node.outputs) != 1 or node.output.type != state.type:
        return False
    if not all(v.type == state.type for v, flag in zip(node.inputs, flags, strict=True) if flag):
        return False
    match node.op_type:
        case "add" | "sub" | "neg":
            return True
        case "mul":
            return not all(flags)
        case "div":
            return not flags[1] and node.attrs["rounding_mode"] is None
        case "where" | "lerp":
            return not flags[0 if node.op_type == "where" else 2]
        case "addcmul":
            return not (flags[1] and flags[2])
        case _:
            return False


class LinearForms:
    """Computes the forms of values that are linear in a state, for all iterations.

    Args:
        build: adds the calls.
        state: the input of the body that holds the state.
        read: returns a value that does not depend on the state, for all iterations.
    """

    def __init__(self, build: Builder, state: Value, read: Callable[[Any], IterationValues]) -> None:
        self.build = build
        self.type = state.type
        self.read = read
        self.forms: dict[Value, LinearForm] = {state: IDENTITY_FORM}

    def add(self, node: Node) -> None:
        """Compute the form of the result of a node."""
        forms = [self._form(item) for item in node.inputs]
        self.forms[node.output] = self._combine(node, forms)

    def _form(self, item: Any) -> LinearForm:
        if isinstance(item, Value) and item in self.forms:
            return self.forms[item]
        return LinearForm(IterationValues(0, varies=False), self._cast(self.read(item)))

    def _cast(self, batch: IterationValues) -> IterationValues:
        if not isinstance(batch.item, Value) or batch.item.type.dtype == self.type.dtype:
            return batch
        type_ = TensorType(self.type.dtype, batch.item.type.shape)
        return replace(batch, item=self.build("to", batch.item, dtype=type_.dtype, types=[type_]))

    def _combine(self, node: Node, forms: Sequence[LinearForm]) -> LinearForm:
        match node.op_type:
            case "add" | "sub":
                sign = node.attrs["alpha"] * (1 if node.op_type == "add" else -1)
                return self._add(forms[0], self._scale(forms[1], IterationValues(sign, varies=False)))
            case "neg":
                return self._scale(forms[0], IterationValues(-1, varies=False))
            case "mul":
                state, other = forms if self._is_dependent(node.inputs[0]) else reversed(forms)
                return self._scale(state, other.term)
            case "div":
                return LinearForm(*(self._call("div", x, forms[1].term) for x in (forms[0].factor, forms[0].term)))
            case "where":
                condition, x, y = self.read(node.inputs[0]), forms[1], forms[2]
                pairs = ((x.factor, y.factor), (x.term, y.term))
                return LinearForm(*(self._choose(condition, a, b) for a, b in pairs))
            case "lerp":
                start, end, weight = forms[0], forms[1], forms[2].term
                return self._add(start, self._scale(self._add(end, self._negate(start)), weight))
            case _:
                x, first, second = forms
                product = (
                    self._scale(first, second.term)
                    if self._is_dependent(node.inputs[1])
                    else self._scale(second, first.term)
                )
                return self._add(x, self._scale(product, IterationValues(node.attrs["value"], varies=False)))

    def _is_dependent(self, item: Any) -> bool:
        return isinstance(item, Value) and item in self.forms

    def _negate(self, form: LinearForm) -> LinearForm:
        return self._scale(form, IterationValues(-1, varies=False))

    def _add(self, x: LinearForm, y: LinearForm) -> LinearForm:
        return LinearForm(self._call("add", x.factor, y.factor), self._call("add", x.term, y.term))

    def _scale(self, form: LinearForm, factor: IterationValues) -> LinearForm:
        return LinearForm(self._call("mul", form.factor, factor), self._call("mul", form.term, factor))

    def _choose(self, condition: IterationValues, a: IterationValues, b: IterationValues) -> IterationValues:
        return self._call("where", condition, *(self._to_value(x) for x in (a, b)))

    def _to_value(self, batch: IterationValues) -> IterationValues:
        """Return a number as a tensor, which has the dtype of the state."""
        if isinstance(batch.item, Value):
            return batch
        made = self.build("full", size=(), fill_value=float(batch.item), dtype=self.type.dtype)
        return IterationValues(made, varies=False)

    def _call(self, name: str, *operands: IterationValues) -> IterationValues:
        """Return the result of a call; one on numbers, or with a neutral number, adds no node."""
        known = NEUTRAL_CASES[name](*(batch.item for batch in operands)) if name in NEUTRAL_CASES else None
        if known is not None:
            return next((batch for batch in operands if batch.item is known), IterationValues(known, varies=False))
        items = [align(self.build, batch, self.type.rank) for batch in operands]
        if name in ("add", "mul") and not isinstance(items[0], Value):
            items.reverse()
        elif name == "div" and not isinstance(items[0], Value):
            name, items = "mul", [self.build("reciprocal", items[1], types=[items[1].type]), items[0]]
        shapes = [item.type.shape for item in items if isinstance(item, Value)]
        types = [TensorType(self.type.dtype, _broadcast(shapes))]
        return IterationValues(self.build(name, *items, types=types), any(batch.varies for batch in operands))


def _broadcast(shapes: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return the shape of the result of operands that broadcast, which the types of the body show."""
    columns = itertools.zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    return tuple(next((size for size in column if size != 1), 1) for column in columns)[::-1]


def _is_number(item: Any, *numbers: Number) -> bool:
    return isinstance(item, int | float) and (not numbers or item in numbers)


def _fold_sum(a: Any, b: Any) -> Any:
    if _is_number(a) and _is_number(b):
        return a + b
    return b if _is_number(a, 0) else a if _is_number(b, 0) else None


def _fold_product(a: Any, b: Any) -> Any:
    if _is_number(a) and _is_number(b):
        return a * b
    if _is_number(a, 0) or _is_number(b, 0):
        return 0
    return b if _is_number(a, 1) else a if _is_number(b, 1) else None


def _fold_quotient(a: Any, b: Any) -> Any:
    if _is_number(a) and _is_number(b):
        return a / b
    return 0 if _is_number(a, 0) else None


NEUTRAL_CASES: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": _fold_sum,
    "mul": _fold_product,
    "div": _fold_quotient,
}
"""The result of a call on numbers, or with a neutral one; None if a node must compute it."""
