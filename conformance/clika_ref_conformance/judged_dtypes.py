"""Dtypes that the suite judges, and the outcome for operators and graphs that need other dtypes."""

from __future__ import annotations

import torch

from clika_ref.core.ir import Graph, Value
from clika_ref_conformance.profiles import ALL_DTYPES
from clika_ref_conformance.verdicts import Comparison, Reason, make_not_run

JUDGED_DTYPES = tuple(getattr(torch, name) for name in (*ALL_DTYPES, "int16"))
"""Columns of the profiles, and int16, which is drawn when samples list it together with others."""


def is_judged(dtype: torch.dtype) -> bool:
    """Return whether the suite has vectors, bounds and comparisons for a dtype."""
    return dtype in JUDGED_DTYPES


def make_unjudged_comparison(operator: str, dtype: torch.dtype) -> Comparison:
    """Return the not-run comparison for an operator with an operand or result of a dtype that is not judged."""
    known = ", ".join(_dtype_name(d) for d in JUDGED_DTYPES)
    message = (
        f"{operator} takes or returns {_dtype_name(dtype)}, which the suite does not judge. Let its samples draw calls "
        f"with only {known}, or compare it with eager in your own test."
    )
    return make_not_run(Reason.UNJUDGED_DTYPE, message)


def check_judged_dtypes(graph: Graph) -> Comparison | None:
    """Return the not-run comparison for the first node with a dtype that is not judged; None if there is none."""
    for node in graph.nodes:
        for value in (*node.inputs, *node.outputs):
            if isinstance(value, Value) and not is_judged(value.type.dtype):
                return make_unjudged_comparison(node.op.name, value.type.dtype)
    return None


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
