"""Write settings as YAML that reads back as equal settings."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML

from clika_ref.settings.compile_options import BaseDeploymentSettings
from clika_ref.settings.yaml_reader import (
    DEPLOYMENT_SECTION,
    FRAMEWORK_FIELD,
    LORA_SECTION,
    METHOD_FIELD,
    OPTIONS_SECTION,
    QAT_METHOD,
    QUANTIZATION_SECTION,
    SETTINGS_BY_FRAMEWORK,
)

YAML_WIDTH = 120


def to_yaml_text(sections: Mapping[str, Any]) -> str:
    """Return sections as a YAML document. Each is a settings object, a mapping of them, or None."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.representer.sort_base_mapping_type_on_output = False
    yaml.width = YAML_WIDTH
    text = io.StringIO()
    yaml.dump({name: _section(name, settings) for name, settings in sections.items()}, text)
    return text.getvalue()


def _section(name: str, settings: Any) -> Any:
    if settings is None:
        return None
    fields = _to_plain_data(settings)
    if name == DEPLOYMENT_SECTION:
        return {FRAMEWORK_FIELD: _framework(settings), **fields}
    if name == OPTIONS_SECTION:
        del fields[LORA_SECTION]  # LORA is a section of its own
    return {METHOD_FIELD: QAT_METHOD, **fields} if name == QUANTIZATION_SECTION else fields


def _framework(settings: BaseDeploymentSettings) -> str:
    named = [name for name, kind in SETTINGS_BY_FRAMEWORK.items() if kind is type(settings)]
    return named[0] if named else settings.target


def _to_plain_data(value: Any) -> Any:
    """Return a value as built-in types: settings may hold NumPy numbers and paths."""
    if dataclasses.is_dataclass(value):
        return {of.name: _to_plain_data(getattr(value, of.name)) for of in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _to_plain_data(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain_data(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value
