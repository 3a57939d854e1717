"""Import the object that ``package.module:name`` names, from the current folder or the installed packages."""

from __future__ import annotations

import difflib
import functools
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from clika_ref.core.errors import ClikaError


def find_object(place: str, path: str, error: type[ClikaError], remedy: str = "") -> Any:
    """Return the attribute ``path`` (dotted) of the module ``place``.

    Args:
        place: the module.
        path: the attribute, possibly nested.
        error: the class of the error to raise.
        remedy: advice to append to an error that the module itself raised.

    Raises:
        ClikaError: the module cannot be imported, or has no such attribute.
    """
    module = _import(place, error, remedy)
    try:
        return functools.reduce(getattr, path.split("."), module)
    except AttributeError as missing:
        near = difflib.get_close_matches(path, [name for name in vars(module) if not name.startswith("_")])
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        msg = f"{place} ({getattr(module, '__file__', 'built in')}) has no {path!r}{hint}"
        raise error(msg) from missing


def _import(place: str, error: type[ClikaError], remedy: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as missing:
        if missing.name is not None and f"{place}.".startswith(f"{missing.name}."):
            msg = f"no module named {missing.name!r}; run this in the folder that holds it, or install it"
            raise error(msg) from missing
        msg = f"{place} imports {missing.name!r}, which is not installed"
        raise error(msg) from missing
    except (Exception, SystemExit) as raised:
        msg = f"importing {place} raised {type(raised).__name__}: {raised}{remedy}"
        raise error(msg) from raised
