"""Which classes of ``torch.autograd.Function`` a model calls: tracers keep their forward and lose their backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils import _pytree as pytree

from clika_ref.capture.callables import Callee
from clika_ref.capture.eager import on_copies, unchanged
from clika_ref.capture.inputs import ModelCall
from clika_ref.capture.memory import trimmed
from clika_ref.capture.origins import short_line

RECOMPUTING = "torch.utils.checkpoint"
"""The module whose backward only computes the forward again: nothing is lost with it."""


def custom_gradients(callee: Callee, call: ModelCall) -> list[str]:
    """Return what to warn of, one text for each class whose backward the gradients of the model's results pass.

    PyTorch is asked, which records what was called under whatever name: eager runs once more, with gradients. Nothing
    runs where nobody defined such a class. What ``checkpoint(use_reentrant=True)`` calls is not recorded, nor a model
    that fails when it is to be differentiated.
    """
    if not any(map(_is_users, _derived(Function))):
        return []
    try:
        found = {type(node)._forward_cls: None for node in _recorded(callee, call)}  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001 - a model may raise anything; one that cannot be trained loses nothing
        return []
    return [_warning(cls) for cls in found if cls.__module__ != RECOMPUTING]


def _derived(cls: type) -> Iterator[type]:
    for derived in cls.__subclasses__():
        yield derived
        yield from _derived(derived)


def _is_users(cls: type) -> bool:
    return cls.__module__.partition(".")[0] != "torch"


def _recorded(callee: Callee, call: ModelCall) -> list[BackwardCFunction]:
    """Return what PyTorch recorded of calls of a ``Function``, in the order in which it is reached from the results."""
    inputs = pytree.tree_map_only(torch.Tensor, _differentiable, (call.args, call.kwargs))
    dropped = saved_tensors_hooks(_nothing, _nothing)  # the backward never runs: no activation is kept
    own = on_copies(callee.module)
    with trimmed(), unchanged(callee), own, callee.as_module() as module, torch.enable_grad(), dropped:
        results = pytree.tree_leaves(module(*inputs[0], **inputs[1]))
    waiting: list[Node | None] = [r.grad_fn for r in results if isinstance(r, torch.Tensor)]
    seen: dict[Node, None] = {}
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen[node] = None
            waiting += [following for following, _ in reversed(node.next_functions)]
    return [node for node in seen if isinstance(node, BackwardCFunction)]


def _nothing(_: Any) -> Any:
    return None


def _differentiable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy through which gradients pass, and to which a model may write, as it may not to a leaf."""
    differentiates = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().requires_grad_(differentiates).clone()


def _warning(cls: type[Any]) -> str:
    code = getattr(cls.forward, "__code__", None)
    defined = f" defined at {short_line(code.co_filename, code.co_firstlineno)}" if code and _is_users(cls) else ""
    name = cls.__name__ if _is_users(cls) else "A class that Dynamo does not name"  # it puts one of PyTorch's in place
    return (
        f"{name}, a torch.autograd.Function{defined}, keeps its forward and loses its backward: in training the "
        "compiled module differentiates the forward itself, which gives no gradient where that rounds or compares. "
        "Results and exports are not affected; to train with that gradient, write it as operations, such as "
        "x + (round(x) - x).detach()"
    )
