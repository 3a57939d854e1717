"""The plugin: the targets ``tensorrt`` and ``tensorrt-llm``."""

from __future__ import annotations

from collections.abc import Sequence

from clika_ref.core.hooks import hookimpl
from clika_ref.core.targets import Target
from clika_ref_tensorrt.scheme import WEIGHT_ONLY_SCHEME
from clika_ref_tensorrt.target import TensorRt

CLIKA_REF_API = 1


@hookimpl
def clika_ref_targets() -> Sequence[Target]:
    """Return TensorRT, and TensorRT-LLM, which uses weight-only quantization."""
    return [TensorRt(), TensorRt("tensorrt-llm", WEIGHT_ONLY_SCHEME)]
