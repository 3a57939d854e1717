"""Patch attributes of PyTorch temporarily, for the current thread only."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

import torch

_INHERITED = object()
"""Marks an attribute that a class does not define itself."""


@contextlib.contextmanager
def patch_attributes(replacements: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """Replace attributes of classes and modules while the context lasts.

    The model may replace the same attributes meanwhile, for example by compiling another model; nested contexts restore
    in reverse order.
    """
    with contextlib.ExitStack() as stack:
        for (owner, name), replacement in replacements.items():
            stack.callback(_restore_attribute, owner, name, vars(owner).get(name, _INHERITED))
            setattr(owner, name, replacement)
        yield


def _restore_attribute(owner: Any, name: str, value: Any) -> None:
    if value is not _INHERITED:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)


@contextlib.contextmanager
def patch_functions(replacements: Mapping[Callable[..., Any], Callable[..., Any]]) -> Iterator[None]:
    """Replace functions under every name that a module binds to them, while the context lasts.

    These are the module that defines a function, and the modules that import it from there.
    """
    names = _make_index(tuple(replacements))
    bound = {(module, name): replacements[function] for module, name, function in names.find()}
    with names.keep_replaced(), patch_attributes(bound):
        yield


class _NameIndex:
    """The names that modules bind to some functions.

    A search reads each module once, and again if its number of names has changed; ``__main__`` each time, as the cells
    of a notebook change it at any time.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        self._functions = {id(function): function for function in functions}
        self._searched: list[ModuleType] = []
        self._counts: list[int] = []
        self._names: list[list[str]] = []
        self._replacing = 0

    def find(self) -> list[tuple[ModuleType, str, Callable[..., Any]]]:
        """Return the modules and names that are bound to a function at present, and the function."""
        main = sys.modules["__main__"]
        modules = [m for m in [*sys.modules.values()] if type(m) is ModuleType and m is not main]  # others may import
        counts = [*map(len, map(vars, modules))]
        names = self._names
        if modules != self._searched or counts != self._counts:
            before = {id(m): (c, n) for m, c, n in zip(self._searched, self._counts, self._names, strict=True)}
            known = [before.get(id(module), (None, [])) for module in modules]
            names = [
                n if c == count else self._search(m) for m, count, (c, n) in zip(modules, counts, known, strict=True)
            ]
            if not self._replacing:  # else modules bind replacements
                self._searched, self._counts, self._names = modules, counts, names
        holders = [
            *((m, name) for m, own in zip(modules, names, strict=True) for name in own),
            *((main, n) for n in self._search(main)),
        ]
        bound = ((module, name, id(vars(module).get(name))) for module, name in holders)
        return [(module, name, self._functions[found]) for module, name, found in bound if found in self._functions]

    def _search(self, module: ModuleType) -> list[str]:
        names = vars(module).copy()  # other threads may change it
        if self._functions.keys().isdisjoint(map(id, names.values())):  # far faster than a loop over the names
            return []
        return [name for name, value in names.items() if id(value) in self._functions]

    @contextlib.contextmanager
    def keep_replaced(self) -> Iterator[None]:
        """Keep the index as it is while the context lasts, since the functions are replaced."""
        self._replacing += 1
        try:
            yield
        finally:
            self._replacing -= 1


_make_index = functools.lru_cache(maxsize=32)(_NameIndex)


class _RestoringImport:
    """A finder of imports that runs one module in a context."""

    def __init__(self, name: str, context: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self.name = name
        self.context = context

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of the module as the following finders find it, and None for other modules."""
        following = sys.meta_path[sys.meta_path.index(cast("Any", self)) + 1 :] if name == self.name else []
        specs = (finder.find_spec(name, path, target) for finder in following)
        found = next((spec for spec in specs if spec is not None), None)
        if found is not None:
            loader: Any = found.loader
            loader.exec_module = functools.partial(self._run, loader.exec_module)
        return found

    def _run(self, run: Callable[[Any], None], module: Any) -> None:
        with self.context():
            run(module)


@contextlib.contextmanager
def import_in_context(name: str, context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """Run a module in a context if it is imported while this context lasts, such as to keep a patch out of it.

    Args:
        name: the qualified name of the module.
        context: makes the context.
    """
    finder: Any = _RestoringImport(name, context)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def only_in_this_thread(function: Callable[..., Any], elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``function`` in this thread, and ``elsewhere`` in other threads."""
    thread = threading.get_ident()

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        return (function if threading.get_ident() == thread else elsewhere)(*args, **kwargs)

    return dispatch


def only_outside_dynamo(function: Callable[..., Any], elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``function`` in this thread, and ``elsewhere`` in other threads and in Dynamo.

    Dynamo traces bodies of control flow, and knows PyTorch's own functions only.
    """
    own = only_in_this_thread(function, elsewhere)

    def choose(*args: Any, **kwargs: Any) -> Any:
        return elsewhere(*args, **kwargs) if torch.compiler.is_dynamo_compiling() else own(*args, **kwargs)

    return choose
