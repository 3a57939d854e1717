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
from clika_ref.signature import register_dataclasses


def run_eager(callee: Callee, call: ModelCall) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves and the structure of what the model returns for a call; tensors are copies."""
    copy = call.copy()
    with trimmed(), unchanged(callee.module), callee.as_module() as module, torch.no_grad():
        result = module(*copy.args, **copy.kwargs)
        register_dataclasses(result)
        leaves, spec = pytree.tree_flatten(result)
        # A buffer may be among the results, and is about to be restored.
        return [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec


@contextlib.contextmanager
def unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Restore buffers that were written to or bound anew, and the state of the random generator, on leaving."""
    bound = [(part._buffers, dict(part._buffers)) for part in module.modules()]
    before = [(b, b.detach().clone()) for b in module.buffers()]
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            for buffers, original in bound:
                buffers.update(original)
            with torch.no_grad():
                for buffer, saved in before:
                    if not torch.equal(buffer, saved):  # batch norm writes without raising the version counter
                        buffer.copy_(saved)
