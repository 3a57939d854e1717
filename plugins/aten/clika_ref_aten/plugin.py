"""The plugin entry point: all operators that the modules of this package declare."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from clika_ref.core.hooks import hookimpl
from clika_ref.core.operators import Operator

if TYPE_CHECKING:
    from collections.abc import Sequence

CLIKA_REF_API = 1

FAMILIES = sorted(m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]) if m.name != "plugin")
"""The modules of this package; each declares one family of operators."""


@hookimpl
def clika_ref_operators() -> Sequence[Operator]:
    """Return the operators of all families."""
    modules = [import_module(f"clika_ref_aten.{name}") for name in FAMILIES]
    return [item for module in modules for item in vars(module).values() if isinstance(item, Operator)]
