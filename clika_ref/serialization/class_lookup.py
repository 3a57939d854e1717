"""Classes of the user by name, looked up in imported modules. Reading a file never imports a module."""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping
from typing import Any

from clika_ref.core.errors import ModelError


def class_name(cls: type[Any]) -> str:
    """Return ``module:Outer.Inner``, the name that `find_imported` looks up."""
    return f"{cls.__module__}:{cls.__qualname__}"


def find_imported(name: str) -> Any:
    """Return the object with this name, or None if its module is not imported or lacks it."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for step in path.split("."):
        found = vars(found).get(step) if hasattr(found, "__dict__") else None
    return found


def unknown_class_error(relation: str, name: str) -> ModelError:
    """Return the error for a saved model that needs a class unknown to this process."""
    return ModelError(
        f"cannot load the saved model: it {relation} a {name.replace(':', '.')}, but this process has no such "
        f"class. Import the module that defines it first (here {name.partition(':')[0]})."
    )


def encode_member(member: enum.Enum) -> list[str]:
    """Return an enum member as the names of its class and of itself.

    Raises:
        ModelError: the member cannot be found again by these names.
    """
    name = class_name(type(member))
    if find_imported(name) is not type(member) or type(member).__members__.get(member.name) is not member:
        raise ModelError(
            f"cannot save {member!r}, a {type(member).__name__}: only members of enums at the top level of a "
            "module can be loaded again. Move the enum there."
        )
    return [name, member.name]


def decode_member(saved: list[str]) -> enum.Enum:
    """Decode the result of `encode_member`.

    Raises:
        ModelError: the class is not imported, or lacks the member.
    """
    name, member = saved
    found = find_imported(name)
    members: Mapping[str, Any] = getattr(found, "__members__", {}) if isinstance(found, enum.EnumMeta) else {}
    if member not in members:
        raise unknown_class_error(f"was compiled for {member} of", name)
    return members[member]
