"""Near misses that hinge on two things being alike: constants, numbers, calls, and sides of one length."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from random import Random
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.ir import Node
from clika_ref.core.operators import Operator
from clika_ref_conformance.cases import Case
from clika_ref_conformance.drawing.growing import UNCHECKED, Drawing, Leaf
from clika_ref_conformance.drawing.near_misses import Operators, Rebuilding, conformance_tap, other_values

ALIKE = 4
"""Places at which two large constants differ, one at a time."""

MANY = 2000
"""Elements of a large constant: more than a pass that takes samples reads."""


def constants_alike(case: Case, operators: Operators) -> Iterator[Case | None]:
    """Add a constant like one of the motif's, or two large ones, which differ in one element or in the sign of zero."""
    originals = [t for v, t in Rebuilding.of(case, operators).leaves if v.is_constant and t.numel()]
    large = torch.linspace(-1, 1, MANY)
    pairs = [(large, _another(large, place)) for place in random_places(MANY)]
    pairs += [(t, _another(t, place)) for t in originals for place in (0, -1)]
    pairs += [(torch.zeros(3), -torch.zeros(3)), (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))]
    for number, (one, other) in enumerate(pairs):
        new = Rebuilding.of(case, operators)
        new.take_leaves()
        if not new.take_nodes():
            return
        names = (f"clika.alike_{number}", f"clika.alike_{number}_again")
        leaves = [new.growth.leaf(Leaf(t, constant=True, name=n)) for t, n in zip((one, other), names, strict=True)]
        taps = [new.growth.place(conformance_tap, [leaf], {}) for leaf in leaves]
        yield new.done(f"constants alike {number}", [tap.output for tap in taps if tap is not None])


def random_places(count: int) -> list[int]:
    """Return places in a large constant, the same each time."""
    return Random(count).sample(range(count), ALIKE)  # noqa: S311 - no secret


def _another(tensor: Tensor, place: int) -> Tensor:
    flat = tensor.flatten().clone()
    flat[place] = ~flat[place] if tensor.dtype == torch.bool else flat[place] + 1
    return flat.reshape(tensor.shape)


PAIRS = ((0.0, -0.0), (1, 2), (1.0, 2.0), (0, 1))


def literals_alike(case: Case, operators: Operators) -> Iterator[Case | None]:
    """Give all calls of one operator one number, and the last of them one that is like it."""
    kinds = {node.kind: None for node in case.graph.nodes if any(isinstance(v, int | float) for v in node.inputs)}
    for kind, (one, other) in product(kinds, PAIRS):
        nodes = [node for node in case.graph.nodes if node.kind == kind]
        new = Rebuilding.of(case, operators)
        new.take_leaves()
        numbers = {id(node): other if node is nodes[-1] and len(nodes) > 1 else one for node in nodes}
        legal = all(new.take(n, _with_number(n, numbers[id(n)]) if n in nodes else None) for n in case.graph.nodes)
        yield new.done(f"{kind} by {one!r} and {other!r}") if legal else None


def _with_number(node: Node, number: float) -> list[Any]:
    return [number if isinstance(v, int | float) else v for v in node.inputs]


CALLS = 24
"""Operators of which the same call is placed twice but for one thing."""


def calls_alike(case: Case, operators: Operators) -> Iterator[Case | None]:
    """Add a drawn call twice, but for one attribute or number; the motif says which are drawn."""
    random = Random(case.name)  # noqa: S311 - no secret
    for kind in random.sample(sorted(set(operators) - UNCHECKED), CALLS):
        new = Rebuilding.of(case, operators)
        new.take_leaves()
        if not new.take_nodes():
            return
        node = Drawing(random, new.growth, constants=0.0).call(operators[kind])
        if node is None or node.is_random:
            continue
        twin = _twin(random, new, node)
        yield None if twin is None else new.done(f"{kind} alike", [*node.outputs, *twin.outputs])


def _twin(random: Random, new: Rebuilding, node: Node) -> Node | None:
    numbers = [i for i, v in enumerate(node.inputs) if isinstance(v, int | float)]
    named = [(name, other) for name, value in node.attrs.items() for other in other_values(node.op, name, value)]
    if numbers and (not named or random.random() < 1 / 2):
        operands = list(node.inputs)
        operands[random.choice(numbers)] = random.choice((0, 1, 2, 0.0, -0.0, 3.5))
        return new.growth.place(node.op, operands, node.attrs)
    random.shuffle(named)
    attempts = (new.growth.place(node.op, node.inputs, {**node.attrs, name: other}) for name, other in named)
    return next((twin for twin in attempts if twin is not None), None)


def numbers_alike(case: Case, operators: Operators) -> Iterator[Case | None]:
    """Divide the first float of a motif by 0.0 and by -0.0: of all numbers that are equal these two are not alike."""
    new = Rebuilding.of(case, operators)
    new.take_leaves()
    floats = [new.mapping[v] for v, t in new.leaves if t.is_floating_point()]
    divide: Operator | None = operators.get("div")
    if divide is not None and floats and new.take_nodes():
        quotients = [new.growth.place(divide, [floats[0], zero], divide.attributes) for zero in (0.0, -0.0)]
        yield new.done("zeros alike", [q.output for q in quotients if q is not None])


def sides_alike(case: Case, operators: Operators) -> Iterator[Case | None]:
    """Give all sides that are longer than 1 one length."""
    for length in (2, 3):
        new = Rebuilding.of(case, operators)
        new.take_leaves(lambda _, leaf, length=length: Leaf(_cut(leaf.tensor, length), leaf.constant, name=leaf.name))
        yield new.done(f"sides of {length}") if new.take_nodes() else None


def _cut(tensor: Tensor, length: int) -> Tensor:
    for dim, side in enumerate(tensor.shape):
        if side > 1:
            tensor = tensor.index_select(dim, torch.arange(length) % side)
    return tensor
