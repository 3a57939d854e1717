"""The plugin: the target ``openvino``."""

from __future__ import annotations

from collections.abc import Sequence

from clika_ref.core.hooks import hookimpl
from clika_ref.core.targets import Target
from clika_ref_openvino.target import OpenVino

CLIKA_REF_API = 1


@hookimpl
def clika_ref_targets() -> Sequence[Target]:
    """Return OpenVINO on the CPU."""
    return [OpenVino()]
