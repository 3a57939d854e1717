"""L4n: float calls between quantized and float neighbors, whose precision a runtime must not change."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from clika_ref.core.operators import Operator
from clika_ref_conformance.cases import Check, Task
from clika_ref_conformance.drawing.calls.covering import draw_covering_calls
from clika_ref_conformance.drawing.calls.dtypes import select_dtypes
from clika_ref_conformance.drawing.quantized.neighborhoods import make_neighborhood_cases
from clika_ref_conformance.execution.case_packs import make_packed_checks
from clika_ref_conformance.suite import Suite

LEVEL = "neighborhoods"

MAX_CALLS = 3
"""Maximum number of calls of an operator: fusions depend on operators and constants more than on sizes."""

QDQ_OPERATORS = frozenset({"quantize", "dequantize"})
"""Operators that make the neighborhoods; the level `quantization` checks them."""


def tasks(suite: Suite) -> list[Task]:
    """Return one task for each operator that takes float32.

    There are none if the target has no quantization scheme, or the two operators of quantization are not declared.
    """
    operators = suite.registry.operators
    if suite.target.scheme is None or not operators.keys() >= QDQ_OPERATORS:
        return []
    return [Task(LEVEL, op.name, "float32") for op in operators.values() if _is_judged(op)]


def _is_judged(op: Operator) -> bool:
    """Return whether an operator takes float32, and gives the same results in each run."""
    if op.sampler is None or op.random or op.name in QDQ_OPERATORS:
        return False
    return torch.float32 in select_dtypes(op, (torch.float32,))


def checks(task: Task, suite: Suite) -> Sequence[Check]:
    """Return one check, in packs, for each call of an operator in each neighborhood."""
    op, seed = suite.registry.operators[task.subject], suite.profile.seed
    calls = draw_covering_calls(op, torch.float32, seed, MAX_CALLS)
    cases = [
        case
        for index, drawn in enumerate(calls)
        for case in make_neighborhood_cases(op, drawn.call, f"call-{index}", suite.registry, seed)
    ]
    return make_packed_checks(cases, suite)
