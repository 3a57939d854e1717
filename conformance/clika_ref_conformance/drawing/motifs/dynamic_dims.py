"""Near misses with dynamic dims: a dim of an input becomes symbolic, and the case runs at several sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.ir import Value
from clika_ref.core.symbols import Symbol, SymbolSource, make_symbol
from clika_ref.core.types import TensorType
from clika_ref_conformance.cases import CaseRun, GraphCase
from clika_ref_conformance.drawing.eager_builder import LeafTensor
from clika_ref_conformance.drawing.motifs.near_misses import Operators
from clika_ref_conformance.drawing.motifs.rebuilding import CaseRebuilder, is_safe

SYMBOL_NAME = "n"


def make_dims_dynamic(case: GraphCase, _: Operators) -> Iterator[GraphCase | None]:
    """Make one input dim dynamic, or all input dims of its size, and also equal attributes where legal."""
    for value in case.graph.inputs if is_safe(case) else ():
        for dim in range(value.type.rank):
            for alike in (False, True):
                for in_attributes in (True, False):
                    made = _make_dim_dynamic(
                        case, SymbolSource(value.name, dim), alike=alike, in_attributes=in_attributes
                    )
                    if made is not None:
                        yield made
                        break


def _make_dim_dynamic(case: GraphCase, side: SymbolSource, *, alike: bool, in_attributes: bool) -> GraphCase | None:
    """Return the case with an input dim made dynamic, or None if its types would only hold for one size."""
    size = next(int(v.type.shape[side.dim or 0]) for v in case.graph.inputs if v.name == side.name)
    positions = {
        (v.name, d)
        for v in case.graph.inputs
        for d, s in enumerate(v.type.shape)
        if (v.name, d) == (side.name, side.dim) or (alike and s == size)
    }
    if not size or (alike and len(positions) == 1) or (in_attributes and not _has_size_attribute(case, size)):
        return None
    new = CaseRebuilder.of(case)
    new.builder.sizes[SYMBOL_NAME] = size

    def make_symbolic(value: Value, leaf: LeafTensor) -> LeafTensor:
        if value.is_constant:
            return leaf
        shape = tuple(
            make_symbol(SYMBOL_NAME) if (value.name, d) in positions else s for d, s in enumerate(value.type.shape)
        )
        return LeafTensor(leaf.tensor, type=TensorType(value.type.dtype, shape), name=leaf.name)

    new.add_leaves(make_symbolic)
    new.builder.graph.symbols[SYMBOL_NAME] = Symbol(SYMBOL_NAME, 0, None, side, size)
    for node in case.graph.nodes:
        attrs = {k: _substitute_symbol(v, size) for k, v in node.attrs.items()} if in_attributes else node.attrs
        if not new.take(node, attrs=attrs):
            return None
    made = new.finish(f"dim {side.dim} of %{side.name} is dynamic")
    tensors = made.runs[0].inputs
    names = [v.name for v in made.graph.inputs]
    sizes = dict.fromkeys((size, size + 1, size + 3, 1, 0))
    runs = [
        CaseRun(
            f"{SYMBOL_NAME}={s}",
            tuple(_resize_dims(t, name, positions, s) for t, name in zip(tensors, names, strict=True)),
        )
        for s in sizes
    ]
    return GraphCase(made.name, made.graph, runs)


def _has_size_attribute(case: GraphCase, size: int) -> bool:
    return any(isinstance(v, tuple) and size in v for node in case.graph.nodes for v in node.attrs.values())


def _substitute_symbol(attr: Any, size: int) -> Any:
    if isinstance(attr, tuple):
        return tuple(make_symbol(SYMBOL_NAME) if type(item) is int and item == size else item for item in attr)
    return attr


def _resize_dims(tensor: Tensor, name: str, places: set[tuple[str, int]], size: int) -> Tensor:
    """Return a tensor with its freed dims resized, by repeating or dropping slices."""
    for dim in range(tensor.ndim):
        if (name, dim) in places:
            tensor = tensor.index_select(dim, torch.arange(size) % tensor.shape[dim])
    return tensor
