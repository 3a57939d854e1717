"""Plan tasks and run checks so that an exception fails only its own task or check."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from clika_ref_conformance.cases import Check, Outcome, Task
from clika_ref_conformance.drawing.sampling import SampleError
from clika_ref_conformance.execution.case_checks import is_out_of_memory
from clika_ref_conformance.execution.error_attribution import exceptions_to_catch
from clika_ref_conformance.execution.levels import LEVELS, import_level
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.verdicts import Comparison, Verdict

BROKEN_PLAN_CHECK = "plan"
"""The only check of a task that cannot be planned."""


def plan_checks(task: Task, suite: Suite, levels: Mapping[str, str] = LEVELS) -> Sequence[Check]:
    """Return the checks of a task, or one failing check if its level or a sampler raises."""
    try:
        return import_level(levels[task.level]).checks(task, suite)
    except SampleError as error:
        found = Outcome(BROKEN_PLAN_CHECK, error.comparison)
        return [Check(BROKEN_PLAN_CHECK, lambda: found)]
    except exceptions_to_catch() as error:  # an error of a level or sampler fails only its task
        shown = _format_traceback(error)
        text = f"planning the task failed:\n{shown}"
        return [Check(BROKEN_PLAN_CHECK, lambda: Outcome(BROKEN_PLAN_CHECK, Comparison(Verdict.CONTRACT, text)))]


def run_check(check: Check) -> Outcome:
    """Run one check and measure its duration; an exception becomes its verdict."""
    start = time.perf_counter()
    try:
        outcome = check.run()
    except SampleError as error:
        outcome = Outcome(check.name, error.comparison)
    except exceptions_to_catch() as error:  # an error fails only this check
        verdict = Verdict.MEMORY if is_out_of_memory(error) else Verdict.CONTRACT
        outcome = Outcome(check.name, Comparison(verdict, f"the check raised:\n{_format_traceback(error)}"))
    if outcome.verdict is Verdict.MEMORY:  # free graphs, which are reference cycles
        gc.collect()
    return check_torch_state(replace(outcome, name=check.name, seconds=time.perf_counter() - start))


def check_torch_state(outcome: Outcome) -> Outcome:
    """Undo changes that a target made to torch's global state; if there are any, they decide the check."""
    altered = restore_torch_state()
    if not altered:
        return outcome
    message = f"the target {altered} in this process, which changes the results of eager"
    return replace(outcome, comparison=Comparison(Verdict.CONTRACT, message))


def restore_torch_state() -> str:
    """Undo changes that a target made to torch's global state, and describe them; empty if there are none."""
    found: list[str] = []
    if torch.get_default_dtype() is not torch.float32:
        torch.set_default_dtype(torch.float32)
        found.append("set another default dtype")
    subnormal = torch.full((1,), 1e-39, dtype=torch.float32)
    if not (subnormal * 1.0).item():
        torch.set_flush_denormal(False)
        found.append("switched on flush-to-zero")
    return " and ".join(found)


def _format_traceback(error: BaseException, lines: int = 30) -> str:
    return "\n".join("".join(traceback.format_exception(error)).splitlines()[-lines:])
