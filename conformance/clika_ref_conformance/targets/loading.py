"""The target under test: one that a plugin provides, one given as ``package.module:TARGET``, or eager itself."""

from __future__ import annotations

import difflib
import functools
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from clika_ref.core.errors import TargetError
from clika_ref.core.registry import Registry
from clika_ref.core.targets import Target
from clika_ref_conformance.targets.identity import Identity

PARTS = ("name", "scheme", "missing", "refusal", "passes", "compile", "load", "explain")
"""What the suite asks of a target: all that `clika_ref.core.targets.Target` offers."""


def load_target(text: str, registry: Registry) -> Target:
    """Return the target that ``text`` names.

    Args:
        text: the name of an installed target, ``identity`` (eager itself), or ``package.module:TARGET``, where
            ``TARGET`` is a target, or its class or a function that makes one without arguments.
        registry: where installed targets are found.

    Raises:
        TargetError: there is no such target, it lacks a part, or its runtime is missing.

    """
    target = _named(text, registry) if ":" not in text else _imported(text)
    lacking = [part for part in PARTS if not hasattr(target, part)]
    if lacking:
        msg = f"{text} is {target!r}, which lacks {', '.join(lacking)}; see clika_ref.core.targets.Target"
        raise TargetError(msg)
    problem = target.missing()
    if problem is not None:
        msg = f"the target {target.name} cannot be used here: {problem}"
        raise TargetError(msg)
    return target


def _named(text: str, registry: Registry) -> Target:
    known = {**registry.targets, "identity": Identity()}
    if text not in known:
        near = difflib.get_close_matches(text, known)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        msg = (
            f"no target is called {text!r}; {hint}Installed are {', '.join(sorted(known))}. "
            "One that is not installed as a plugin is given as package.module:TARGET."
        )
        raise TargetError(msg)
    return known[text]


def _imported(text: str) -> Any:
    place, _, path = text.partition(":")
    module = _import(place)
    try:
        found = functools.reduce(getattr, path.split("."), module)
    except AttributeError as error:
        near = difflib.get_close_matches(path, [name for name in vars(module) if not name.startswith("_")])
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        msg = f"{place} ({getattr(module, '__file__', 'built in')}) has no {path!r}{hint}"
        raise TargetError(msg) from error
    if isinstance(found, type) or (callable(found) and not hasattr(found, "compile")):
        try:
            return found()
        except Exception as error:
            msg = f"{text}() raised {type(error).__name__}: {error}; it is called without arguments"
            raise TargetError(msg) from error
    return found


def _import(place: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{place}.".startswith(f"{error.name}."):
            msg = f"no module named {error.name!r}; run this in the folder that holds it, or install it"
            raise TargetError(msg) from error
        msg = f"{place} imports {error.name!r}, which is not installed"
        raise TargetError(msg) from error
    except Exception as error:
        msg = f"importing {place} raised {type(error).__name__}: {error}"
        raise TargetError(msg) from error
