"""Names of operators that one function declares for all members of a family, such as the pooling of 1, 2 and 3 dims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def name_reference(
    name: str, doc: str, *, returns_pair: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives an operator's reference its ``name``, docstring and type of results.

    The operator must be a global of the reference's module under this name, since pickle looks it up there.
    """

    def rename(reference: Callable[..., Any]) -> Callable[..., Any]:
        reference.__name__ = reference.__qualname__ = name
        reference.__doc__ = doc
        if returns_pair:
            reference.__annotations__["return"] = "tuple[Tensor, Tensor]"
        return reference

    return rename
