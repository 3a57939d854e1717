"""The error of whoever reads what a run left behind."""

from __future__ import annotations

from clika_ref.core.errors import ClikaError


class ReportError(ClikaError):
    """For the reader of a report or a reproducer: a file is damaged, of another version, or not one of ours."""
