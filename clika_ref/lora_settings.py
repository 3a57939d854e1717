"""What the user may choose of low-rank adapters: which layers get one, of which rank, and what exports make of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from clika_ref.checked_settings import CheckedSettings, threshold

Merging = Literal["auto", "on", "off"]
"""Of adapters where a model is written: merged into weights as long as these are float, always, or never."""

ALL = "*"
"""The wildcard that names every layer."""


def _rank(value: Any) -> str:
    return "" if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else "a whole number from 1"


def _alpha(value: Any) -> str:
    return "" if not threshold(value) and value > 0 else "a number above 0"


def _rate(value: Any) -> str:
    return "" if not threshold(value) and value < 1 else "a share from 0, below 1"


def _layers(value: Any) -> str:
    is_list = isinstance(value, list | tuple) and value and all(isinstance(name, str) and name for name in value)
    return "" if is_list else "a list of names of layers, ends of their paths, or wildcards"


def _merging(value: Any) -> str:
    return "" if value in get_args(Merging) else ", ".join(map(repr, get_args(Merging)))


@dataclass
class LoraSettings(CheckedSettings):
    """Which layers get a low-rank adapter. A field may be assigned later; each value is checked as it is set.

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models (2021), section 4.

    Raises:
        ModelError: a value is of another kind.
    """

    rank: int = 2
    """How many numbers stand between the two matrices of an adapter, for each group of a convolution."""

    alpha: float = 1.0
    """What an adapter adds is multiplied by ``alpha / rank``."""

    dropout_rate: float = 0.05
    """The share of what an adapter reads that counts as 0, in training mode only."""

    target_layers: list[str] = field(default_factory=lambda: [ALL])
    """Paths of modules, which stand for all layers within, their ends (``"q_proj"``), names of nodes, or either with
    wildcards."""

    merging: Merging = "auto"
    """What becomes of an adapter where the model is written: ``"on"`` adds it to the weight, ``"off"`` leaves it beside
    the layer, as two products of its own; ``"auto"`` adds it where the model is float, and leaves it beside integers,
    which stay what they are."""

    _checks: ClassVar[Mapping[str, Callable[[Any], str]]] = {
        "rank": _rank,
        "alpha": _alpha,
        "dropout_rate": _rate,
        "target_layers": _layers,
        "merging": _merging,
    }
