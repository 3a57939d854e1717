"""Options of ``pytest --pyargs clika_ref_conformance --target NAME``; kept light, as every pytest run loads it."""

from __future__ import annotations

import importlib

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of a run."""
    group = parser.getgroup("clika-ref conformance")
    group.addoption("--target", help="Target to test: an installed one, 'identity', or package.module:TARGET.")
    group.addoption("--profile", default="quick", help="Profile: quick, ci or nightly. Each tests more.")
    group.addoption("--conformance-seed", type=int, default=None, help="Seed of all random draws.")
    group.addoption("--conformance-out", default=None, help="Folder for the report and the reproducers.")
    group.addoption("--conformance-workers", type=int, default=2, help="Number of worker processes.")


def pytest_configure(config: pytest.Config) -> None:
    """Plan before collection, so that invalid options still end pytest as a usage error."""
    if config.getoption("--target"):
        # Imported here, since the suite imports torch: other pytest runs should not wait for it.
        importlib.import_module("clika_ref_conformance.pytest_plan").get_plan(config)
