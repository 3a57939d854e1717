"""Write numbers that JSON lacks as strings: a bound may be infinite, an error NaN."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from clika_ref_conformance.reproducing.errors import ReportError

_NON_FINITE_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def to_json(item: Any) -> Any:
    """Return JSON-serializable data: ``nan``, ``inf`` and ``-inf`` as strings, sequences as lists."""
    if isinstance(item, float) and not math.isfinite(item):
        return str(item)
    if isinstance(item, Mapping):
        return {str(key): to_json(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return [to_json(value) for value in item]
    return item


def read_number(item: Any, name: str) -> float:
    """Return a number that `to_json` wrote.

    Raises:
        ReportError: it is not a number.
    """
    if isinstance(item, bool) or not isinstance(item, int | float):
        if item in _NON_FINITE_WORDS:
            return _NON_FINITE_WORDS[item]
        raise ReportError(f"{name} is {item!r}, not a number")
    return float(item)
