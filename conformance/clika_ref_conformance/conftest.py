"""One test for every task of a conformance run: parametrization, and the run that all of them share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from clika_ref_conformance.cases import Task
from clika_ref_conformance.execution.run import Execution, execution
from clika_ref_conformance.pytest_plan import plan_of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of every task; one that is skipped where no target is given."""
    if "task" not in metafunc.fixturenames:
        return
    if not metafunc.config.getoption("--target"):
        skip = pytest.mark.skip(reason="give the target to test: --target NAME or package.module:TARGET")
        metafunc.parametrize("task", [pytest.param(None, marks=skip)], ids=["no-target"])
        return
    tasks = plan_of(metafunc.config).tasks
    metafunc.parametrize("task", tasks, ids=list(map(str, tasks)))


@pytest.fixture(scope="session")
def conformance_run(request: pytest.FixtureRequest) -> Iterator[Execution]:
    """Run the tasks of all tests that are selected; workers go on with the next while results are looked at."""
    plan = plan_of(request.config)
    functions = [item for item in request.session.items if isinstance(item, pytest.Function)]
    wanted = {f.callspec.params.get("task") for f in functions if hasattr(f, "callspec")}
    tasks: list[Task] = [task for task in plan.tasks if task in wanted]
    with execution(plan, tasks) as running:
        yield running
