"""The user's settings as JSON: their fields, and for deployment settings also their class."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from clika_ref.core.errors import ModelError
from clika_ref.serialization.class_lookup import class_name, find_imported, unknown_class_error
from clika_ref.serialization.graph_format import decode, encode
from clika_ref.settings.compile_options import BaseDeploymentSettings, ClikaCompileOptions
from clika_ref.settings.lora import LoraSettings
from clika_ref.settings.quantization import LayerQuantizationSettings, QuantizationSettings

S = TypeVar("S", QuantizationSettings, LayerQuantizationSettings, ClikaCompileOptions, LoraSettings)

MACHINE_SPECIFIC_OPTIONS = frozenset({"ranges_file"})
"""Options with file names, which another machine does not have."""

NESTED_SETTINGS = {"global_lora_settings": LoraSettings}
"""Options that are settings themselves."""


def settings_to_json(settings: Any) -> dict[str, Any]:
    """Return the fields of settings, except those that name files."""
    fields = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    nested = {name: settings_to_json(fields.pop(name)) for name in NESTED_SETTINGS if fields.get(name) is not None}
    return nested | {name: encode(value) for name, value in fields.items() if name not in MACHINE_SPECIFIC_OPTIONS}


def settings_from_json(kind: type[S], saved: Mapping[str, Any]) -> S:
    """Decode the result of `settings_to_json`; fields added since then get their defaults.

    Raises:
        ModelError: these settings lack a field, or reject its value.
    """
    known = {field.name for field in dataclasses.fields(kind)}
    unknown = sorted(saved.keys() - known)
    if unknown:
        raise ModelError(
            f"cannot load the saved {kind.__name__}: this clika-ref has no field {unknown[0]!r}. Update clika-ref."
        )
    fields: dict[str, Any] = {}
    for name, value in saved.items():
        is_nested = name in NESTED_SETTINGS and isinstance(value, Mapping)
        fields[name] = settings_from_json(NESTED_SETTINGS[name], value) if is_nested else decode(value)
    return kind(**fields)


def deployment_to_json(settings: BaseDeploymentSettings) -> list[Any]:
    """Return deployment settings as their class name and their fields.

    Raises:
        ModelError: the class cannot be found again by its name.
    """
    name = class_name(type(settings))
    if find_imported(name) is not type(settings):
        raise ModelError(
            f"cannot save {settings!r}: only a class at the top level of a module can be loaded again. Move "
            f"{type(settings).__name__} there."
        )
    return [name, settings_to_json(settings)]


def deployment_from_json(saved: list[Any]) -> BaseDeploymentSettings:
    """Decode the result of `deployment_to_json`. The class must already be imported.

    Raises:
        ModelError: the class is not found.
    """
    name, fields = saved
    found = find_imported(name)
    if not (isinstance(found, type) and issubclass(found, BaseDeploymentSettings)):
        raise unknown_class_error("was compiled for", name)
    return found(**{field: decode(value) for field, value in fields.items()})
