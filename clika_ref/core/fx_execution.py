"""Fast execution of a graph: Python code that FX generates, instead of the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from clika_ref.core.execution import to_fx
from clika_ref.core.ir import Graph


def compile_with_fx(graph: Graph) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Compile a graph to a function of its constants and inputs.

    The first argument of the function holds the constants as attributes ``constant_<i>``, in order. One tensor for each
    input of the graph follows. The function returns one tensor for each output, and writes new state in place.
    """
    code = to_fx(graph).python_code("self")
    namespace: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, "<graph>", "exec"), namespace)  # noqa: S102 - FX's source, without names of the graph
    return namespace["forward"]
