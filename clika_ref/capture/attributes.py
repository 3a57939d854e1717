"""What a model keeps in attributes of its modules while it runs, such as caches; undone without copying a tensor."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch

CONTAINERS = (dict, list, set, deque, tuple)
"""What a cache may be: by looking at what they hold one sees that they changed, and all but tuples are filled again."""

_FILL: dict[Any, Callable[..., None]] = {
    OrderedDict: OrderedDict.update,
    dict: dict.update,
    set: set.update,
    list: list.extend,
    deque: deque.extend,
}
"""How a container of each kind, the more special first, is given elements."""

LONG = 1000
"""Elements from which on a container is taken for data, in which no forward looks for caches."""

_HOOKS = frozenset(n for n, value in vars(torch.nn.Module()).items() if "hook" in n and isinstance(value, dict))
"""Containers, most of all that a model has, which are empty in nearly all."""


@dataclass(frozen=True)
class _Held:
    """What a container held: a copy of it, of which the elements are none."""

    name: str
    container: Any
    contents: Any
    names: bool = False
    """Whether its keys are names of attributes; then ``name`` is the prefix of each."""
    tensors: bool = False
    """Whether it binds parameters or buffers."""

    def changes(self) -> Iterator[str]:
        """Yield the names of the attributes that it changed, anything new or another object being a change."""
        now, before = self.container, self.contents
        if self.names:
            yield from (f"{self.name}{n}" for n in {**before, **now} if now.get(n, self) is not before.get(n, self))
        elif not _holds_same(now, before):
            yield self.name

    def restore(self, *, state: bool) -> None:
        if not any(self.changes()):
            return
        contents = self.contents
        if self.tensors and not state:
            contents = {n: now if fits(t, now := self.container.get(n)) else t for n, t in contents.items()}
        kind = next(k for k in _FILL if isinstance(self.container, k))
        kind.clear(self.container)  # by the plain methods: a class of the user's may refuse its own
        _FILL[kind](self.container, contents)


class Attributes:
    """The attributes of a module and its parts as they are now, and what the plain containers in them hold."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._held: dict[int, _Held] = {}
        self._hooks: list[tuple[Any, dict[Any, Any]]] = []
        """Where hooks are registered, and those that were."""
        for path, part in module.named_modules():
            prefix = f"{path}." if path else ""
            self._keep(prefix, part._parameters, names=True, tensors=True)
            self._keep(prefix, part._buffers, names=True, tensors=True)
            self._keep(prefix, vars(part), names=True)
            for name, value in vars(part).items():
                if isinstance(value, CONTAINERS) and name not in _HOOKS:
                    self._keep_inside(f"{prefix}{name}", value)
            hooks = [vars(part)[name] for name in _HOOKS & vars(part).keys()]
            self._hooks += [(registered, dict(registered)) for registered in hooks]

    def _keep(self, name: str, container: Any, *, names: bool = False, tensors: bool = False) -> None:
        contents = dict(container) if isinstance(container, dict) else list(container)
        self._held[id(container)] = _Held(name, container, contents, names, tensors)

    def _keep_inside(self, name: str, value: Any) -> None:
        """Keep a container and those in it, however deep they stand; of long ones only what they hold themselves."""
        waiting: list[Any] = [value]
        seen: set[int] = set()
        while waiting:
            value = waiting.pop()
            if id(value) in self._held or id(value) in seen:
                continue
            seen.add(id(value))
            if not isinstance(value, tuple):
                self._keep(name, value)
            if len(value) <= LONG:
                inside = value.values() if isinstance(value, dict) else value
                waiting += [inner for inner in inside if isinstance(inner, CONTAINERS)]

    def changed(self) -> list[str]:
        """Return the names of the attributes, not parameters and buffers, that hold something else now."""
        return list(dict.fromkeys(n for held in self._held.values() if not held.tensors for n in held.changes()))

    def restore(self, *, state: bool = True) -> None:
        """Let attributes and containers hold again what they held.

        Args:
            state: whether parameters and buffers are restored too that were bound anew to what a graph can hold in
                their place; those registered meanwhile are removed in either case.

        """
        for held in self._held.values():
            held.restore(state=state)
        for registered, before in self._hooks:
            if registered != before:
                registered.clear()
                registered.update(before)


def fits(old: torch.Tensor | None, new: torch.Tensor | None) -> bool:
    """Whether one tensor can be written into the other, so that a graph keeps what was bound in its place."""
    if old is None or new is None:
        return old is new
    return (old.dtype, old.shape) == (new.dtype, new.shape)


def _holds_same(now: Any, before: Any) -> bool:
    """Whether two containers hold the same objects in the same order; by ``map``, as some hold a million."""
    if len(now) != len(before) or not all(map(is_, now, before)):
        return False
    return not isinstance(now, dict) or all(map(is_, now.values(), before.values()))
