"""Load the target under test: one of a plugin, one given as ``package.module:TARGET``, or eager itself."""

from __future__ import annotations

import difflib
import importlib
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from clika_ref_cli.import_path import find_object

from clika_ref.core.errors import TargetError
from clika_ref.core.registry import Registry
from clika_ref.core.targets import Target, invalid_target_reason
from clika_ref.settings.compile_options import TARGET_DISTRIBUTIONS, full_target_name, target_hint
from clika_ref_conformance.targets.identity import Identity

T = TypeVar("T")

DECLARATIONS = ("name", "arithmetic", "scheme", "deviations")
"""Attributes that a target declares; a property may raise an error."""


def load_target(text: str, registry: Registry) -> Target:
    """Return the target that ``text`` names.

    Args:
        text: the full or short name of an installed target; ``identity`` (eager itself); or ``package.module:TARGET``,
            where ``TARGET`` is a target, its class, or a function that creates one without arguments.
        registry: registry with the installed targets.

    Raises:
        TargetError: there is no such target, it is invalid, one of its members raises an error, or its runtime is
            unavailable.
    """
    target = _find_by_name(text, registry) if ":" not in text else _import_target(text)
    for part in DECLARATIONS:
        _query(text, part, partial(getattr, target, part, None))
    reason = invalid_target_reason(target)
    if reason is not None:
        raise TargetError(f"cannot use the target {text}: {reason}")
    _query(text, "passes()", lambda: list(target.passes()))
    problem = _query(text, "unavailable_reason()", target.unavailable_reason)
    if problem is not None:
        raise TargetError(f"cannot use the target {target.name}: {problem}")
    return target


def find_module_folder(text: str) -> str:
    """Return the folder of the loaded module of ``package.module:TARGET``.

    Empty if any process can import it: it is installed, or ``text`` is the name of a plugin's target.
    """
    module_name, colon, _ = text.partition(":")
    module = importlib.import_module(module_name) if colon else None
    file = getattr(module, "__file__", None)
    if file is None:
        return ""
    folder = str(Path(file).absolute().parents[module_name.count(".") + hasattr(module, "__path__")])
    return "" if folder in map(sysconfig.get_path, ("purelib", "platlib")) else folder


def _query(text: str, part: str, ask: Callable[[], T]) -> T:
    """Return the result of a call to a target.

    Raises:
        TargetError: the call raised an error.
    """
    try:
        return ask()
    except (Exception, SystemExit) as error:
        raise TargetError(
            f"cannot use the target {text}: its {part} raised {type(error).__name__}: {error}. Raise no error before a "
            "graph is compiled, and let unavailable_reason() report a runtime that is not installed."
        ) from error


def _find_by_name(text: str, registry: Registry) -> Target:
    known = {**registry.targets, "identity": Identity()}
    found = known.get(full_target_name(text))
    if found is None:
        near = difflib.get_close_matches(text, known)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        if full_target_name(text) in TARGET_DISTRIBUTIONS:
            hint = f" {target_hint(text)}"
        raise TargetError(
            f"there is no target {text!r}.{hint} Installed: {', '.join(sorted(known))}. "
            "Give a target that is not installed as package.module:TARGET."
        )
    return found


def _import_target(text: str) -> Any:
    module_name, _, path = text.partition(":")
    found = find_object(module_name, path, TargetError)
    if isinstance(found, type) or (callable(found) and not isinstance(found, Target)):
        try:
            return found()
        except (Exception, SystemExit) as error:
            raise TargetError(
                f"cannot create the target {text}: {text}(), without arguments, raised {type(error).__name__}: {error}"
            ) from error
    return found
