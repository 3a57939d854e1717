"""Write settings as YAML that reads back as equal settings."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import yaml

from clika_ref.settings import BaseDeploymentSettings
from clika_ref.settings_file.reading import (
    DEPLOYMENT,
    FRAMEWORK,
    FRAMEWORKS,
    LORA,
    METHOD,
    OPTIONS,
    QUANTIZATION,
    TRAINED,
)
from clika_ref.settings_file.tree import scalar

WIDTH = 120


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes each string that would otherwise be read as another type."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    is_text = isinstance(scalar(text), str)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_text else "'")


_Dumper.add_representer(str, _text)


def as_yaml(sections: Mapping[str, Any]) -> str:
    """Return sections as a YAML document. Each is a settings object, a mapping of them, or None."""
    document = {name: _section(name, settings) for name, settings in sections.items()}
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=WIDTH)


def _section(name: str, settings: Any) -> Any:
    if settings is None:
        return None
    fields = _plain(settings)
    if name == DEPLOYMENT:
        return {FRAMEWORK: _framework(settings), **fields}
    if name == OPTIONS:
        del fields[LORA]  # LORA is a section of its own
    return {METHOD: TRAINED, **fields} if name == QUANTIZATION else fields


def _framework(settings: BaseDeploymentSettings) -> str:
    named = [name for name, kind in FRAMEWORKS.items() if kind is type(settings)]
    return named[0] if named else settings.target


def _plain(value: Any) -> Any:
    """Return a value as built-in types: settings may hold NumPy numbers and paths."""
    if dataclasses.is_dataclass(value):
        return {of.name: _plain(getattr(value, of.name)) for of in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(held) for name, held in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(held) for held in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value
