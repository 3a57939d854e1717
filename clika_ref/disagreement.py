"""The error of an artifact that computes something else than the module that it was made of."""

from __future__ import annotations

from clika_ref.core.errors import TargetError


class DisagreementError(TargetError):
    """A runtime has run an artifact, and the results are not those of the module that it was made of."""
