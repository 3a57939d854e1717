"""Which classes of ``torch.autograd.Function`` a model calls: tracers keep their forward and lose their backward."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch.autograd import Function

from clika_ref.capture.origins import short_line

RECOMPUTING = "torch.utils.checkpoint"
"""The module whose backward only computes the forward again: nothing is lost with it."""


@contextlib.contextmanager
def custom_gradients() -> Iterator[dict[str, None]]:
    """Yield what to warn of, one text for each class and line that calls it while the context lasts."""
    found: dict[str, None] = {}
    original: Any = Function.__dict__["apply"]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if cls.__module__ != RECOMPUTING:
            caller = sys._getframe(1)
            found[_warning(cls.__name__, short_line(caller.f_code.co_filename, caller.f_lineno))] = None
        return original.__get__(None, cls)(*args, **kwargs)

    Function.apply = classmethod(apply)  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Function.apply = original


def _warning(name: str, line: str) -> str:
    return (
        f"{name}, a torch.autograd.Function called at {line}, keeps its forward and loses its backward: in training "
        "the compiled module differentiates the forward itself, which gives no gradient where that rounds or compares. "
        "Results and exports are not affected; to train with that gradient, write it as operations, such as "
        "x + (round(x) - x).detach()"
    )
