"""Decompositions of calls without a declared operator or lowering: PyTorch's own, and Python kernels of users."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from textwrap import shorten
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from clika_ref.capture.autocast_casts import AutocastRegion, make_autocast
from clika_ref.capture.complex_numbers import ComplexCall, pair_call
from clika_ref.capture.forms.backward_forms import BACKWARD_FORMS
from clika_ref.capture.forms.composites import PYTHON_FORMS
from clika_ref.capture.forms.loss_forms import CHUNKED_LOSS_FORMS
from clika_ref.capture.forms.matrix_decompositions import MATRIX_FORMS
from clika_ref.capture.forms.orthogonal_polynomials import POLYNOMIAL_FORMS
from clika_ref.capture.forms.selection_forms import SELECTION_FORMS
from clika_ref.capture.forms.singular_values import SINGULAR_VALUE_FORMS
from clika_ref.capture.forms.special_functions import SPECIAL_FUNCTIONS
from clika_ref.capture.messages import simplify_message
from clika_ref.capture.size_functions import keep_dynamic_sizes
from clika_ref.capture.vmap_regions import VmapRegion
from clika_ref.core.errors import ModelError
from clika_ref.torch_internals.operators import (
    OpOverload,
    core_aten_decompositions,
    decomposition_table,
    find_python_kernel,
    get_schema,
    has_kernel,
    is_composite,
)
from clika_ref.torch_internals.symbols import symbol_config
from clika_ref.torch_internals.tensors import detect_fake_mode
from clika_ref.torch_internals.tracing import enable_python_dispatcher
from clika_ref.torch_internals.trees import pytree

KERNEL_FORMS = {
    **SPECIAL_FUNCTIONS,
    **POLYNOMIAL_FORMS,
    **MATRIX_FORMS,
    **SINGULAR_VALUE_FORMS,
    **SELECTION_FORMS,
    **CHUNKED_LOSS_FORMS,
    **BACKWARD_FORMS,
}
"""Forms of kernels: autocast casts their operands at most, and nothing inside."""

STATISTICS_CALLS = frozenset(
    {
        torch.ops.aten.native_batch_norm.default,
        torch.ops.aten._native_batch_norm_legit.default,
        torch.ops.aten._native_batch_norm_legit.no_stats,
        torch.ops.aten._batch_norm_with_update.default,
    }
)
"""Batch norms that write running statistics and return those of the batch; torchlib's lowerings do neither."""

UNDECLARED_REASON = "no operator is declared for it, torchlib has no lowering"

INNER_CAST_REASON = "torch.autocast casts inside it"

MAX_REASON_LENGTH = 200
"""Maximum number of characters of PyTorch's reason."""


@lru_cache(maxsize=1)
def load_decompositions() -> dict[Any, Any]:
    """Return PyTorch's decompositions by overload; core ATen ones take precedence."""
    return {**decomposition_table, **core_aten_decompositions()}


def decompose(
    node: fx.Node, overload: OpOverload, region: AutocastRegion | None = None
) -> tuple[fx.GraphModule, list[fx.Node]] | None:
    """Return a call as a program of simpler calls, and its operands (`list_operands`), or None if there is no rule.

    In an autocast region, the program contains its casts.

    Raises:
        ModelError: the rule fails on these operands, or only works for their exact sizes.
    """
    rule = _find_decomposition(overload)
    if rule is None:
        return None
    region = None if overload in KERNEL_FORMS else region
    lack = UNDECLARED_REASON if region is None else INNER_CAST_REASON
    operands = list_operands(node)
    fakes = [n.meta["val"] for n in operands]

    def call(*values: Any) -> Any:
        given = dict(zip(operands, values, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: given.get(n, n.meta.get("val")))
        result = rule(*args, **kwargs)
        return tuple(result) if isinstance(result, tuple) else result  # a trace calls the class of a named one

    program = _trace_calls(call, fakes, node.meta.get("val"), lack, region)
    calls_itself = any(inner.target is overload for inner in program.graph.nodes)
    return None if calls_itself else (program, operands)


def list_operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands of a call that are tensors or sizes, each once."""
    kinds = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), kinds)]


def batch_region(region: VmapRegion) -> fx.GraphModule:
    """Return the calls of a `torch.vmap` region as a program of calls on whole batches.

    Raises:
        ModelError: PyTorch has no batching rule for a call.
    """
    fakes = [node.meta["val"] for node in region.operands]
    return _trace_calls(region.run, fakes, None, "it is inside torch.vmap", None)


def split_parts(node: fx.Node, complex_call: ComplexCall) -> tuple[fx.GraphModule, list[fx.Node]] | None:
    """Return a call on complex numbers as a program of calls on their parts, and its operands (`list_operands`).

    None if the call has no rule.

    Args:
        node: the call.
        complex_call: its functional form.

    Raises:
        ModelError: its rule does not support these operands.
    """
    if complex_call.rule is None:
        return None
    operands = list_operands(node)
    mode = detect_fake_mode(pytree.tree_leaves([node.meta.get("val"), *(n.meta["val"] for n in operands)]))
    with mode or nullcontext():
        run, fakes = pair_call(complex_call, operands)
    return _trace_calls(run, fakes, node.meta.get("val"), "it computes with complex numbers", None), operands


def _trace_calls(
    call: Callable[..., Any], fakes: Sequence[Any], result: Any, lack: str, region: AutocastRegion | None
) -> fx.GraphModule:
    """Return the calls that a function makes on fake tensors and sizes."""
    mode = detect_fake_mode(pytree.tree_leaves([result, *fakes]))
    try:
        recording = _record_guards(mode.shape_env if mode is not None else None)
        config: Any = symbol_config  # PyTorch replaces the type of this module on import
        oblivious = config.patch(backed_size_oblivious=True)  # sizes of 0 and 1 are like any other
        casts = make_autocast(region) if region else nullcontext()
        with (
            mode or nullcontext(),
            recording as fixed,
            casts,
            oblivious,
            keep_dynamic_sizes(),
            enable_python_dispatcher(),  # PyTorch's kernels in Python keep sizes dynamic
        ):
            program = make_fx(call, decomposition_table={})(*fakes)
    except Exception as error:
        reason = shorten(simplify_message(str(error) or type(error).__name__), MAX_REASON_LENGTH, placeholder=" ...")
        raise ModelError(f"{lack}, and its decomposition fails on these operands: {reason}") from error
    if fixed:
        raise ModelError(f"{lack}, and its decomposition fixes sizes that must be dynamic")
    return program


def _find_decomposition(overload: OpOverload) -> Callable[..., Any] | None:
    own = PYTHON_FORMS.get(overload) or KERNEL_FORMS.get(overload)
    rule = own or load_decompositions().get(overload) or _find_python_kernel(overload)
    if rule is not None or not has_kernel(overload):  # calls on sizes have no kernels
        return rule
    return overload.decompose if is_composite(overload) else None


def _find_python_kernel(overload: OpOverload) -> Callable[..., Any] | None:
    """Return the function of an operator that ``torch.library.custom_op`` made, unless it writes or has a backward.

    Autograd would differentiate the calls inside it, not call the backward of the user.
    """
    return None if get_schema(overload).is_mutable else find_python_kernel(overload)


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
