"""The fast form of a graph: Python that FX writes, instead of the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from clika_ref.core.execution import to_fx
from clika_ref.core.ir import Graph


def fast_form(graph: Graph) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return a function of what holds the constants, as ``constant_<i>`` in their order, and of the inputs."""
    code = to_fx(graph).python_code("self")
    namespace: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, "<graph>", "exec"), namespace)  # noqa: S102 - source that FX wrote, without names of the graph
    return namespace["forward"]
