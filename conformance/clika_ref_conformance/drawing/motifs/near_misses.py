"""Near misses: graphs that differ from a motif in one respect, where passes often go wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial, wraps
from itertools import product
from random import Random
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.execution import interpret
from clika_ref.core.ir import Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.samples import random_draw
from clika_ref_conformance.cases import CaseRun, GraphCase
from clika_ref_conformance.drawing.eager_builder import LeafTensor
from clika_ref_conformance.drawing.motifs.call_generator import UNSAFE_OPERATORS
from clika_ref_conformance.drawing.motifs.rebuilding import CaseRebuilder, conformance_step, conformance_tap, is_safe
from clika_ref_conformance.drawing.sampling import draw_call_of_any_dtype

Operators = Mapping[str, Operator]
NearMissMaker = Callable[[GraphCase, Operators], Iterator[GraphCase | None]]
"""Yields the near misses of a motif; None for an illegal one."""


CallChanges = Iterator[tuple[str, Sequence[Any], Mapping[str, Any]]]
"""Changes of one call: a description, the new operands, and the new attributes."""


def _of_each_call(changes: Callable[[Node], CallChanges]) -> NearMissMaker:
    """Return the function that yields a case with one call changed, for each node and each of its changes."""

    @wraps(changes)
    def change_calls(case: GraphCase, _: Operators) -> Iterator[GraphCase | None]:
        for position, node in enumerate(case.graph.nodes):
            for description, inputs, attrs in changes(node) if node.op_type not in UNSAFE_OPERATORS else ():
                new = CaseRebuilder.with_leaves(case)
                legal = all(new.take(n, inputs, attrs) if n is node else new.take(n) for n in case.graph.nodes)
                yield new.finish(f"{node.op_type} {position}: {description}") if legal else None

    return change_calls


@_of_each_call
def change_attribute(node: Node) -> CallChanges:
    """Give one attribute another value: a near one, or one from the operator's samples."""
    for name, value in node.attrs.items():
        others = (*_make_near_values(value), *_sample_attribute(node.op, name))
        for other in _drop_equal_values(value, others)[:MAX_OTHER_VALUES]:
            yield f"{name}={other!r}", node.inputs, {**node.attrs, name: other}


@_of_each_call
def change_attribute_sort(node: Node) -> CallChanges:
    """Give one attribute a value of another sort from the operator's samples, one for each sort."""
    for name, value in node.attrs.items():
        others = {classify_attribute(other): other for other in _sample_attribute(node.op, name)}
        others.pop(classify_attribute(value), None)
        for other in [*others.values()][:MAX_OTHER_SORTS]:
            yield f"{name}={other!r}", node.inputs, {**node.attrs, name: other}


def classify_attribute(value: Any) -> Any:
    """Return the properties of an attribute that a pass may test.

    These are the length and order of a tuple, whether it has duplicates, and whether a number is small.
    """
    if isinstance(value, tuple):
        return len(value), value == tuple(sorted(value, key=repr)), len(set(value)) < len(value)
    return min(max(value, -1), 2) if isinstance(value, int) and not isinstance(value, bool) else repr(value)


def find_sample_values(op: Operator, name: str, value: Any) -> list[Any]:
    """Return other values of an attribute from the operator's samples."""
    return _drop_equal_values(value, _sample_attribute(op, name))


def _drop_equal_values(value: Any, others: Iterable[Any]) -> list[Any]:
    found = {repr(o): o for o in others if type(o) is not type(value) or o != value or isinstance(value, float)}
    found.pop(repr(value), None)
    return list(found.values())


MAX_OTHER_VALUES = 7
"""Maximum number of other values per attribute."""

MAX_OTHER_SORTS = 3
"""Maximum number of values of other sorts per attribute."""


def _make_near_values(value: Any) -> Iterator[Any]:
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


def _sample_attribute(op: Operator, name: str) -> Iterator[Any]:
    yield from (attrs[name] for attrs in sample_attributes(op))


ATTRIBUTE_SAMPLE_COUNT = 8
"""Number of sampled calls that provide attribute values of an operator."""


@cache
def sample_attributes(op: Operator) -> list[Mapping[str, Any]]:
    """Return the attributes of some sampled calls of an operator."""
    return [
        draw_call_of_any_dtype(op, random_draw(Random(n))).attrs  # noqa: S311 - no secret
        for n in range(ATTRIBUTE_SAMPLE_COUNT if op.sampler else 0)
    ]


@_of_each_call
def swap_operands(node: Node) -> CallChanges:
    """Swap the first two operands of a call, or use the first for both."""
    if len(node.inputs) > 1:
        first, second, *rest = node.inputs
        yield "swapped", [second, first, *rest], node.attrs
        yield "same operand twice", [first, first, *rest], node.attrs


REPLACEMENT_NUMBERS = (0, 1, -1, 2, 0.0, -0.0, 1.0, 0.5, math.nan, math.inf, True)


@_of_each_call
def change_scalar(node: Node) -> CallChanges:
    """Replace a number by another type or value, or by a tensor of rank 0 or 1, and a tensor by a number."""
    for i, item in enumerate(node.inputs):
        for other in _make_replacement_scalars(item):
            shown = f"tensor of rank {other.tensor.ndim}" if isinstance(other, LeafTensor) else repr(other)
            yield f"operand {i} is {shown}", [*node.inputs[:i], other, *node.inputs[i + 1 :]], node.attrs


def _make_replacement_scalars(item: Any) -> Iterator[Any]:
    if isinstance(item, Value):
        if item.data is not None and item.data.numel() == 1:
            yield item.data.item()
    elif isinstance(item, int | float):
        yield from (n for n in REPLACEMENT_NUMBERS if repr(n) != repr(item))
        for constant in (True, False):
            yield LeafTensor(torch.tensor(item), constant)
            yield LeafTensor(torch.tensor([item]), constant)


def add_reader(case: GraphCase, _: Operators) -> Iterator[GraphCase | None]:
    """Add another reader of a value inside the motif: a node, or an output before or after the others."""
    inner = [v for node in case.graph.nodes for v in node.outputs]
    leaves = [v for v, _ in CaseRebuilder.of(case).leaves]
    for value in (*inner, *leaves):
        new = CaseRebuilder.rebuild(case)
        if new is None:
            return
        tap = new.builder.add_call(conformance_tap, [new.mapping[value]], {})
        yield new.finish(f"%{value.name} has another reader", tap.outputs, tapped=False) if tap else None
        for first in (True, False):
            new = CaseRebuilder.rebuild(case)
            if new is not None:
                yield new.finish(f"%{value.name} is also an output", [new.mapping[value]], first=first, tapped=False)


def repeat_motif(case: GraphCase, _: Operators) -> Iterator[GraphCase | None]:
    """Repeat the motif: on the same inputs, on others with shared or equal constants, and on its own result."""
    for name, share_inputs, share_constants in (
        ("repeated on one input", True, True),
        ("repeated, shared constants", False, True),
        ("repeated, equal constants", True, False),
    ):
        new = CaseRebuilder.rebuild(case)
        if new is not None:
            before = [new.map_operand(v) for v in case.graph.outputs]
            for value, tensor in new.leaves:
                if not (share_constants if value.is_constant else share_inputs):
                    other = tensor.clone() if value.is_constant else tensor.flip(0) if tensor.ndim else tensor
                    new.mapping[value] = new.builder.leaf(
                        LeafTensor(other, value.is_constant, name=f"{value.name}_again")
                    )
            yield new.finish(name, before, first=True) if new.add_nodes() else None
    new = CaseRebuilder.with_leaves(case)
    if case.graph.inputs and new.add_nodes():
        results = [new.map_operand(v) for v in case.graph.outputs]
        same = [v for v in case.graph.inputs if v.type == results[0].type]
        if same:
            new.mapping[same[0]] = results[0]
            yield new.finish("repeated on its own result") if new.add_nodes() else None


def change_outputs(case: GraphCase, _: Operators) -> Iterator[GraphCase | None]:
    """Duplicate, drop or reorder outputs, return inputs and constants, or add an unused input."""
    leaves = [v for v, _ in CaseRebuilder.of(case).leaves]
    own = case.graph.outputs
    ways: list[tuple[str, Sequence[Value], bool]] = [
        ("duplicated outputs", own, False),
        ("leaves as outputs", leaves, True),
    ]
    for name, extra, first in ways:
        new = CaseRebuilder.rebuild(case)
        if new is not None:
            yield new.finish(name, [new.map_operand(v) for v in extra], first=first, tapped=False)
    for position, value in enumerate(own if len(own) > 1 else ()):
        new = CaseRebuilder.rebuild(case)
        if new is not None:
            yield new.builder.finish(f"only output {position}", [new.map_operand(value)])
    new = CaseRebuilder.of(case)
    new.builder.leaf(LeafTensor(torch.zeros(2, 3), name="unused"))
    new.add_leaves()
    if new.add_nodes():
        tap = new.builder.add_call(conformance_tap, [new.map_operand(own[-1])], {})
        yield new.finish("unused input, and not the last node", tap.outputs, tapped=False) if tap else None


def change_leaves(case: GraphCase, _: Operators) -> Iterator[GraphCase | None]:
    """Turn constants into inputs and inputs into constants, compute a leaf, or overwrite it during the call."""
    for value, tensor in CaseRebuilder.of(case).leaves:
        yield _replace_leaf(case, value, LeafTensor(tensor, not value.is_constant, name="other_role"))
        yield _replace_leaf(case, value, LeafTensor(tensor, constant=True, name="clika.lifted_tensor_9"))
        new = CaseRebuilder.with_leaves(case)
        tap = new.builder.add_call(conformance_tap, [new.mapping[value]], {})
        if tap is not None:
            new.mapping[value] = tap.output
            if new.add_nodes():
                yield new.finish(f"%{value.name} is computed")
            new = CaseRebuilder.with_leaves(case)
            plain = new.mapping[value]
            step = new.builder.add_call(conformance_step, [plain], {})
            if step is not None and new.add_nodes():
                made = new.finish(f"%{value.name} is overwritten")
                made.graph.set_state(plain.name, step.output)
                yield made


def _replace_leaf(case: GraphCase, value: Value, leaf: LeafTensor) -> GraphCase | None:
    new = CaseRebuilder.rebuild(case, lambda v, old: leaf if v is value else old)
    return None if new is None else new.finish(f"%{value.name} is {leaf.name}")


OTHER_DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.bool)


DTYPES_PER_MOTIF = 4
"""Number of dtypes tried per motif; passes test classes of dtypes, and there are many motifs."""


def change_dtype(case: GraphCase, _: Operators) -> Iterator[GraphCase | None]:
    """Change the dtype of all tensors of one dtype, or of one tensor; each motif gets some of the dtypes."""
    leaves = CaseRebuilder.of(case).leaves
    chosen = [[v for v, _ in leaves if v.type.dtype == d] for d in {t.dtype: None for _, t in leaves}]
    chosen += [[v] for v, _ in leaves if len(leaves) > 1]
    dtypes = Random(case.name).sample(OTHER_DTYPES, DTYPES_PER_MOTIF)  # noqa: S311 - no secret
    for dtype, values in product(dtypes, chosen) if is_safe(case) else ():
        new = CaseRebuilder.rebuild(case, partial(_cast_leaf, values, dtype))
        yield None if new is None else new.finish(f"{dtype} at {[v.name for v in values]}")


def _cast_leaf(chosen: Sequence[Value], dtype: torch.dtype, value: Value, leaf: LeafTensor) -> LeafTensor:
    return replace(leaf, tensor=leaf.tensor.to(dtype)) if value in chosen else leaf


SPECIAL_VALUES = (math.nan, math.inf, -math.inf, -0.0)

LARGE_INTEGERS = (2**24 + 1, 2**53 + 1)
"""Integers that float32 and float64 round."""


def insert_special_elements(case: GraphCase, _: Operators) -> Iterator[GraphCase | None]:
    """Set the first and last element of float inputs to NaN, Inf and -0.0, and of integer ones to dtype bounds.

    A second graph turns constants into inputs, and all leaves into floats if there are none, as a pass may treat any
    value like weights or integers.
    """
    for one in (case, *_make_float_inputs(case)):
        accepted = [run for run in _make_special_runs(one) if _is_accepted(one, run)]
        if accepted:
            yield GraphCase("special elements", one.graph, accepted)


def _make_float_inputs(case: GraphCase) -> Iterator[GraphCase]:
    new = CaseRebuilder.of(case)
    has_floats = any(tensor.is_floating_point() for _, tensor in new.leaves)
    if has_floats and not any(v.is_constant for v, _ in new.leaves):
        return
    new.add_leaves(lambda _, leaf: LeafTensor(leaf.tensor if has_floats else leaf.tensor.float(), name=leaf.name))
    if new.add_nodes():
        yield new.finish("float inputs")


def _make_special_runs(case: GraphCase) -> list[CaseRun]:
    inputs = [t for t in case.runs[0].inputs if t.numel()]
    runs = [
        CaseRun(
            f"{special} {'first' if place == 0 else 'last'}",
            tuple(_set_element(t, special, place) for t in case.runs[0].inputs),
        )
        for special in SPECIAL_VALUES
        for place in (0, -1)
        if any(t.is_floating_point() for t in inputs)
    ]
    runs += [
        CaseRun(f"large integers {turn}", tuple(_set_large_element(t, turn) for t in case.runs[0].inputs))
        for turn in range(4)
        if any(t.dtype in INTEGER_DTYPES for t in inputs) and is_safe(case)
    ]
    return runs


def enlarge_constants(case: GraphCase, _: Operators) -> Iterator[GraphCase | None]:
    """Scale a constant close to its dtype's maximum, and the leaves next to it so low that no sum overflows."""
    leaves = CaseRebuilder.of(case).leaves
    floats = {value for value, tensor in leaves if tensor.is_floating_point() and tensor.numel()}
    for value in (v for v, _ in leaves if v.is_constant and v in floats):
        readers = [use.user for use in value.uses if isinstance(use.user, Node)]
        beside = {v for node in readers for v in node.inputs if isinstance(v, Value)} - {value}
        if beside and beside <= floats:
            new = CaseRebuilder.rebuild(case, partial(_scale_leaf, value, beside))
            yield None if new is None else new.finish(f"%{value.name} is large")


DTYPE_MAX_SHARE = 0.9
"""Share of the dtype's largest number."""


def _scale_leaf(large: Value, small: Container[Value], value: Value, leaf: LeafTensor) -> LeafTensor:
    if value is not large and value not in small:
        return leaf
    tensor, most = leaf.tensor, torch.finfo(leaf.tensor.dtype).max
    scaled = (
        torch.full_like(tensor, DTYPE_MAX_SHARE * most).copysign(tensor) if value is large else tensor * most**-0.25
    )
    return replace(leaf, tensor=scaled)


INTEGER_DTYPES = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def _is_accepted(case: GraphCase, run: CaseRun) -> bool:
    """Return whether eager accepts the elements; a large integer may be an invalid index."""
    try:
        with torch.no_grad():
            interpret(case.graph, run.inputs)
    except Exception:  # noqa: BLE001 - an input is illegal if eager rejects it
        return False
    return True


def _set_element(tensor: Tensor, special: float, place: int) -> Tensor:
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    flat = tensor.flatten().clone()
    flat[place] = special
    return flat.reshape(tensor.shape)


def _set_large_element(tensor: Tensor, turn: int) -> Tensor:
    if tensor.dtype not in INTEGER_DTYPES or not tensor.numel():
        return tensor
    ends = torch.iinfo(tensor.dtype)
    large = [n for n in (*LARGE_INTEGERS, ends.max, ends.min) if ends.min <= n <= ends.max]
    flat = tensor.flatten().clone()
    flat[-1] = large[turn % len(large)]
    return flat.reshape(tensor.shape)
