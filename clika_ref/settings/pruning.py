"""Settings of pruning: for the whole model, and for single layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from clika_ref.core.errors import ModelError
from clika_ref.settings.validation import CheckedSettings, check_flag, check_threshold, is_number, make_optional

UNSTRUCTURED, STRUCTURED = "unstructured", "structured"

UNSTRUCTURED_ALIAS = "1:1"
"""The name in clika-ace: each weight is masked individually, the same as `UNSTRUCTURED`."""

ACCEPTED_MASK_TYPES = '"structured", "unstructured" (or "1:1"), or "N:M" to keep N of every M weights, such as "2:4"'


def parse_pattern(mask_type: str) -> tuple[int, int] | None:
    """Return N and M of a mask that keeps N weights of every M, None for any other mask.

    >>> parse_pattern("2:4"), parse_pattern("structured")
    ((2, 4), None)
    """
    found = re.fullmatch(r"([1-9][0-9]{0,3}):([1-9][0-9]{0,3})", mask_type)
    return (int(found[1]), int(found[2])) if found and mask_type != UNSTRUCTURED_ALIAS else None


def _check_mask_type(value: Any) -> str:
    if not isinstance(value, str):
        return ACCEPTED_MASK_TYPES
    if value in (UNSTRUCTURED, STRUCTURED, UNSTRUCTURED_ALIAS):
        return ""
    kept = parse_pattern(value)
    return "" if kept and kept[0] < kept[1] else ACCEPTED_MASK_TYPES


_check_optional_threshold = make_optional(check_threshold, "for no limit")


def _check_sparsity(value: Any) -> str:
    is_share = is_number(value) and 0 < value < 1
    return (
        ""
        if value is None or is_share
        else "a number between 0 and 1, or None to prune as much as the threshold allows"
    )


@dataclass
class PruningSettings(CheckedSettings):
    """How to prune a model. Fields may be assigned later; each value is checked on assignment.

    Fields are assigned one by one, so the settings are checked for a limit only on construction and before use.

    Raises:
        ModelError: a value has the wrong type, or contradicts another one.
    """

    mask_type: str = UNSTRUCTURED_ALIAS
    """How to prune: ``"structured"`` removes channels and heads, and makes the model smaller and faster;
    ``"unstructured"`` (or ``"1:1"``) masks the single weights of least magnitude; ``"2:4"`` keeps 2 of every 4
    consecutive weights along the reduction dim, and any ``"N:M"`` N of every M.
    """

    pruning_sensitivity_threshold: float | None = 0.001
    """Maximum relative squared error of the outputs that pruning one layer alone may cause; None for no limit."""

    sparsity: float | None = None
    """Maximum share of each layer to prune, and the exact share if the threshold is None; None for no limit."""

    _checks: ClassVar[Mapping[str, Callable[[Any], str]]] = {
        "mask_type": _check_mask_type,
        "pruning_sensitivity_threshold": _check_optional_threshold,
        "sparsity": _check_sparsity,
    }

    def _find_contradiction(self) -> str:
        if parse_pattern(self.mask_type) and self.sparsity is not None:
            return f"mask_type={self.mask_type!r} defines the sparsity already. Remove sparsity."
        return ""

    def __post_init__(self) -> None:
        self._require_limit()

    def check(self) -> None:
        """Check all fields again.

        Raises:
            ModelError: a value has the wrong type, contradicts another one, or nothing limits the pruning.
        """
        super().check()
        self._require_limit()

    def _require_limit(self) -> None:
        if not parse_pattern(self.mask_type) and self.sparsity is None and self.pruning_sensitivity_threshold is None:
            raise ModelError(
                "pruning_sensitivity_threshold=None sets no limit, so that everything could be pruned. Give "
                "sparsity, the share to prune."
            )


@dataclass
class LayerPruningSettings(CheckedSettings):
    """Overrides for one layer; None keeps the setting of the model.

    Raises:
        ModelError: a value has the wrong type, or contradicts another one.
    """

    skip_pruning: bool = False
    """Keep all outputs and weights of the layer; its inputs may still shrink with the layers before it."""

    mask_type: str | None = None
    """How to prune, as for the model."""
    pruning_sensitivity_threshold: float | None = None
    """Maximum relative squared error of the outputs that pruning this layer may cause, as for the model."""
    sparsity: float | None = None
    """Maximum share of this layer to prune."""

    _checks: ClassVar[Mapping[str, Callable[[Any], str]]] = {
        "skip_pruning": check_flag,
        "mask_type": lambda value: "" if value is None else _check_mask_type(value),
        "pruning_sensitivity_threshold": _check_optional_threshold,
        "sparsity": _check_sparsity,
    }

    def _find_contradiction(self) -> str:
        others = (self.mask_type, self.pruning_sensitivity_threshold, self.sparsity)
        if self.skip_pruning and any(value is not None for value in others):
            return "a skipped layer has no mask_type, threshold or sparsity. Remove one of them."
        if self.mask_type is not None and parse_pattern(self.mask_type) and self.sparsity is not None:
            return f"mask_type={self.mask_type!r} defines the sparsity already. Remove sparsity."
        return ""
