"""Run the original model without leaving a trace on it: buffers, random state and inputs stay as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from clika_ref.capture.callables import Callee
from clika_ref.capture.inputs import ModelCall
from clika_ref.capture.memory import trimmed
from clika_ref.structures import register_dataclasses


def run_eager(callee: Callee, call: ModelCall) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves and the structure of what the model returns for a call; tensors are copies."""
    copy = call.copy()
    with trimmed(), unchanged(callee), callee.as_module() as module, torch.no_grad():
        result = module(*copy.args, **copy.kwargs)
        register_dataclasses(result)
        leaves, spec = pytree.tree_flatten(result)
        # A buffer may be among the results, and is about to be restored.
        return [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec


@contextlib.contextmanager
def unchanged(callee: Callee) -> Iterator[None]:
    """Restore what was written to or bound anew, and the state of the random generator, on leaving.

    Buffers always; parameters where the model stays with its user, as it takes a second copy of them.
    """
    module = callee.module
    holders: list[dict[str, Any]] = [h for part in module.modules() for h in (part._parameters, part._buffers)]
    bound = [(held, dict(held)) for held in holders]
    kept = [_stored(t) for t in (*module.buffers(), *(module.parameters() if callee.stays else ()))]
    before = [(t, t.detach().clone()) for t in kept]
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            for held, original in bound:
                held.update(original)
            with torch.no_grad():
                for tensor, saved in before:
                    if not torch.equal(tensor, saved):  # ``.data`` and batch norm write without raising the version
                        tensor.data.copy_(saved)


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or the part of an expanded one that memory holds: the whole cannot be written to."""
    for dim, (stride, length) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 and length > 1:
            tensor = tensor.detach().narrow(dim, 0, 1)
    return tensor
