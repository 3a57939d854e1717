"""One test for every task of a conformance run: parametrization, and the run that all of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from clika_ref.core.errors import ClikaError
from clika_ref_conformance.cases import Task
from clika_ref_conformance.execution.run import Execution, Plan, RunRequest, chosen_profile, execution, plan_run
from clika_ref_conformance.execution.showing import report_folder

PLAN = pytest.StashKey[Plan]()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of every task; one that is skipped where no target is given."""
    if "task" not in metafunc.fixturenames:
        return
    if not metafunc.config.getoption("--target"):
        skip = pytest.mark.skip(reason="give the target to test: --target NAME or package.module:TARGET")
        metafunc.parametrize("task", [pytest.param(None, marks=skip)], ids=["no-target"])
        return
    tasks = _plan(metafunc.config).tasks
    metafunc.parametrize("task", tasks, ids=list(map(str, tasks)))


def _plan(config: pytest.Config) -> Plan:
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
            pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)
    return config.stash[PLAN]


@pytest.fixture(scope="session")
def conformance_run(request: pytest.FixtureRequest) -> Iterator[Execution]:
    """Run the tasks of all tests that are selected; workers go on with the next while results are looked at."""
    plan = _plan(request.config)
    functions = [item for item in request.session.items if isinstance(item, pytest.Function)]
    wanted = {f.callspec.params.get("task") for f in functions if hasattr(f, "callspec")}
    tasks: list[Task] = [task for task in plan.tasks if task in wanted]
    with execution(plan, tasks) as running:
        yield running
