"""The plugin: the target ``onnxruntime``."""

from __future__ import annotations

from collections.abc import Sequence

from clika_ref.core.hooks import hookimpl
from clika_ref.core.targets import Target
from clika_ref_onnxruntime.target import OnnxRuntime

CLIKA_REF_API = 1


@hookimpl
def clika_ref_targets() -> Sequence[Target]:
    """Return ONNX Runtime on the CPU."""
    return [OnnxRuntime()]
