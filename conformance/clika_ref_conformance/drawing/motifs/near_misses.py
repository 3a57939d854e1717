"""Near misses: graphs that differ from a motif in one respect, where passes often go wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from random import Random
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.execution import interpret
from clika_ref.core.ir import Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.samples import random_draw
from clika_ref_conformance.cases import Case, Run
from clika_ref_conformance.drawing.growing import Leaf
from clika_ref_conformance.drawing.motifs.drawing import UNCHECKED
from clika_ref_conformance.drawing.motifs.rebuilding import Rebuilding, conformance_step, conformance_tap, is_checked
from clika_ref_conformance.drawing.sampling import described

Operators = Mapping[str, Operator]
Makes = Callable[[Case, Operators], Iterator[Case | None]]
"""Yields the near misses of a motif; None for an illegal one."""


def _changed_calls(
    case: Case, changes: Callable[[Node], Iterator[tuple[str, Sequence[Any], Mapping[str, Any]]]]
) -> Iterator[Case | None]:
    """Yield the case with one call changed, for each node and each of its changes."""
    for position, node in enumerate(case.graph.nodes):
        for what, inputs, attrs in changes(node) if node.kind not in UNCHECKED else ():
            new = Rebuilding.of(case)
            new.take_leaves()
            legal = all(
                new.take(n, inputs, attrs) if n is node else new.take(n) for n in case.graph.nodes
            )  # fmt: skip
            yield new.done(f"{node.kind} {position}: {what}") if legal else None


def attribute_changed(case: Case, _: Operators) -> Iterator[Case | None]:
    """Give one attribute another value: a near one, or one from the operator's samples."""

    def changes(node: Node) -> Iterator[tuple[str, Sequence[Any], Mapping[str, Any]]]:
        for name, value in node.attrs.items():
            for other in other_values(node.op, name, value):
                yield f"{name}={other!r}", node.inputs, {**node.attrs, name: other}

    return _changed_calls(case, changes)


def attribute_of_another_sort(case: Case, _: Operators) -> Iterator[Case | None]:
    """Give one attribute a value of another sort from the operator's samples, one for each sort."""

    def changes(node: Node) -> Iterator[tuple[str, Sequence[Any], Mapping[str, Any]]]:
        for name, value in node.attrs.items():
            others = {sort_of(other): other for other in _sampled(node.op, name) if sort_of(other) != sort_of(value)}
            for other in [*others.values()][:MOST_SORTS]:
                yield f"{name}={other!r}", node.inputs, {**node.attrs, name: other}

    return _changed_calls(case, changes)


def sort_of(value: Any) -> Any:
    """Return the properties of an attribute that a pass may test.

    These are the length and order of a tuple, whether it has duplicates, and whether a number is small.
    """
    if isinstance(value, tuple):
        return len(value), value == tuple(sorted(value, key=repr)), len(set(value)) < len(value)
    return min(max(value, -1), 2) if isinstance(value, int) and not isinstance(value, bool) else repr(value)


def other_values(op: Operator, name: str, value: Any) -> list[Any]:
    """Return other values of an attribute: near ones, and those in the operator's samples."""
    return _unlike(value, (*_near(value), *_sampled(op, name)))[:MOST_VALUES]


def sampled_values(op: Operator, name: str, value: Any) -> list[Any]:
    """Return other values of an attribute from the operator's samples."""
    return _unlike(value, _sampled(op, name))


def _unlike(value: Any, others: Iterable[Any]) -> list[Any]:
    found = {repr(o): o for o in others if type(o) is not type(value) or o != value or isinstance(value, float)}
    found.pop(repr(value), None)
    return list(found.values())


MOST_VALUES = 7
"""Maximum number of other values per attribute."""

MOST_SORTS = 3
"""Maximum number of values of other sorts per attribute."""


def _near(value: Any) -> Iterator[Any]:
    match value:
        case bool():
            yield not value
        case int():
            yield from (value + 1, value - 1, -value)
        case float():
            yield from (value * 2, -value, value + 1)
        case tuple() if value and all(isinstance(v, int) for v in value):
            yield value[::-1]
            yield value[1:] + value[:1]
            yield (value[0] + 1, *value[1:])
            yield (*value[:-1], value[-1] - 1)
            if len(value) > 1:
                yield (value[0] + 1, *value[1:-1], value[-1] - 1)
        case _:
            return


def _sampled(op: Operator, name: str) -> Iterator[Any]:
    yield from (attrs[name] for attrs in sampled_attrs(op))


SAMPLED = 8
"""Number of sampled calls that provide attribute values of an operator."""


@cache
def sampled_attrs(op: Operator) -> list[Mapping[str, Any]]:
    """Return the attributes of some sampled calls of an operator."""
    return [described(op, random_draw(Random(n))).attrs for n in range(SAMPLED if op.sampler else 0)]  # noqa: S311 - no secret


def operands_swapped(case: Case, _: Operators) -> Iterator[Case | None]:
    """Swap the first two operands of a call, or use the first for both."""

    def changes(node: Node) -> Iterator[tuple[str, Sequence[Any], Mapping[str, Any]]]:
        if len(node.inputs) > 1:
            first, second, *rest = node.inputs
            yield "swapped", [second, first, *rest], node.attrs
            yield "same operand twice", [first, first, *rest], node.attrs

    return _changed_calls(case, changes)


NUMBERS = (0, 1, -1, 2, 0.0, -0.0, 1.0, 0.5, math.nan, math.inf, True)


def scalar_changed(case: Case, _: Operators) -> Iterator[Case | None]:
    """Replace a number by another type or value, or by a tensor of rank 0 or 1, and a tensor by a number."""

    def changes(node: Node) -> Iterator[tuple[str, Sequence[Any], Mapping[str, Any]]]:
        for i, item in enumerate(node.inputs):
            for other in _scalars(item):
                shown = f"tensor of rank {other.tensor.ndim}" if isinstance(other, Leaf) else repr(other)
                yield f"operand {i} is {shown}", [*node.inputs[:i], other, *node.inputs[i + 1 :]], node.attrs

    return _changed_calls(case, changes)


def _scalars(item: Any) -> Iterator[Any]:
    if isinstance(item, Value):
        if item.data is not None and item.data.numel() == 1:
            yield item.data.item()
    elif isinstance(item, int | float):
        yield from (n for n in NUMBERS if repr(n) != repr(item))
        for constant in (True, False):
            yield Leaf(torch.tensor(item), constant)
            yield Leaf(torch.tensor([item]), constant)


def read_elsewhere(case: Case, _: Operators) -> Iterator[Case | None]:
    """Add another reader of a value inside the motif: a node, or an output before or after the others."""
    inner = [v for node in case.graph.nodes for v in node.outputs]
    leaves = [v for v, _ in Rebuilding.of(case).leaves]
    for value in (*inner, *leaves):
        new = Rebuilding.of(case)
        new.take_leaves()
        if not new.take_nodes():
            return
        tap = new.growth.place(conformance_tap, [new.mapping[value]], {})
        yield new.done(f"%{value.name} is read elsewhere", tap.outputs, tapped=False) if tap else None
        for first in (True, False):
            new = Rebuilding.of(case)
            new.take_leaves()
            if new.take_nodes():
                yield new.done(f"%{value.name} is an output too", [new.mapping[value]], first=first, tapped=False)


def repeated(case: Case, _: Operators) -> Iterator[Case | None]:
    """Repeat the motif: on the same inputs, on others with shared or equal constants, and on its own result."""
    for name, share_inputs, share_constants in (
        ("twice on one input", True, True),
        ("twice, constants shared", False, True),
        ("twice, constants equal", True, False),
    ):
        new = Rebuilding.of(case)
        new.take_leaves()
        if new.take_nodes():
            before = [new.now(v) for v in case.graph.outputs]
            for value, tensor in new.leaves:
                if not (share_constants if value.is_constant else share_inputs):
                    other = tensor.clone() if value.is_constant else tensor.flip(0) if tensor.ndim else tensor
                    new.mapping[value] = new.growth.leaf(Leaf(other, value.is_constant, name=f"{value.name}_again"))
            yield new.done(name, before, first=True) if new.take_nodes() else None
    new = Rebuilding.of(case)
    new.take_leaves()
    if case.graph.inputs and new.take_nodes():
        results = [new.now(v) for v in case.graph.outputs]
        same = [v for v in case.graph.inputs if v.type == results[0].type]
        if same:
            new.mapping[same[0]] = results[0]
            yield new.done("on its own result") if new.take_nodes() else None


def outputs_changed(case: Case, _: Operators) -> Iterator[Case | None]:
    """Duplicate, drop or reorder outputs, return inputs and constants, or add an unused input."""
    leaves = [v for v, _ in Rebuilding.of(case).leaves]
    own = case.graph.outputs
    ways: list[tuple[str, Sequence[Value], bool]] = [("every output twice", own, False), ("leaves too", leaves, True)]
    for name, extra, first in ways:
        new = Rebuilding.of(case)
        new.take_leaves()
        if new.take_nodes():
            yield new.done(name, [new.now(v) for v in extra], first=first, tapped=False)
    for position, value in enumerate(own if len(own) > 1 else ()):
        new = Rebuilding.of(case)
        new.take_leaves()
        if new.take_nodes():
            yield new.growth.finish(f"output {position} alone", [new.now(value)])
    new = Rebuilding.of(case)
    new.growth.leaf(Leaf(torch.zeros(2, 3), name="unused"))
    new.take_leaves()
    if new.take_nodes():
        tap = new.growth.place(conformance_tap, [new.now(own[-1])], {})
        yield new.done("unused input, and not the last node", tap.outputs, tapped=False) if tap else None


def leaves_changed(case: Case, _: Operators) -> Iterator[Case | None]:
    """Turn constants into inputs and inputs into constants, compute a leaf, or overwrite it during the call."""
    for value, tensor in Rebuilding.of(case).leaves:
        yield _with_leaf(case, value, Leaf(tensor, not value.is_constant, name="other_role"))
        yield _with_leaf(case, value, Leaf(tensor, constant=True, name="clika.lifted_tensor_9"))
        new = Rebuilding.of(case)
        new.take_leaves()
        tap = new.growth.place(conformance_tap, [new.mapping[value]], {})
        if tap is not None:
            new.mapping[value] = tap.output
            if new.take_nodes():
                yield new.done(f"%{value.name} is computed")
            new = Rebuilding.of(case)
            new.take_leaves()
            plain = new.mapping[value]
            step = new.growth.place(conformance_step, [plain], {})
            if step is not None and new.take_nodes():
                made = new.done(f"%{value.name} is overwritten")
                made.graph.set_state(plain.name, step.output)
                yield made


def _with_leaf(case: Case, value: Value, leaf: Leaf) -> Case | None:
    new = Rebuilding.of(case)
    new.take_leaves(lambda v, old: leaf if v is value else old)
    return new.done(f"%{value.name} is {leaf.name}") if new.take_nodes() else None


DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.bool)


OF_DTYPES = 4
"""Number of dtypes tried per motif; passes test classes of dtypes, and there are many motifs."""


def dtype_changed(case: Case, _: Operators) -> Iterator[Case | None]:
    """Change the dtype of all tensors of one dtype, or of one tensor; each motif gets some of the dtypes."""
    leaves = Rebuilding.of(case).leaves
    chosen = [[v for v, _ in leaves if v.type.dtype == d] for d in {t.dtype: None for _, t in leaves}]
    chosen += [[v] for v, _ in leaves if len(leaves) > 1]
    dtypes = Random(case.name).sample(DTYPES, OF_DTYPES)  # noqa: S311 - no secret
    for dtype, values in product(dtypes, chosen) if is_checked(case) else ():
        new = Rebuilding.of(case)
        new.take_leaves(partial(_in_dtype, values, dtype))
        yield new.done(f"{dtype} at {[v.name for v in values]}") if new.take_nodes() else None


def _in_dtype(chosen: Sequence[Value], dtype: torch.dtype, value: Value, leaf: Leaf) -> Leaf:
    return replace(leaf, tensor=leaf.tensor.to(dtype)) if value in chosen else leaf


SPECIALS = (math.nan, math.inf, -math.inf, -0.0)

LARGE = (2**24 + 1, 2**53 + 1)
"""Integers that float32 and float64 round."""


def special_elements(case: Case, _: Operators) -> Iterator[Case | None]:
    """Set the first and last element of float inputs to NaN, Inf and -0.0, and of integer ones to dtype bounds.

    A second graph turns constants into inputs, and all leaves into floats if there are none, as a pass may treat any
    value like weights or integers.
    """
    for one in (case, *_of_float_inputs(case)):
        accepted = [run for run in _special_runs(one) if _accepts(one, run)]
        if accepted:
            yield Case("special elements", one.graph, accepted)


def _of_float_inputs(case: Case) -> Iterator[Case]:
    new = Rebuilding.of(case)
    has_floats = any(tensor.is_floating_point() for _, tensor in new.leaves)
    if has_floats and not any(v.is_constant for v, _ in new.leaves):
        return
    new.take_leaves(lambda _, leaf: Leaf(leaf.tensor if has_floats else leaf.tensor.float(), name=leaf.name))
    if new.take_nodes():
        yield new.done("inputs of floats")


def _special_runs(case: Case) -> list[Run]:
    inputs = [t for t in case.runs[0].inputs if t.numel()]
    runs = [
        Run(
            f"{special} {'first' if place == 0 else 'last'}",
            tuple(_put(t, special, place) for t in case.runs[0].inputs),
        )
        for special in SPECIALS
        for place in (0, -1)
        if any(t.is_floating_point() for t in inputs)
    ]
    runs += [
        Run(f"large integers {turn}", tuple(_put_large(t, turn) for t in case.runs[0].inputs))
        for turn in range(4)
        if any(t.dtype in INTEGERS for t in inputs) and is_checked(case)
    ]
    return runs


def large_constants(case: Case, _: Operators) -> Iterator[Case | None]:
    """Scale a constant close to its dtype's maximum, and the leaves next to it so low that no sum overflows."""
    leaves = Rebuilding.of(case).leaves
    floats = {value for value, tensor in leaves if _has_float_elements(tensor)}
    for value in (v for v, _ in leaves if v.is_constant and v in floats):
        beside = {v for use in value.uses for v in _values_of(use.user)} - {value}
        if beside and beside <= floats:
            new = Rebuilding.of(case)
            new.take_leaves(partial(_scaled, value, beside))
            yield new.done(f"%{value.name} is large") if new.take_nodes() else None


def _values_of(user: Any) -> list[Value]:
    return [item for item in user.inputs if isinstance(item, Value)] if isinstance(user, Node) else []


ALMOST = 0.9
"""Share of the dtype's largest number."""


def _scaled(large: Value, small: Container[Value], value: Value, leaf: Leaf) -> Leaf:
    if value is not large and value not in small:
        return leaf
    tensor, most = leaf.tensor, torch.finfo(leaf.tensor.dtype).max
    scaled = torch.full_like(tensor, ALMOST * most).copysign(tensor) if value is large else tensor * most**-0.25
    return replace(leaf, tensor=scaled)


def _has_float_elements(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0


INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def _accepts(case: Case, run: Run) -> bool:
    """Return whether eager accepts the elements; a large integer may be an invalid index."""
    try:
        with torch.no_grad():
            interpret(case.graph, run.inputs)
    except Exception:  # noqa: BLE001 - an input is illegal if eager rejects it
        return False
    return True


def _put(tensor: Tensor, special: float, place: int) -> Tensor:
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    flat = tensor.flatten().clone()
    flat[place] = special
    return flat.reshape(tensor.shape)


def _put_large(tensor: Tensor, turn: int) -> Tensor:
    if tensor.dtype not in INTEGERS or not tensor.numel():
        return tensor
    ends = torch.iinfo(tensor.dtype)
    large = [n for n in (*LARGE, ends.max, ends.min) if ends.min <= n <= ends.max]
    flat = tensor.flatten().clone()
    flat[-1] = large[turn % len(large)]
    return flat.reshape(tensor.shape)
