"""What a node may run in, in the words of `clika_ref.core.targets.Target.explain`."""

from __future__ import annotations

INTEGERS, FLOAT, FUSED = "int8", "float", "fused"
"""The last one of a node that is left to no node of its own: another one computes it, or it is done before any call."""
