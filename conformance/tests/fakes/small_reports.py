"""Small runs with passed and failed results, and their records."""

import math
from dataclasses import replace

from clika_ref_conformance.cases import Task
from clika_ref_conformance.record import CheckResult, RunRecord
from clika_ref_conformance.verdicts import Comparison, Verdict

RELU = Task("operators", "relu", "float32")
SUM = Task("operators", "sum", "float32")
SUM_DYNAMIC = Task("dynamic", "sum", "float32", dynamic=True)
FOLD = Task("passes", "fold-batch-norm")


def make_passed_result(task, name, ratio=0.5, quality=1.0):
    """Return a check that passed."""
    comparison = Comparison(Verdict.PASS, "", 1e-7, 2e-7, ratio, quality, elements=6, ambiguous=1)
    return CheckResult(task, name, comparison, "typical", {"x": "[2, 3]"}, seconds=0.25)


def make_failed_result(task, name, verdict=Verdict.VALUE, ratio=9.0, reproducer=""):
    """Return a check that failed."""
    comparison = Comparison(verdict, f"off by {ratio}", 3.0, math.inf, ratio, math.nan, elements=6)
    return CheckResult(task, name, comparison, "nan-first", {"dim": "-1"}, seconds=0.5, reproducer=reproducer)


def record(*results, **changes):
    """Return the record of a run with these results."""
    plan = {}
    for result in results:
        plan.setdefault(result.task, []).append(result.name)
    deviations = [
        {"id": "one-sided-clip", "reason": "no NaN", "link": "https://example.org", "occurred": 2, "applicable": 3}
    ]
    made = RunRecord("onnxruntime", "quick", 7, {"torch": "2.13"}, plan, results, 12.5, deviations)
    return replace(made, **changes)
