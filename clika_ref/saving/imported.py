"""The user's classes by name: looked up among the modules that are imported, which nothing read adds to."""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping
from typing import Any

from clika_ref.core.errors import ModelError


def class_name(cls: type[Any]) -> str:
    """Return ``module:Outer.Inner``, by which `find_imported` finds a class again."""
    return f"{cls.__module__}:{cls.__qualname__}"


def find_imported(name: str) -> Any:
    """Return what an imported module holds under a name; None where there is nothing, or the module is not imported."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for step in path.split("."):
        found = vars(found).get(step) if hasattr(found, "__dict__") else None
    return found


def unknown_class(what: str, name: str) -> ModelError:
    """Return the error for a saved model that needs a class which this process does not have."""
    return ModelError(
        f"the saved model {what} a {name.replace(':', '.')}, which this process does not know: "
        f"import the module that defines it first (here {name.partition(':')[0]})"
    )


def encode_member(member: enum.Enum) -> list[str]:
    """Return a member of an enumeration by the names of its class and its own.

    Raises:
        ModelError: nothing would find it under them.
    """
    name = class_name(type(member))
    if find_imported(name) is not type(member) or type(member).__members__.get(member.name) is not member:
        msg = (
            f"{member!r}, a {type(member).__name__}, cannot be saved: only a named member of an enumeration that a "
            "module defines at its top level is found again"
        )
        raise ModelError(msg)
    return [name, member.name]


def decode_member(saved: list[str]) -> enum.Enum:
    """Return what `encode_member` was given.

    Raises:
        ModelError: the class is not imported, or lacks the member.
    """
    name, member = saved
    found = find_imported(name)
    members: Mapping[str, Any] = getattr(found, "__members__", {}) if isinstance(found, enum.EnumMeta) else {}
    if member not in members:
        raise unknown_class(f"was compiled for {member} of", name)
    return members[member]
