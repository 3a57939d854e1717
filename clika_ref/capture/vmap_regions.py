"""Regions of `torch.vmap` in a trace: they become calls on whole batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._functorch import predispatch
from torch._functorch import vmap as vmap_module

from clika_ref.capture.patching import only_in_this_thread, patch_attributes

ENTER, LEAVE = predispatch._vmap_increment_nesting, predispatch._vmap_decrement_nesting
"""The calls around a region; regions may be nested."""

ADD, REMOVE = predispatch._add_batch_dim, predispatch._remove_batch_dim
"""The calls that give a tensor a batch dim of a nesting level, and that make it a dim again."""

PREPARATION = predispatch.lazy_load_decompositions
"""A call before each region, without a result."""


@dataclass(frozen=True)
class VmapRegion:
    """The calls of a region, with the tensors that it reads, and those that are read after it."""

    nodes: Sequence[fx.Node]
    operands: Sequence[fx.Node]
    results: Sequence[fx.Node]
    levels: Sequence[fx.Node | int] = ()
    """The batch size of each nesting level that no call of the region enters."""

    def run(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        """Run the calls, by which PyTorch's batching rules make calls on whole batches."""
        found: dict[fx.Node, Any] = dict(zip(self.operands, tensors, strict=True))
        depth = 0
        try:
            for size in self.levels:
                ENTER(found.get(size, size), "error")  # type: ignore[call-overload]
                depth += 1
            for node in self.nodes:
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: found.get(n, n.meta.get("val")))
                depth += (node.target is ENTER) - (node.target is LEAVE)
                found[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        except BaseException:
            for _ in range(depth):
                LEAVE()
            raise
        for _ in self.levels:
            LEAVE()
        return tuple(found[node] for node in self.results)


@contextlib.contextmanager
def move_batch_dims_outside() -> Iterator[None]:
    """Make `torch.vmap` move the batch dim of its results by a call of its own while the context lasts.

    A trace loses a result whose batch dim is not the first.
    """
    plain = predispatch._remove_batch_dim

    def remove(tensor: torch.Tensor, level: int, size: Any, dim: int) -> torch.Tensor:
        return plain(tensor, level, size, 0).movedim(0, dim)

    own = only_in_this_thread(remove, plain)

    def choose(*args: Any) -> torch.Tensor:  # Dynamo, which bodies of control flow run in, knows PyTorch's form only
        return plain(*args) if torch.compiler.is_dynamo_compiling() else own(*args)

    with patch_attributes({(vmap_module, "_remove_batch_dim"): choose}):
        yield


def split_regions(graph: fx.Graph) -> Iterator[fx.Node | VmapRegion]:
    """Yield the nodes of a graph in order, and each region as a whole."""
    inside: list[fx.Node] = []
    depth = 0
    if not any(node.target is ENTER for node in graph.nodes):
        yield from _split_unmarked(list(graph.nodes))
        return
    for node in graph.nodes:
        depth += (node.target is ENTER) - (node.target is LEAVE)
        if depth or node.target is LEAVE:
            inside.append(node)
        elif node.target is not PREPARATION:
            yield node
        if inside and not depth:
            yield _make_region(inside)
            inside = []


def _split_unmarked(nodes: Sequence[fx.Node]) -> Iterator[fx.Node | VmapRegion]:
    """Yield the nodes of a body, whose trace lacks the calls that enter and leave: all its regions as one."""
    inner = [i for i, node in enumerate(nodes) if node.target in (ADD, REMOVE)]
    if not inner:
        yield from nodes
        return
    yield from nodes[: inner[0]]
    region = _make_region(nodes[inner[0] : inner[-1] + 1])
    sizes: dict[Any, Any] = {node.args[1]: node.args[2] for node in region.nodes if node.target is REMOVE}
    levels = [sizes[level] for level in sorted(sizes)]
    operands = [*region.operands, *(size for size in levels if isinstance(size, fx.Node))]
    yield replace(region, levels=levels, operands=list(dict.fromkeys(operands)))
    yield from nodes[inner[-1] + 1 :]


def _make_region(nodes: Sequence[fx.Node]) -> VmapRegion:
    own = set(nodes)
    read = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in own)
    operands = [n for n in read if isinstance(n.meta.get("val"), torch.Tensor)]
    results = [node for node in nodes if any(user not in own for user in node.users)]
    return VmapRegion(nodes, operands, results)
