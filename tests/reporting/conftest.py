"""Fixtures for tests of logs and progress bars."""

import pytest


@pytest.fixture
def _console_output(monkeypatch):
    """Show the console output whatever the environment of the tests states."""
    monkeypatch.delenv("CLIKA_REF_QUIET", raising=False)
