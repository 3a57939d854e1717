"""Snapshot and restore the attributes that a model changes while it runs, such as caches."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import is_
from types import CodeType, FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

import torch

from clika_ref.capture.origins import is_installed_file
from clika_ref.capture.reachable_modules import find_referenced_names
from clika_ref.torch_internals.modules import get_buffers, get_parameters

CONTAINER_TYPES = (dict, list, set, deque, tuple)
"""Types of containers that may be caches. Comparing their elements shows changes; all but tuples can be refilled."""

_FILL_METHODS: dict[Any, Callable[..., None]] = {
    OrderedDict: OrderedDict.update,
    dict: dict.update,
    set: set.update,
    list: list.extend,
    deque: deque.extend,
}
"""The method that fills each type of container; subclasses come first."""

MAX_CACHE_LENGTH = 1000
"""Containers with more elements count as data, not as caches of forward, and are not searched."""

MAX_OPENED_OBJECTS = 10_000
"""Maximum number of objects and functions to open; beyond it they count as data."""

_PLAIN_DATA_MODULES = ("types.", "collections.", "argparse.", "torch.distributions.")
"""Modules of Python and PyTorch with plain data classes, opened like classes of users."""

_CLOSED_PACKAGES = frozenset({"torch", "clika_ref", *sys.stdlib_module_names})
"""Packages whose objects are not opened, such as threads and loggers."""

_ATOMIC_TYPES = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
"""Immutable types without references, the types of most values."""

_HOOK_ATTRIBUTES = frozenset(
    n for n, value in vars(torch.nn.Module()).items() if "hook" in n and isinstance(value, dict)
)
"""Hook dicts of a module. Most containers of a model are hook dicts, and nearly all are empty."""


@dataclass(frozen=True)
class _ContainerSnapshot:
    """The contents of a container: a shallow copy."""

    name: str
    container: Any
    contents: Any
    names: bool = False
    """Whether its keys are attribute names; then ``name`` is their prefix."""
    tensors: bool = False
    """Whether it holds parameters or buffers."""

    def is_attribute(self) -> bool:
        """Whether it holds plain attributes rather than state (parameters and buffers)."""
        return not self.tensors

    def changes(self) -> Iterator[str]:
        """Yield the names of changed attributes: a new name, or another object, is a change."""
        now, before = self.container, self.contents
        if self.names:
            yield from (f"{self.name}{n}" for n in _find_rebound_names(now, before))
        elif not _has_same_elements(now, before):
            yield self.name

    def restore(self, *, state: bool) -> None:
        if not any(self.changes()):
            return
        contents = self.contents
        if self.tensors and not state:
            contents = {n: now if can_assign(t, now := self.container.get(n)) else t for n, t in contents.items()}
        kind = next(k for k in _FILL_METHODS if isinstance(self.container, k))
        kind.clear(self.container)  # the plain methods: a user's class may raise in its own
        _FILL_METHODS[kind](self.container, contents)


_BIND_METHODS: dict[type, tuple[Callable[..., None], Callable[..., None]]] = {
    dict: (dict.__setitem__, dict.__delitem__),
    type: (type.__setattr__, type.__delattr__),
    object: (object.__setattr__, object.__delattr__),
}
"""Functions that bind and unbind a name, by type of namespace; plain methods, as frozen dataclasses block theirs."""


@dataclass(frozen=True)
class _NamespaceSnapshot:
    """The values of the names of a class, of the slots of an object, or of globals that a function rebinds."""

    prefix: str
    owner: Any
    bound: dict[str, Any]
    found: Callable[[Any], dict[str, Any]]
    """Returns the current values of the names."""

    def is_attribute(self) -> bool:
        return True

    def changes(self) -> Iterator[str]:
        return (f"{self.prefix}{n}" for n in self._list_rebound_names())

    def _list_rebound_names(self) -> Iterator[str]:
        return _find_rebound_names(self.found(self.owner), self.bound)

    def restore(self, *, state: bool) -> None:
        del state
        put, drop = _BIND_METHODS[next(k for k in _BIND_METHODS if isinstance(self.owner, k))]
        for name in [*self._list_rebound_names()]:
            if name in self.bound:
                put(self.owner, name, self.bound[name])
            else:
                drop(self.owner, name)


class AttributeSnapshot:
    """A snapshot of the attributes of a module and its submodules, and of the contents of plain values in them.

    Plain values are containers, objects of user and library classes, and the classes of the submodules. The snapshot
    covers other values that `forward` can reach only after `add_outer_scopes`.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._snapshots: dict[int, _ContainerSnapshot | _NamespaceSnapshot] = {}
        self._hooks: list[tuple[Any, dict[Any, Any]]] = []
        """Each dict of hooks, and a copy of it."""
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._functions: list[FunctionType] = []
        """Functions and methods that attributes refer to."""
        self._seen: set[int] = set()
        self._opened = 0
        self._openers: dict[type, Callable[[str, Any], Iterable[tuple[str, Any]]] | None] = {}
        """The function that opens values of each class seen so far."""
        waiting: list[tuple[str, Any]] = []
        classes: set[type] = set()
        for path, part in module.named_modules():
            prefix = f"self.{path}." if path else "self."
            self._save_container(prefix, get_parameters(part), names=True, tensors=True)
            self._save_container(prefix, get_buffers(part), names=True, tensors=True)
            self._save_container(prefix, vars(part), names=True)
            waiting += [
                (f"{prefix}{n}", v)
                for n, v in vars(part).items()
                if n not in _HOOK_ATTRIBUTES and type(v) not in _ATOMIC_TYPES
            ]
            if type(part) not in classes:
                classes.add(type(part))
                waiting += self._save_classes(prefix, type(part))
            hooks = [vars(part)[name] for name in _HOOK_ATTRIBUTES & vars(part).keys()]
            self._hooks += [(registered, dict(registered)) for registered in hooks]
        self._save_nested(waiting)
        state = {id(t) for t in (*module.parameters(), *module.buffers())}
        self.tensors = [(name, tensor) for name, tensor in self._tensors if id(tensor) not in state]
        """The tensors that are neither parameters nor buffers, with the names of attributes that hold them."""

    def add_outer_scopes(self, function: Callable[..., Any]) -> None:
        """Add values that ``function`` of the model, and functions that it calls, reach by name outside the modules.

        These are closures, and globals of the user's functions; tensors in them are not copied.
        """
        own = function.__func__ if inspect.ismethod(function) else function
        self._save_nested([("", f) for f in (*self._functions, own) if isinstance(f, FunctionType)], functions=True)

    def _save_container(self, name: str, container: Any, *, names: bool = False, tensors: bool = False) -> None:
        contents = dict(container) if isinstance(container, dict) else list(container)
        self._seen.add(id(container))
        self._snapshots[id(container)] = _ContainerSnapshot(name, container, contents, names, tensors)

    def _save_classes(self, prefix: str, cls: type) -> Iterator[tuple[str, Any]]:
        for own in _user_classes(cls):
            if id(own) not in self._snapshots:
                bound = _class_namespace(own)
                self._snapshots[id(own)] = _NamespaceSnapshot(prefix, own, bound, _class_namespace)
                values = ((n, getattr(v, "__func__", v)) for n, v in bound.items())  # unwrap static methods
                yield from ((f"{prefix}{n}", v) for n, v in values if type(v) not in _ATOMIC_TYPES)

    def _save_nested(self, waiting: list[tuple[str, Any]], *, functions: bool = False) -> None:
        """Add values and all nested values at any depth; for long containers, only the container itself."""
        while waiting:
            name, value = waiting.pop()
            cls = type(value)
            if cls is FunctionType and not functions:
                self._functions.append(value)
                continue
            if cls is FunctionType:
                step = self._open_function
            elif cls in self._openers:
                step = self._openers[cls]
            else:
                step = self._openers[cls] = self._select_opener(cls)
            if step is not None and id(value) not in self._seen:
                self._seen.add(id(value))
                waiting += step(name, value)

    def _select_opener(self, cls: type) -> Callable[[str, Any], Iterable[tuple[str, Any]]] | None:
        if issubclass(cls, torch.Tensor):
            return self._open_tensor
        if issubclass(cls, torch.nn.Module | type):
            return None
        if issubclass(cls, CONTAINER_TYPES):
            return self._open_container
        slots = functools.partial(_read_slots, _find_slots(cls))
        return functools.partial(self._open_object, slots) if _is_opened(cls) else None

    def _open_tensor(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, Any]]:
        if tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta:  # others lack elements
            self._tensors.append((name, tensor))
        return ()

    def _open_container(self, name: str, container: Any) -> Iterable[tuple[str, Any]]:
        if not isinstance(container, tuple):
            self._save_container(name, container)
        if len(container) > MAX_CACHE_LENGTH:
            return ()
        inside = container.values() if isinstance(container, dict) else container
        return [(name, inner) for inner in inside if type(inner) not in _ATOMIC_TYPES]

    def _open_object(
        self, slots: functools.partial[dict[str, Any]], name: str, value: Any
    ) -> Iterable[tuple[str, Any]]:
        self._opened += 1
        if self._opened > MAX_OPENED_OBJECTS:
            return ()
        inside = slots(value)
        if slots.args[0]:
            self._snapshots[id(value)] = _NamespaceSnapshot(f"{name}.", value, inside, slots)
        named = _dict_of(value)
        if named is not None:
            self._save_container(f"{name}.", named, names=True)
            inside = {**inside, **named}
        return [(f"{name}.{n}", inner) for n, inner in inside.items() if type(inner) not in _ATOMIC_TYPES]

    def _open_function(self, _: str, function: FunctionType) -> Iterable[tuple[str, Any]]:
        function = _unwrap(function)  # skip PyTorch's decorators, such as no_grad
        code, scope = function.__code__, function.__globals__
        self._opened += 1
        if (
            is_installed_file(code.co_filename)
            or _is_closed_package(function.__module__ or "")
            or self._opened > MAX_OPENED_OBJECTS
        ):
            return ()
        found = functools.partial(_look_up_names, _find_assigned_globals(code))
        if _find_assigned_globals(code):
            self._snapshots[id(function)] = _NamespaceSnapshot("", scope, found(scope), found)
        return [(n, v) for n, v in find_referenced_names(function).items() if type(v) not in _ATOMIC_TYPES]

    def find_changes(self) -> list[str]:
        """Return the names of the attributes, other than parameters and buffers, with changed contents."""
        return list(
            dict.fromkeys(
                n for snapshot in self._snapshots.values() if snapshot.is_attribute() for n in snapshot.changes()
            )
        )

    def restore(self, *, state: bool = True) -> None:
        """Restore the contents of attributes and containers.

        Args:
            state: whether to also restore parameters and buffers that were rebound to tensors that a graph can hold.
                Those registered meanwhile are removed in either case.
        """
        for snapshot in self._snapshots.values():
            snapshot.restore(state=state)
        for registered, before in self._hooks:
            if registered != before:
                registered.clear()
                registered.update(before)


def unset_attributes(module: torch.nn.Module, names: Iterable[str]) -> None:
    """Unbind attributes of a module and its submodules whose class has a default, such as a cache that starts as None.

    Args:
        module: the module.
        names: of attributes, as in `AttributeSnapshot.find_changes`; others are ignored.
    """
    parts = {f"self.{path}." if path else "self.": part for path, part in module.named_modules()}
    for name in names:
        prefix, _, own = name.rpartition(".")
        part = parts.get(f"{prefix}.")
        if part is not None and own in vars(part) and hasattr(type(part), own):
            del vars(part)[own]


def _is_closed_package(module: str) -> bool:
    return module.partition(".")[0] in _CLOSED_PACKAGES


def _is_opened(cls: type) -> bool:
    """Whether to open objects of a class: not those of PyTorch and Python, which are more than data."""
    return f"{cls.__module__}.".startswith(_PLAIN_DATA_MODULES) or not _is_closed_package(cls.__module__)


def _user_classes(cls: type) -> tuple[type, ...]:
    """Return a class and its bases, without those of PyTorch and Python."""
    return tuple(base for base in cls.__mro__ if not _is_closed_package(base.__module__))


def _class_namespace(cls: type) -> dict[str, Any]:
    return {n: v for n, v in vars(cls).items() if not (n.startswith("__") and n.endswith("__"))}


def _find_slots(cls: type) -> dict[str, MemberDescriptorType]:
    found = ((n, slot) for base in cls.__mro__ for n, slot in vars(base).items())
    slots = {n: slot for n, slot in reversed([*found]) if isinstance(slot, MemberDescriptorType)}
    slots.pop("__dict__", None)  # classes defined in C list it
    return slots


def _read_slots(slots: dict[str, MemberDescriptorType], value: Any) -> dict[str, Any]:
    """Return the values of the slots of an object that are set. Like `_dict_of`, this runs no code of the class."""
    found = {}
    for name, slot in slots.items():
        with contextlib.suppress(AttributeError):
            found[name] = slot.__get__(value)
    return found


def _dict_of(value: Any) -> dict[str, Any] | None:
    """Return the ``__dict__`` of an object; None if its class has only slots, or hides it."""
    for base in type(value).__mro__:
        found = vars(base).get("__dict__")
        if isinstance(found, GetSetDescriptorType | MemberDescriptorType):
            return found.__get__(value)
    return None


def _unwrap(function: FunctionType) -> FunctionType:
    """Return the innermost function of a chain of decorators; a decorator may wrap an object, or itself."""
    seen = [function]
    while isinstance(inner := vars(function).get("__wrapped__"), FunctionType) and inner not in seen:
        seen.append(inner)
        function = inner
    return function


def _look_up_names(names: frozenset[str], scope: dict[str, Any]) -> dict[str, Any]:
    return {n: scope[n] for n in names if n in scope}


@functools.lru_cache(maxsize=4096)
def _find_assigned_globals(code: CodeType) -> frozenset[str]:
    """Return the globals that a function rebinds."""
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname == "STORE_GLOBAL")


def can_assign(old: torch.Tensor | None, new: torch.Tensor | None) -> bool:
    """Whether ``new`` can be written into ``old``, so that a graph can represent the rebinding as a write."""
    if old is None or new is None:
        return old is new
    return (old.dtype, old.shape) == (new.dtype, new.shape)


_UNBOUND = object()
"""The value of an unbound name."""


def _find_rebound_names(now: dict[str, Any], before: dict[str, Any]) -> Iterator[str]:
    """Yield names that are bound to another object than before, and names that are new or gone."""
    return (n for n in {**before, **now} if now.get(n, _UNBOUND) is not before.get(n, _UNBOUND))


def _has_same_elements(now: Any, before: Any) -> bool:
    """Whether two containers hold the same objects in the same order; uses ``map``, as some hold a million."""
    if len(now) != len(before) or not all(map(is_, now, before)):
        return False
    return not isinstance(now, dict) or all(map(is_, now.values(), before.values()))
