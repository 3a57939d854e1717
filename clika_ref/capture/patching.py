"""Patch attributes of PyTorch temporarily, for the current thread only."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

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


def only_in_this_thread(function: Callable[..., Any], elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``function`` in this thread, and ``elsewhere`` in other threads."""
    thread = threading.get_ident()

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        return (function if threading.get_ident() == thread else elsewhere)(*args, **kwargs)

    return dispatch
