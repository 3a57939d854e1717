"""Precisions of a node, as returned by `clika_ref.core.targets.Target.explain`."""

from __future__ import annotations

INT8_PRECISION, FLOAT_PRECISION, FUSED_PRECISION = "int8", "float", "fused"
"""``FUSED_PRECISION`` is a node without a kernel of its own: another one computes it, or it is computed before
any call."""
