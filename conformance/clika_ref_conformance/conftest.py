"""One test for every task of a conformance run: parametrization, and the run that all of them share."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from clika_ref_conformance.cases import Task
from clika_ref_conformance.execution.run import Execution, execution
from clika_ref_conformance.pytest_plan import plan_of
from clika_ref_conformance.reporting.showing import reported

WHOLE_RUN = "test_the_run_proves_enough"


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


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Keep the test of the run as a whole, last, wherever a task of it is selected: ``-k softmax`` does not name it."""
    whole = [item for item in items if item.name == WHOLE_RUN]
    items[:] = [item for item in items if item not in whole]
    yield
    if _tasks_of(items):
        items.extend(whole)


@pytest.fixture(scope="session")
def conformance_run(request: pytest.FixtureRequest) -> Iterator[Execution]:
    """Run the tasks of all tests that are selected; workers go on with the next while results are looked at.

    When all are done, what a worker died of is run once more, to be written down, and the report is written
    (``--conformance-out``).
    """
    plan, start = plan_of(request.config), time.perf_counter()
    wanted = _tasks_of(request.session.items)
    tasks = [task for task in plan.tasks if task in wanted]
    which = f"{zlib.crc32(' '.join(map(str, tasks)).encode()):08x}"  # of other tasks, as many are another part
    chosen = f"{len(tasks):,} of {len(plan.tasks):,} tasks, chosen by pytest: {which}"
    part = "" if len(tasks) == len(plan.tasks) else chosen
    with execution(plan, tasks) as running:
        yield running
        running.abandon("pytest ended before they were")
        reported(replace(running.record(time.perf_counter() - start), part=part), plan)


def _tasks_of(items: Sequence[pytest.Item]) -> set[Task]:
    """Return the tasks whose tests are selected."""
    functions = [item for item in items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    return {task for f in functions if isinstance(task := f.callspec.params.get("task"), Task)}
