"""PyTorch's own decompositions, for ATen calls that nothing else serves."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch._decomp import core_aten_decompositions, decomposition_table
from torch.fx.experimental.proxy_tensor import make_fx


@lru_cache(maxsize=1)
def _table() -> dict[Any, Any]:
    return {**decomposition_table, **core_aten_decompositions()}


def decompose(node: fx.Node, overload: torch._ops.OpOverload) -> tuple[fx.GraphModule | None, list[fx.Node]]:
    """Return a call as a program of simpler calls and the nodes that it takes, or None where there is no rule."""
    rule = _table().get(overload)
    if rule is None and overload.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        rule = overload.decompose
    if rule is None:
        return None, []
    tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]

    def call(*fakes: torch.Tensor) -> Any:
        given = dict(zip(tensors, fakes, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: given.get(n, n.meta.get("val")))
        return rule(*args, **kwargs)

    program = make_fx(call, decomposition_table={})(*[t.meta["val"] for t in tensors])
    return (None, []) if _calls(program, overload) else (program, tensors)


def _calls(program: fx.GraphModule, overload: torch._ops.OpOverload) -> bool:
    """Whether a decomposition ends in the very call that it should replace."""
    return any(n.target is overload for n in program.graph.nodes)
