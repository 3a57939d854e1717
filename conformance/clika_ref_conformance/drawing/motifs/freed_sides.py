"""Near misses with dynamic dims: a dim of an input becomes symbolic, and the case runs at several sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.ir import Value
from clika_ref.core.symbols import Side, Symbol, named
from clika_ref.core.types import TensorType
from clika_ref_conformance.cases import Case, Run
from clika_ref_conformance.drawing.growing import Leaf
from clika_ref_conformance.drawing.motifs.near_misses import Operators
from clika_ref_conformance.drawing.motifs.rebuilding import Rebuilding, is_checked

SYMBOL = "n"


def sides_freed(case: Case, _: Operators) -> Iterator[Case | None]:
    """Make one input dim dynamic, or all input dims of its size, and also equal attributes where legal."""
    for value in case.graph.inputs if is_checked(case) else ():
        for dim in range(value.type.rank):
            for alike in (False, True):
                for in_attributes in (True, False):
                    made = _freed(case, Side(value.name, dim), alike=alike, in_attributes=in_attributes)
                    if made is not None:
                        yield made
                        break


def _freed(case: Case, side: Side, *, alike: bool, in_attributes: bool) -> Case | None:
    """Return the case with an input dim made dynamic, or None if its types would only hold for one size."""
    size = next(int(v.type.shape[side.dim or 0]) for v in case.graph.inputs if v.name == side.name)
    places = {
        (v.name, d)
        for v in case.graph.inputs
        for d, s in enumerate(v.type.shape)
        if (v.name, d) == (side.name, side.dim) or (alike and s == size)
    }
    if not size or (alike and len(places) == 1) or (in_attributes and not _mentions(case, size)):
        return None
    new = Rebuilding.of(case)
    new.growth.sizes[SYMBOL] = size

    def free(value: Value, leaf: Leaf) -> Leaf:
        if value.is_constant:
            return leaf
        shape = tuple(named(SYMBOL) if (value.name, d) in places else s for d, s in enumerate(value.type.shape))
        return Leaf(leaf.tensor, type=TensorType(value.type.dtype, shape), name=leaf.name)

    new.take_leaves(free)
    new.growth.graph.symbols[SYMBOL] = Symbol(SYMBOL, 0, None, side, size)
    for node in case.graph.nodes:
        attrs = {k: _symbolic(v, size) for k, v in node.attrs.items()} if in_attributes else node.attrs
        if not new.take(node, attrs=attrs):
            return None
    made = new.done(f"side {side.dim} of %{side.name} is dynamic")
    tensors = made.runs[0].inputs
    names = [v.name for v in made.graph.inputs]
    sizes = dict.fromkeys((size, size + 1, size + 3, 1, 0))
    runs = [
        Run(f"{SYMBOL}={s}", tuple(_resized(t, name, places, s) for t, name in zip(tensors, names, strict=True)))
        for s in sizes
    ]
    return Case(made.name, made.graph, runs)


def _mentions(case: Case, size: int) -> bool:
    return any(isinstance(v, tuple) and size in v for node in case.graph.nodes for v in node.attrs.values())


def _symbolic(attr: Any, size: int) -> Any:
    if isinstance(attr, tuple):
        return tuple(named(SYMBOL) if type(item) is int and item == size else item for item in attr)
    return attr


def _resized(tensor: Tensor, name: str, places: set[tuple[str, int]], size: int) -> Tensor:
    """Return a tensor with its freed dims resized, by repeating or dropping slices."""
    for dim in range(tensor.ndim):
        if (name, dim) in places:
            tensor = tensor.index_select(dim, torch.arange(size) % tensor.shape[dim])
    return tensor
