"""Parametrize one test per task of a conformance run; all tests share one run."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from clika_ref_conformance.cases import Task
from clika_ref_conformance.execution.run import Execution, start_execution
from clika_ref_conformance.pytest_plan import get_plan
from clika_ref_conformance.reporting.run_console import write_reports

WHOLE_RUN_TEST = "test_run_proves_enough"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize the tests by task, or with one skipped placeholder if no target is given."""
    if "task" not in metafunc.fixturenames:
        return
    if not metafunc.config.getoption("--target"):
        skip = pytest.mark.skip(
            reason="no target is given: name one with --target NAME or --target package.module:TARGET"
        )
        metafunc.parametrize("task", [pytest.param(None, marks=skip)], ids=["no-target"])
        return
    tasks = get_plan(metafunc.config).tasks
    metafunc.parametrize("task", tasks, ids=list(map(str, tasks)))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Run the whole-run test last if any task is selected, although ``-k softmax`` does not match its name."""
    whole = [item for item in items if item.name == WHOLE_RUN_TEST]
    items[:] = [item for item in items if item not in whole]
    yield
    if _tasks_of(items):
        items.extend(whole)


@pytest.fixture(scope="session")
def conformance_run(request: pytest.FixtureRequest) -> Iterator[Execution]:
    """Run the tasks of all selected tests. Workers continue with the next task while tests look at results.

    After the last test, a check that killed its worker is run once more to write its reproducer. Then the report is
    written (``--conformance-out``).
    """
    plan, start = get_plan(request.config), time.perf_counter()
    requested = _tasks_of(request.session.items)
    tasks = [task for task in plan.tasks if task in requested]
    digest = f"{zlib.crc32(' '.join(map(str, tasks)).encode()):08x}"  # distinguishes selections with equally many tasks
    selected = f"{len(tasks):,} of {len(plan.tasks):,} tasks, selected by pytest: {digest}"
    part = "" if len(tasks) == len(plan.tasks) else selected
    with start_execution(plan, tasks) as execution:
        yield execution
        execution.abandon("pytest ended before them")
        write_reports(replace(execution.record(time.perf_counter() - start), part=part), plan)


def _tasks_of(items: Sequence[pytest.Item]) -> set[Task]:
    """Return the tasks of the selected tests."""
    functions = [item for item in items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    return {task for f in functions if isinstance(task := f.callspec.params.get("task"), Task)}
