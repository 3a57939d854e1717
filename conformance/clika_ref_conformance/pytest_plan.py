"""Plan of the run that pytest's options request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from clika_ref.core.errors import ClikaError
from clika_ref_conformance.execution.run import Plan, RunRequest, plan_run
from clika_ref_conformance.profiles import chosen_profile
from clika_ref_conformance.reporting.showing import report_folder

PLAN = pytest.StashKey[Plan]()


def plan_of(config: pytest.Config) -> Plan:
    """Return the plan of the run that the options request; it is made once.

    Raises:
        pytest.UsageError: the options are invalid.
    """
    if PLAN not in config.stash:
        option = cast("Callable[[str], Any]", config.getoption)
        out = option("--conformance-out")
        try:
            request = RunRequest(
                option("--target"),
                chosen_profile(option("--profile"), option("--conformance-seed")),
                out=report_folder(Path(out)) if out else None,
                workers=option("--conformance-workers"),
            )
            config.stash[PLAN] = plan_run(request)
        except ClikaError as error:
            raise pytest.UsageError(str(error)) from error
    return config.stash[PLAN]
