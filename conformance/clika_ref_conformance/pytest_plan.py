"""Plan of the run that pytest's options request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from clika_ref.core.errors import ClikaError
from clika_ref_conformance.execution.run import RunPlan, RunRequest, plan_run
from clika_ref_conformance.profiles import select_profile
from clika_ref_conformance.reporting.run_console import make_report_folder

PLAN_KEY = pytest.StashKey[RunPlan]()


def get_plan(config: pytest.Config) -> RunPlan:
    """Return the plan of the run that the options request; it is made once.

    Raises:
        pytest.UsageError: the options are invalid.
    """
    if PLAN_KEY not in config.stash:
        option = cast("Callable[[str], Any]", config.getoption)
        out = option("--conformance-out")
        try:
            request = RunRequest(
                option("--target"),
                select_profile(option("--profile"), option("--conformance-seed")),
                out=make_report_folder(Path(out)) if out else None,
                workers=option("--conformance-workers"),
            )
            config.stash[PLAN_KEY] = plan_run(request)
        except ClikaError as error:
            raise pytest.UsageError(str(error)) from error
    return config.stash[PLAN_KEY]
