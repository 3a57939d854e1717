"""The plugin entry point: the operators of torchvision, and forms of its functions for traces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clika_ref.core.hooks import hookimpl
from clika_ref.core.operators import Operator
from clika_ref_torchvision import deformable, regions, suppression, tracing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

CLIKA_REF_API = 1


@hookimpl
def clika_ref_operators() -> Sequence[Operator]:
    """Return the operators of all modules."""
    modules = (suppression, regions, deformable)
    return [item for module in modules for item in vars(module).values() if isinstance(item, Operator)]


@hookimpl
def clika_ref_tracing() -> Sequence[Callable[[], AbstractContextManager[None]]]:
    """Return the context that replaces functions of torchvision's detectors."""
    return [tracing.use_dynamic_forms]
