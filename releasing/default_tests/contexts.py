"""A pytest plugin: coverage contexts by test function. One per test would write the data file 9,000 times."""

from __future__ import annotations

import coverage
import pytest


class FunctionContexts:
    """Switch the context of the running coverage measurement where the test function changes."""

    def __init__(self) -> None:
        self.context = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Name the context by the test, without its parameters."""
        measurement, context = coverage.Coverage.current(), item.nodeid.partition("[")[0]
        if measurement is not None and context != self.context:
            measurement.switch_context(context)
            self.context = context

    def pytest_sessionfinish(self) -> None:
        """Write the data: a worker of xdist may end without its exit handlers."""
        if measurement := coverage.Coverage.current():
            measurement.save()


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin."""
    config.pluginmanager.register(FunctionContexts(), "clika-ref-contexts")
