"""The state of a module after a call: the parameters and buffers that the call writes to or rebinds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from clika_ref.capture.saved_tensors import storage_id
from clika_ref.core.errors import ModelError
from clika_ref.torch_internals.modules import get_buffer_registration_hooks, get_buffers, get_unsaved_buffers
from clika_ref.torch_internals.trees import pytree

STATE_ATTRIBUTES = ("_parameters", "_buffers")
"""The dicts of a module that hold the tensors of its ``state_dict``."""


def collect_state(module: torch.nn.Module, kinds: Sequence[str] = STATE_ATTRIBUTES) -> dict[str, torch.Tensor | None]:
    """Return every parameter and buffer by qualified name, tied ones under each name, and None for empty ones."""
    return {
        f"{path}.{name}".lstrip("."): tensor
        for path, part in module.named_modules(remove_duplicate=False)
        for kind in kinds
        for name, tensor in getattr(part, kind).items()
    }


class WrittenAttributesError(ModelError):
    """The model writes in place to tensors in plain attributes, by their qualified names."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(f"forward writes to {', '.join(names)}, tensors that are no buffers")
        self.names = tuple(names)


def find_attribute_tensors(module: torch.nn.Module, names: Iterable[str]) -> list[str]:
    """Return those of the names, each ``self.path.attribute``, that are tensors in a plain attribute of a module."""
    qualified = [name.removeprefix("self.") for name in names if name.startswith("self.")]
    parts = dict(module.named_modules())
    split = [(name, *name.rpartition(".")[::2]) for name in qualified]
    return [name for name, path, own in split if path in parts and isinstance(vars(parts[path]).get(own), torch.Tensor)]


@contextlib.contextmanager
def hold_as_buffers(module: torch.nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Turn tensors in plain attributes into buffers outside the state dict while the context lasts."""
    owners = [(module.get_submodule(path), own) for path, own in (name.rpartition(".")[::2] for name in names)]
    for part, own in owners:
        get_buffers(part)[own] = vars(part).pop(own)
        get_unsaved_buffers(part).add(own)
    try:
        yield
    finally:
        for part, own in owners:
            get_unsaved_buffers(part).discard(own)
            vars(part)[own] = get_buffers(part).pop(own)


@contextlib.contextmanager
def trace_assignments_as_writes(module: torch.nn.Module, names: frozenset[str]) -> Iterator[None]:
    """Make a trace record assignments of ``forward`` to the named buffers as writes at the end of the call.

    By itself, torch.export ignores assignments in all modules but the outermost. There it writes into memory that
    results and other new values may share with the old value; this context copies those first. Dynamo does not trace
    such hooks, and drops all assignments.
    """
    users = set(get_buffer_registration_hooks())
    before: dict[str, Any] = {}

    def remember(*_: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            before.update(collect_state(module, ("_buffers",)))
            # Remove torch.export's own hooks; for an empty buffer they write to an input instead.
            for added in set(get_buffer_registration_hooks()) - users:
                del get_buffer_registration_hooks()[added]

    def write(_module: torch.nn.Module, _args: Any, result: Any) -> Any:
        if not before:
            return result
        after = collect_state(module, ("_buffers",))
        bound = {n: after[n] for n, old in before.items() if n in after and after[n] is not old}
        written = sorted(names & bound.keys())
        overwritten = {storage_id(before[n]) for n in written}

        def apart(leaf: Any) -> Any:
            return leaf.clone() if storage_id(leaf) in overwritten else leaf

        values = [apart(bound[n]) for n in written]
        result = pytree.tree_map(apart, result) if written else result
        for name, value in zip(written, values, strict=True):
            before[name].copy_(value)
        for name in bound:
            path, _, last = name.rpartition(".")
            get_buffers(module.get_submodule(path))[last] = before[name]
        before.clear()  # torch.export treats a traced tensor that stays referenced as a constant
        return result

    hooks = [module.register_forward_pre_hook(remember, prepend=True), module.register_forward_hook(write)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
