"""What ``pytest --pyargs clika_ref_conformance --target NAME`` understands: loaded by every pytest, so it is light."""

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
    """Plan before anything is collected, where wrong options still end pytest as wrong usage."""
    if config.getoption("--target"):
        # Only now: the suite imports torch, for which other runs of pytest should not wait.
        importlib.import_module("clika_ref_conformance.pytest_plan").plan_of(config)
