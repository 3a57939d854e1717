"""What is replaced in PyTorch for a time: put back whatever happens, and only this thread meets it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_INHERITED = object()
"""Stands for what a class does not define itself."""


@contextlib.contextmanager
def replaced(replacements: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """Let attributes of classes and modules be others, for as long as the context lasts.

    What a model calls may replace the same ones meanwhile, as where it compiles another: each leaves what it found.
    """
    with contextlib.ExitStack() as stack:
        for (owner, name), replacement in replacements.items():
            stack.callback(_put, owner, name, vars(owner).get(name, _INHERITED))
            setattr(owner, name, replacement)
        yield


def _put(owner: Any, name: str, value: Any) -> None:
    if value is not _INHERITED:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)


def in_this_thread(function: Callable[..., Any], elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that other threads, which run something else, find to be what it was ``elsewhere``."""
    thread = threading.get_ident()

    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (function if threading.get_ident() == thread else elsewhere)(*args, **kwargs)

    return chosen
