"""Regions of `torch.vmap` in a trace: they become calls on whole batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from clika_ref.capture.patching import only_outside_dynamo, patch_attributes
from clika_ref.torch_internals.batching import (
    add_batch_dim,
    call_own_rule,
    outside_batches,
    replace_batching_rule,
    split_batch_dim,
)
from clika_ref.torch_internals.tracing import (
    ADD_BATCH_DIM,
    ENTER_VMAP,
    EXIT_VMAP,
    MAKE_BATCH_DIM,
    PREPARE_VMAP,
    REMOVE_BATCH_DIM,
)

CONVOLUTION = torch.ops.aten.convolution.default


def _batch_convolution(x: Any, weight: Any, bias: Any, *options: Any) -> Any:
    """Convolve all rows as one batch; PyTorch's own rule fixes the number of rows.

    It still serves weights and biases that differ between the rows.
    """
    rows, dim = split_batch_dim(x)
    (own_weight, weight_dim), (own_bias, bias_dim) = split_batch_dim(weight), split_batch_dim(bias)
    if dim is None or weight_dim is not None or bias_dim is not None:
        found, dim = split_batch_dim(call_own_rule(CONVOLUTION, x, weight, bias, *options))
        with outside_batches():
            first = found.movedim(dim or 0, 0)  # a trace loses results whose batch dim is not the first
        return add_batch_dim(first)
    with outside_batches(), torch.backends.nnpack.flags(enabled=False):  # NNPACK branches on the batch size
        rows = rows.movedim(dim, 0)
        found = CONVOLUTION(rows.flatten(0, 1), own_weight, own_bias, *options)
        found = found.unflatten(0, rows.shape[:2])
    return add_batch_dim(found)


def keep_mapped_dims_dynamic() -> contextlib.AbstractContextManager[None]:
    """Return a context that replaces batching rules of PyTorch that fix the mapped dim."""
    return replace_batching_rule(CONVOLUTION, _batch_convolution)


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
        with keep_mapped_dims_dynamic():
            return self._run_calls(tensors)

    def _run_calls(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        found: dict[fx.Node, Any] = dict(zip(self.operands, tensors, strict=True))
        depth = 0
        try:
            for size in self.levels:
                ENTER_VMAP(found.get(size, size), "error")  # type: ignore[call-overload]
                depth += 1
            for node in self.nodes:
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: found.get(n, n.meta.get("val")))
                depth += (node.target is ENTER_VMAP) - (node.target is EXIT_VMAP)
                found[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        except BaseException:
            for _ in range(depth):
                EXIT_VMAP()
            raise
        for _ in self.levels:
            EXIT_VMAP()
        return tuple(found[node] for node in self.results)


@contextlib.contextmanager
def move_batch_dims_outside() -> Iterator[None]:
    """Make `torch.vmap` move the batch dim of its results by a call of its own while the context lasts.

    A trace loses a result whose batch dim is not the first.
    """
    plain = MAKE_BATCH_DIM

    def remove(tensor: torch.Tensor, level: int, size: Any, dim: int) -> torch.Tensor:
        return plain(tensor, level, size, 0).movedim(0, dim)

    with patch_attributes({REMOVE_BATCH_DIM: only_outside_dynamo(remove, plain)}):
        yield


def split_regions(graph: fx.Graph) -> Iterator[fx.Node | VmapRegion]:
    """Yield the nodes of a graph in order, and each region as a whole."""
    inside: list[fx.Node] = []
    depth = 0
    if not any(node.target is ENTER_VMAP for node in graph.nodes):
        yield from _split_unmarked(list(graph.nodes))
        return
    for node in graph.nodes:
        depth += (node.target is ENTER_VMAP) - (node.target is EXIT_VMAP)
        if depth or node.target is EXIT_VMAP:
            inside.append(node)
        elif node.target is not PREPARE_VMAP:
            yield node
        if inside and not depth:
            yield _make_region(inside)
            inside = []


def _split_unmarked(nodes: Sequence[fx.Node]) -> Iterator[fx.Node | VmapRegion]:
    """Yield the nodes of a body, whose trace lacks the calls that enter and leave: all its regions as one."""
    inner = [i for i, node in enumerate(nodes) if node.target in (ADD_BATCH_DIM, MAKE_BATCH_DIM)]
    if not inner:
        yield from nodes
        return
    yield from nodes[: inner[0]]
    region = _make_region(nodes[inner[0] : inner[-1] + 1])
    sizes: dict[Any, Any] = {node.args[1]: node.args[2] for node in region.nodes if node.target is MAKE_BATCH_DIM}
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
