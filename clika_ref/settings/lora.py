"""Settings of low-rank adapters: the layers, the rank, and how exports treat the adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from clika_ref.settings.validation import CheckedSettings, check_threshold, is_integer

Merging = Literal["auto", "on", "off"]
"""How adapters are exported: merged into the weights if these are float, always, or never."""

ALL_LAYERS = "*"
"""The wildcard that matches every layer."""


def _check_rank(value: Any) -> str:
    return "" if is_integer(value) and value >= 1 else "a whole number from 1"


def _check_alpha(value: Any) -> str:
    return "" if not check_threshold(value) and value > 0 else "a number above 0"


def _check_rate(value: Any) -> str:
    return "" if not check_threshold(value) and value < 1 else "a number from 0, below 1"


def _check_target_layers(value: Any) -> str:
    is_list = isinstance(value, list | tuple) and value and all(isinstance(name, str) and name for name in value)
    return "" if is_list else "a list of layer names, ends of module paths, or wildcards"


def _check_merging(value: Any) -> str:
    return "" if value in get_args(Merging) else ", ".join(map(repr, get_args(Merging)))


@dataclass
class LoraSettings(CheckedSettings):
    """Which layers get a low-rank adapter. Fields may be assigned later; each value is checked on assignment.

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models (2021), section 4.

    Raises:
        ModelError: a value has the wrong type.
    """

    rank: int = 2
    """The rank of the adapter: the inner dim of its two matrices, per group of a convolution."""

    alpha: float = 1.0
    """The output of an adapter is scaled by ``alpha / rank``."""

    dropout_rate: float = 0.05
    """The share of the adapter's inputs that dropout zeroes, in training mode only."""

    target_layers: list[str] = field(default_factory=lambda: [ALL_LAYERS])
    """Module paths, which select all layers within, path suffixes (``"q_proj"``), node names, or any of these with
    wildcards.
    """

    merging: Merging = "auto"
    """How an adapter is exported: ``"on"`` merges it into the weight; ``"off"`` keeps it as two matrix products in
    parallel to the layer; ``"auto"`` merges it in a float model, and keeps it in parallel in a quantized one, so that
    the quantized weights do not change.
    """

    _checks: ClassVar[Mapping[str, Callable[[Any], str]]] = {
        "rank": _check_rank,
        "alpha": _check_alpha,
        "dropout_rate": _check_rate,
        "target_layers": _check_target_layers,
        "merging": _check_merging,
    }
