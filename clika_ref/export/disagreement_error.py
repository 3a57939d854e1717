"""The error for an artifact with results that differ from those of its module."""

from __future__ import annotations

from clika_ref.core.errors import TargetError


class DisagreementError(TargetError):
    """Raised if a runtime computes other results from an artifact than the module that it was made from."""
