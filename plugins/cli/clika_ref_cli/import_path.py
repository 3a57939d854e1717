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


def find_object(module_name: str, path: str, error: type[ClikaError], remedy: str = "") -> Any:
    """Return the attribute ``path`` (dotted) of a module.

    Args:
        module_name: the module.
        path: the attribute, possibly nested.
        error: the class of the error to raise.
        remedy: a sentence to append to the message of an error that the module itself raised.

    Raises:
        ClikaError: the module cannot be imported, or has no such attribute.
    """
    module = _import(module_name, error, remedy)
    try:
        return functools.reduce(getattr, path.split("."), module)
    except AttributeError as missing:
        near = difflib.get_close_matches(path, [name for name in vars(module) if not name.startswith("_")])
        hint = f"Did you mean {' or '.join(near)}?" if near else "Check the spelling."
        raise error(
            f"cannot load {module_name}:{path}: {getattr(module, '__file__', module_name)} has no {path!r}. {hint}"
        ) from missing


def describe_raised(error: BaseException) -> str:
    """Return the class and the text of an error that code of the user raised, for a message."""
    return f"it raised {type(error).__name__}: {str(error).rstrip('.')}"


def _import(module_name: str, error: type[ClikaError], remedy: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        if missing.name is not None and f"{module_name}.".startswith(f"{missing.name}."):
            reason = f"there is no module {missing.name!r}"
            raise error(f"cannot import {module_name}: {reason}. Run this in its folder, or install it.") from missing
        raise error(
            f"cannot import {module_name}: it imports {missing.name!r}, which is not installed. Install it."
        ) from missing
    except (Exception, SystemExit) as raised:
        raise error(f"cannot import {module_name}: {describe_raised(raised)}. {remedy}".rstrip()) from raised
