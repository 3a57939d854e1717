"""PyTorch's own decompositions, for ATen calls without a declared operator or lowering."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from textwrap import shorten
from typing import Any

import sympy
import torch
from torch import fx
from torch._decomp import core_aten_decompositions, decomposition_table
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from clika_ref.capture.autocast_casts import AutocastRegion, make_autocast
from clika_ref.capture.composites import PYTHON_FORMS
from clika_ref.core.errors import ModelError

UNDECLARED_REASON = "no operator is declared for it, torchlib has no lowering"

INNER_CAST_REASON = "torch.autocast casts inside it"

MAX_REASON_LENGTH = 200
"""Maximum number of characters of PyTorch's reason."""


@lru_cache(maxsize=1)
def load_decompositions() -> dict[Any, Any]:
    """Return PyTorch's decompositions by overload; core ATen ones take precedence."""
    return {**decomposition_table, **core_aten_decompositions()}


def decompose(
    node: fx.Node, overload: torch._ops.OpOverload, region: AutocastRegion | None = None
) -> tuple[fx.GraphModule, list[fx.Node]] | None:
    """Return a call as a program of simpler calls, and its operand nodes, or None if there is no rule.

    In an autocast region, the program contains its casts.

    Raises:
        ModelError: the rule fails on these operands, or only works for their exact sizes.
    """
    rule = _find_decomposition(overload)
    if rule is None:
        return None
    lack = UNDECLARED_REASON if region is None else INNER_CAST_REASON
    operands = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    fakes = [n.meta["val"] for n in operands]

    def call(*tensors: torch.Tensor) -> Any:
        given = dict(zip(operands, tensors, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: given.get(n, n.meta.get("val")))
        return rule(*args, **kwargs)

    mode = detect_fake_mode([node.meta.get("val"), *fakes])
    try:
        recording = _record_guards(mode.shape_env if mode is not None else None)
        with mode or nullcontext(), recording as fixed, make_autocast(region) if region else nullcontext():
            program = make_fx(call, decomposition_table={})(*fakes)
    except Exception as error:
        reason = shorten(str(error) or repr(error), MAX_REASON_LENGTH, placeholder=" ...")
        raise ModelError(f"{lack}, and PyTorch's decomposition fails on these operands: {reason}") from error
    if fixed:
        raise ModelError(f"{lack}, and PyTorch's decomposition fixes sizes that must be dynamic")
    calls_itself = any(inner.target is overload for inner in program.graph.nodes)
    return None if calls_itself else (program, operands)


def _find_decomposition(overload: torch._ops.OpOverload) -> Callable[..., Any] | None:
    rule = PYTHON_FORMS.get(overload) or load_decompositions().get(overload)
    if rule is not None or not torch._C._dispatch_has_kernel(overload.name()):  # calls on sizes have no kernels
        return rule
    composite = overload.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return overload.decompose if composite else None


@contextmanager
def _record_guards(env: ShapeEnv | None) -> Iterator[set[sympy.Symbol]]:
    """Let an environment record guards again after its trace froze it; yield the symbols that become fixed."""
    fixed: set[sympy.Symbol] = set()
    if env is None:
        yield fixed
        return
    known, frozen = set(env.replacements), env.frozen
    env.frozen = False
    try:
        yield fixed
    finally:
        env.frozen = frozen
        fixed |= {s for s, size in env.replacements.items() if s not in known and size.is_number}
