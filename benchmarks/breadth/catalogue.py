"""All entries, by library and name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.breadth import (
    audio_models,
    diffusers_models,
    geometric_models,
    small_models,
    timm_models,
    torchvision_models,
    transformers_speech,
    transformers_text,
    transformers_vision,
    ultralytics_models,
)
from benchmarks.breadth.architecture import Architecture

LIBRARIES: Mapping[str, Callable[[], Mapping[str, Architecture]]] = {
    "torchvision": torchvision_models.list_architectures,
    "transformers, text": transformers_text.list_architectures,
    "transformers, vision": transformers_vision.list_architectures,
    "transformers, speech": transformers_speech.list_architectures,
    "timm": timm_models.list_architectures,
    "diffusers": diffusers_models.list_architectures,
    "ultralytics": ultralytics_models.list_architectures,
    "torch_geometric": geometric_models.list_architectures,
    "audio": audio_models.list_architectures,
    "single calls": small_models.list_architectures,
}
"""Functions that list the entries, by the heading that they appear under."""


def list_names() -> list[str]:
    """Return the names of all entries, ``library/name``."""
    return [f"{library}/{name}" for library, entries in LIBRARIES.items() for name in entries()]


def find_architecture(name: str) -> Architecture:
    """Return an entry by its name, ``library/name``.

    Raises:
        KeyError: there is none.
    """
    library, _, own = name.partition("/")
    return LIBRARIES[library]()[own]
