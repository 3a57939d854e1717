"""Patch attributes of PyTorch temporarily, for the current thread only."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
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
