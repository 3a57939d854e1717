"""Options of ``pytest --pyargs clika_ref_conformance --target NAME``; kept light, as every pytest run loads it."""

from __future__ import annotations

import importlib

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of a run."""
    group = parser.getgroup("clika-ref conformance")
    group.addoption("--target", help="The target to test: an installed one, 'identity', or package.module:TARGET.")
    group.addoption("--profile", default="quick", help="How thorough: quick, ci or nightly.")
    group.addoption("--conformance-seed", type=int, default=None, help="Of all that is drawn.")
    group.addoption("--conformance-out", default=None, help="Write the report and reproducers into this folder.")
    group.addoption("--conformance-workers", type=int, default=2, help="Processes.")


def pytest_configure(config: pytest.Config) -> None:
    """Plan before collection, so that invalid options still end pytest as a usage error."""
    if config.getoption("--target"):
        # Imported here, since the suite imports torch: other pytest runs should not wait for it.
        importlib.import_module("clika_ref_conformance.pytest_plan").get_plan(config)
