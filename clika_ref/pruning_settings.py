"""What the user may choose of pruning: for the whole model, and for single layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from clika_ref.checked_settings import CheckedSettings, flag, threshold
from clika_ref.core.errors import ModelError

UNSTRUCTURED, STRUCTURED = "unstructured", "structured"

SINGLE = "1:1"
"""Of the record: each weight goes or stays by itself, which is `UNSTRUCTURED`."""

MASK_TYPES = '"structured", "unstructured" (or "1:1"), or "N:M" for N weights of every M that stay, such as "2:4"'


def pattern(mask_type: str) -> tuple[int, int] | None:
    """Return N and M of a mask that keeps N weights of every M, None of another mask.

    >>> pattern("2:4"), pattern("structured")
    ((2, 4), None)
    """
    found = re.fullmatch(r"([1-9][0-9]{0,3}):([1-9][0-9]{0,3})", mask_type)
    return (int(found[1]), int(found[2])) if found and mask_type != SINGLE else None


def _mask_type(value: Any) -> str:
    if not isinstance(value, str):
        return MASK_TYPES
    if value in (UNSTRUCTURED, STRUCTURED, SINGLE):
        return ""
    kept = pattern(value)
    return "" if kept and kept[0] < kept[1] else MASK_TYPES


def _limit(value: Any) -> str:
    wanted = threshold(value)
    return f"{wanted}, or None for no limit" if value is not None and wanted else ""


def _share(value: Any) -> str:
    is_share = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1
    return "" if value is None or is_share else "a share between 0 and 1, or None for as much as the threshold lets"


@dataclass
class PruningSettings(CheckedSettings):
    """How far a model is pruned. A field may be assigned later; each value is checked as it is set.

    That something limits what goes is checked when they are made and when they are used, as fields are assigned one by
    one.

    Raises:
        ModelError: a value is of another kind, or contradicts another one.
    """

    mask_type: str = SINGLE
    """What goes: ``"structured"`` removes channels and heads, and makes the model smaller and faster;
    ``"unstructured"`` (or ``"1:1"``) makes single weights zeros, those of least magnitude; ``"2:4"`` keeps 2 of every 4
    that are multiplied one after another, and any ``"N:M"`` N of every M."""

    pruning_sensitivity_threshold: float | None = 0.001
    """A layer loses what by itself changes the outputs by no larger share of their square; None for no limit."""

    sparsity: float | None = None
    """The share of each layer that goes at most, and that does go where the threshold is None; None for any."""

    _checks: ClassVar[Mapping[str, Callable[[Any], str]]] = {
        "mask_type": _mask_type,
        "pruning_sensitivity_threshold": _limit,
        "sparsity": _share,
    }

    def _contradiction(self) -> str:
        if pattern(self.mask_type) and self.sparsity is not None:
            return f"mask_type={self.mask_type!r} says which share stays, and sparsity too; leave sparsity out"
        return ""

    def __post_init__(self) -> None:
        self._refuse_no_limit()

    def check(self) -> None:
        """Check all fields again.

        Raises:
            ModelError: a value is of another kind, contradicts another one, or nothing limits what goes.
        """
        super().check()
        self._refuse_no_limit()

    def _refuse_no_limit(self) -> None:
        if not pattern(self.mask_type) and self.sparsity is None and self.pruning_sensitivity_threshold is None:
            msg = (
                "PruningSettings: pruning_sensitivity_threshold=None sets no limit to what goes; give sparsity, the "
                "share that does"
            )
            raise ModelError(msg)


@dataclass
class LayerPruningSettings(CheckedSettings):
    """What is otherwise for one layer; None leaves what the model has.

    Raises:
        ModelError: a value is of another kind, or contradicts another one.
    """

    skip_pruning: bool = False
    """Let the layer keep all that it returns, and all weights of these; what it reads may go with the layers before."""

    mask_type: str | None = None
    """What goes, as for the model."""
    pruning_sensitivity_threshold: float | None = None
    """The share of the outputs' square that may change by what goes of this layer."""
    sparsity: float | None = None
    """The share of it that goes at most."""

    _checks: ClassVar[Mapping[str, Callable[[Any], str]]] = {
        "skip_pruning": flag,
        "mask_type": lambda value: "" if value is None else _mask_type(value),
        "pruning_sensitivity_threshold": _limit,
        "sparsity": _share,
    }

    def _contradiction(self) -> str:
        others = (self.mask_type, self.pruning_sensitivity_threshold, self.sparsity)
        if self.skip_pruning and any(value is not None for value in others):
            return "a layer that is skipped has no mask_type, threshold or sparsity; leave one of them out"
        if self.mask_type is not None and pattern(self.mask_type) and self.sparsity is not None:
            return f"mask_type={self.mask_type!r} says which share stays, and sparsity too; leave sparsity out"
        return ""
