"""Error for readers of a run's files."""

from __future__ import annotations

from clika_ref.core.errors import ClikaError


class ReportError(ClikaError):
    """A report or a reproducer is damaged, has another version, or was not written by the suite."""
