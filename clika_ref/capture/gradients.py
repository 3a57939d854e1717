"""Which classes of ``torch.autograd.Function`` a model calls: tracers keep their forward and lose their backward."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch.autograd import Function

from clika_ref.capture.watching import line_of

RECOMPUTING = "torch.utils.checkpoint"
"""The module whose backward only computes the forward again: nothing is lost with it."""


@contextlib.contextmanager
def custom_gradients() -> Iterator[dict[str, None]]:
    """Yield what to warn of, one text for each class and line that calls it while the context lasts."""
    found: dict[str, None] = {}
    original: Any = Function.__dict__["apply"]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if cls.__module__ != RECOMPUTING:
            line = line_of(sys._getframe(1))
            # Dynamo's graph has a class of PyTorch's own in place of the user's, and no line.
            found[_warning(cls.__name__ if line else "A class that Dynamo does not name", line)] = None
        return original.__get__(None, cls)(*args, **kwargs)

    Function.apply = classmethod(apply)  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Function.apply = original


def _warning(name: str, line: str | None) -> str:
    called = f" called at {line}" if line else ""
    return (
        f"{name}, a torch.autograd.Function{called}, keeps its forward and loses its backward: in training the "
        "compiled module differentiates the forward itself, which gives no gradient where that rounds or compares. "
        "Results and exports are not affected; to train with that gradient, write it as operations, such as "
        "x + (round(x) - x).detach()"
    )
