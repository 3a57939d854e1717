"""Near misses with two similar parts: constants, numbers, calls, or dims of equal size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import permutations, product
from random import Random
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.ir import Node, Value
from clika_ref.core.operators import Operator
from clika_ref_conformance.cases import GraphCase
from clika_ref_conformance.drawing.eager_builder import LeafTensor
from clika_ref_conformance.drawing.motifs.call_generator import UNSAFE_OPERATORS, CallGenerator
from clika_ref_conformance.drawing.motifs.near_misses import Operators, find_sample_values
from clika_ref_conformance.drawing.motifs.rebuilding import CaseRebuilder, is_safe

CONSTANT_DIFFERENCE_COUNT = 4
"""Number of indices where two large constants may differ, one at a time."""

LARGE_CONSTANT_SIZE = 2000
"""Number of elements of a large constant: more than a pass that only samples elements reads."""


def add_similar_constants(case: GraphCase, _: Operators) -> Iterator[GraphCase | None]:
    """Add a constant similar to one of the motif's, or two large ones that differ in one element or zero sign."""
    originals = [t for v, t in CaseRebuilder.of(case).leaves if v.is_constant and t.numel()]
    large = torch.linspace(-1, 1, LARGE_CONSTANT_SIZE)
    pairs = [(large, _change_element(large, position)) for position in draw_indices(LARGE_CONSTANT_SIZE)]
    pairs += [(t, _change_element(t, position)) for t in originals for position in (0, -1)]
    pairs += [(torch.zeros(3), -torch.zeros(3)), (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))]
    for number, (one, other) in enumerate(pairs):
        new = CaseRebuilder.rebuild(case)
        if new is None:
            return
        names = (f"clika.similar_{number}_0", f"clika.similar_{number}_1")
        leaves = [
            new.builder.leaf(LeafTensor(t, constant=True, name=n)) for t, n in zip((one, other), names, strict=True)
        ]
        yield new.finish(f"similar constants {number}", leaves)


def draw_indices(count: int) -> list[int]:
    """Return random indices into a large constant, the same in each call."""
    return Random(count).sample(range(count), CONSTANT_DIFFERENCE_COUNT)  # noqa: S311 - no secret


def _change_element(tensor: Tensor, place: int) -> Tensor:
    flat = tensor.flatten().clone()
    flat[place] = ~flat[place] if tensor.dtype == torch.bool else flat[place] + 1
    return flat.reshape(tensor.shape)


SIMILAR_NUMBERS = ((0.0, -0.0), (1, 2), (1.0, 2.0), (0, 1))


def use_similar_literals(case: GraphCase, _: Operators) -> Iterator[GraphCase | None]:
    """Give all calls of one operator the same number, and the last of them a similar one."""
    kinds = {node.op_type: None for node in case.graph.nodes if any(isinstance(v, int | float) for v in node.inputs)}
    for kind, (one, other) in product(kinds, SIMILAR_NUMBERS):
        nodes = [node for node in case.graph.nodes if node.op_type == kind]
        new = CaseRebuilder.with_leaves(case)
        inputs: dict[Node, list[Any]] = {}
        for node in nodes:
            number = other if node is nodes[-1] and len(nodes) > 1 else one
            inputs[node] = [number if isinstance(v, int | float) else v for v in node.inputs]
        legal = all(new.take(node, inputs.get(node)) for node in case.graph.nodes)
        yield new.finish(f"{kind} with {one!r} and {other!r}") if legal else None


SIMILAR_CALL_COUNT = 24
"""Number of operators to add as a pair of calls that differ in one respect."""

ELEMENTWISE_ERROR_CLASSES = ("exact", "ulp")
"""Error classes of their operators; kernels with windows do not check that their attributes are consistent."""


def add_similar_calls(case: GraphCase, operators: Operators) -> Iterator[GraphCase | None]:
    """Add a drawn call twice, changing one attribute, a number or the operand order; repeat random calls unchanged."""
    random = Random(case.name)  # noqa: S311 - no secret
    simple = sorted(
        name
        for name, op in operators.items()
        if op.error.kind in ELEMENTWISE_ERROR_CLASSES and name not in UNSAFE_OPERATORS
    )
    for kind in random.sample(simple, min(SIMILAR_CALL_COUNT, len(simple))):
        new = CaseRebuilder.rebuild(case)
        if new is None:
            return
        node = CallGenerator(random, new.builder, constants=0.0).call(operators[kind])
        if node is None:
            continue
        twin = (
            new.builder.add_call(node.op, node.inputs, node.attrs)
            if node.is_random
            else _add_similar_call(random, new, node)
        )
        yield None if twin is None else new.finish(f"similar {kind}", [*node.outputs, *twin.outputs])


def _add_similar_call(random: Random, new: CaseRebuilder, node: Node) -> Node | None:
    numbers = [i for i, v in enumerate(node.inputs) if isinstance(v, int | float)]
    first, second, *_ = (*node.inputs, None, None)
    if isinstance(first, Value) and isinstance(second, Value) and random.random() < 1 / 2:
        swapped = new.builder.add_call(node.op, [second, first, *node.inputs[2:]], node.attrs)
        if swapped is not None:
            return swapped
    named = [(name, other) for name, value in node.attrs.items() for other in find_sample_values(node.op, name, value)]
    if numbers and (not named or random.random() < 1 / 2):
        operands = list(node.inputs)
        operands[random.choice(numbers)] = random.choice((0, 1, 2, 0.0, -0.0, 3.5))
        return new.builder.add_call(node.op, operands, node.attrs)
    random.shuffle(named)
    attempts = (new.builder.add_call(node.op, node.inputs, {**node.attrs, name: other}) for name, other in named)
    return next((twin for twin in attempts if twin is not None), None)


def divide_by_signed_zeros(case: GraphCase, operators: Operators) -> Iterator[GraphCase | None]:
    """Divide the first float of a motif by 0.0 and by -0.0, the only equal numbers with different effects."""
    new = CaseRebuilder.with_leaves(case)
    floats = [new.mapping[v] for v, t in new.leaves if t.is_floating_point()]
    divide: Operator | None = operators.get("div")
    if divide is not None and floats and new.add_nodes():
        quotients = [new.builder.add_call(divide, [floats[0], zero], divide.attributes) for zero in (0.0, -0.0)]
        yield new.finish("signed zeros", [q.output for q in quotients if q is not None])


def equalize_dims(case: GraphCase, _: Operators) -> Iterator[GraphCase | None]:
    """Give all dims one size, and all calls of one operator the same or permuted attributes."""
    for length, (name, change) in product((None, 2, 3), ATTRIBUTE_CHANGES.items()) if is_safe(case) else ():
        if length is None and name == "unchanged":
            continue
        new = CaseRebuilder.with_leaves(
            case, lambda _, leaf, length=length: replace(leaf, tensor=_resize_dims(leaf.tensor, length))
        )
        first: dict[str, Node] = {}
        legal = all(
            new.take(node, attrs=change(first.setdefault(node.op_type, node), node)) for node in case.graph.nodes
        )
        yield new.finish(f"dims of {length}, attributes {name}") if legal else None


def _rotate_orders(_: Node, node: Node) -> Mapping[str, Any]:
    """Return attributes with each order of three or more dims replaced by a rotation, which is not self-inverse."""
    return {name: (*range(1, len(v)), 0) if _is_permutation(v) else v for name, v in node.attrs.items()}


def _is_permutation(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) > 2  # shorter permutations are their own inverses
        and all(isinstance(d, int) for d in value)
        and sorted(d % len(value) for d in value) == list(range(len(value)))
    )


ATTRIBUTE_CHANGES: Mapping[str, Callable[[Node, Node], Mapping[str, Any]]] = {
    "unchanged": lambda _, node: node.attrs,
    "equal": lambda first, _: first.attrs,
    "rotated": _rotate_orders,
}
"""New attributes of a call, as a function of the first call of its operator and the call itself."""


def _resize_dims(tensor: Tensor, length: int | None) -> Tensor:
    for dim, size in enumerate(tensor.shape):
        if size and length is not None:
            tensor = tensor.index_select(dim, torch.arange(length) % size)
    return tensor


CAST_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
PRECISE_ELEMENTS = (0.1, -1.7, 1e-6, 70001.0, 2.0**31 - 1, -(2.0**24) - 1, 0.0, 3.0)
"""Elements, some of which each narrower dtype cannot represent."""


def cast_round_trips(case: GraphCase, _: Operators) -> Iterator[GraphCase | None]:
    """Cast between all pairs of dtypes and back, and integers on to int64, if the motif has two casts or more."""
    casts = [node for node in case.graph.nodes if set(map(type, node.attrs.values())) == {torch.dtype}]
    if len(casts) < MIN_CASTS or not is_safe(case):
        return
    trips = [(back, there, back) for there, back in product(CAST_DTYPES, CAST_DTYPES)]
    trips += [(first, there, torch.int64) for first, there in permutations(NARROW_INTEGER_DTYPES, 2)]
    for first, there, last in trips:
        new = CaseRebuilder.with_leaves(
            case, lambda _, leaf, first=first: replace(leaf, tensor=_fill_precise_elements(leaf.tensor, first))
        )
        targets = {id(node): there for node in casts[:-1]} | {id(casts[-1]): last}
        nodes = [(n, {name: targets[id(n)] for name in n.attrs} if n in casts else n.attrs) for n in case.graph.nodes]
        legal = all(new.take(node, attrs=attrs) for node, attrs in nodes)
        yield new.finish(f"{first} through {there} to {last}") if legal else None


MIN_CASTS = 2

NARROW_INTEGER_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32)
"""Integer dtypes that may lose a sign or high bits on the way to a wider dtype."""


def _fill_precise_elements(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    count = tensor.numel()
    values = torch.tensor(PRECISE_ELEMENTS, dtype=torch.float64).repeat(count // len(PRECISE_ELEMENTS) + 1)[:count]
    if not dtype.is_floating_point and dtype != torch.bool:
        values = values.round().clamp(torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return values.reshape(tensor.shape).to(dtype)
