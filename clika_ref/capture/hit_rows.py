"""Code that skips experts without rows: loops over the experts that a batch hits, and conditions on rows found.

The number of experts and rows depends on values. A trace runs a loop over the positions of a mask for all positions,
and takes a condition on the number of rows found as met. That is right if code for no rows changes nothing.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_slot

from clika_ref.capture.origins import find_calling_line, format_line, is_model_frame, origin_of
from clika_ref.capture.patching import only_outside_dynamo, patch_attributes
from clika_ref.torch_internals.symbols import is_data_dependent
from clika_ref.torch_internals.tracing import find_proxy_mode, make_proxy

aten = torch.ops.aten

MAX_POSITIONS = 512
"""Length of the longest mask whose loop is unrolled."""

SEARCHES = {aten.nonzero.default, aten.nonzero_numpy.default, aten.argwhere.default, aten.where.default}
"""Calls that return the positions where a mask is true."""

RESHAPES = {
    *(operator.getitem, aten.unbind.int, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
    *(aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.select.int),
    *(aten.alias.default, aten.detach.default),
}
"""Calls that keep the positions and their order, if their result has one column."""

SIZE_CALLS = {aten.sym_size.int, aten.sym_numel.default, aten.sym_stride.int, aten.sym_storage_offset.default}
"""Calls that read a number from the shape of a tensor, and not from its elements."""


@dataclass
class RowAssumptions:
    """What a trace assumes about code that skips experts without rows, by the lines of the model."""

    lengths: dict[str, int] = field(default_factory=dict)
    """The loops over positions of a mask, with the length of the shortest mask."""
    conditions: dict[str, str] = field(default_factory=dict)
    """The conditions on the presence of rows, by the line of the call that found the rows."""
    left_out: set[str] = field(default_factory=set)
    """The lines where a loop of eager left positions out."""

    @property
    def lines(self) -> list[str]:
        """The lines of all loops and conditions."""
        return [*self.lengths, *self.conditions.values()]

    def list_unproven(self, empty_lines: Collection[str]) -> list[str]:
        """Return the lines that no run skipped, given those of calls that found no rows in a run."""
        loops = [line for line in self.lengths if line not in self.left_out]
        return [*loops, *(line for search, line in self.conditions.items() if search not in empty_lines)]

    @contextlib.contextmanager
    def record(self, *, with_conditions: bool) -> Iterator[None]:
        """Make these assumptions while the context lasts, and record where.

        Args:
            with_conditions: whether to take conditions on rows as met; converted branches keep both cases.
        """
        conditions = trace_row_conditions(self) if with_conditions else contextlib.nullcontext()
        with trace_hit_rows(self), conditions:
            yield


@contextlib.contextmanager
def trace_row_conditions(assumed: RowAssumptions) -> Iterator[None]:
    """Take conditions of the model on the presence of rows, such as ``rows.numel() > 0``, as if there were some."""
    plain: Any = torch.SymBool.__bool__
    thread = threading.get_ident()

    def read(condition: torch.SymBool) -> bool:  # guards name the line that calls it: see `source_lines`
        if condition.node.has_hint() or threading.get_ident() != thread or torch.compiler.is_dynamo_compiling():
            return plain(condition)
        frame = sys._getframe(1)
        expr = condition.node.expr
        symbol = _find_counted(expr) if is_model_frame(frame) else None
        found = "" if symbol is None else _find_search_line(symbol)
        if symbol is None or not found:
            return plain(condition)
        assumed.conditions[found] = format_line(frame.f_code.co_filename, frame.f_lineno)
        return bool(expr.xreplace({symbol: sympy.Integer(1)}))

    with patch_attributes({(torch.SymBool, "__bool__"): read}):
        yield


def _find_counted(expr: Any) -> sympy.Symbol | None:
    """Return the count that a condition compares with 0; None for other conditions."""
    if not isinstance(expr, sympy.Basic) or len(expr.free_symbols) != 1:
        return None
    symbol = cast("sympy.Symbol", next(iter(expr.free_symbols)))
    if not is_data_dependent(symbol):
        return None
    none, *some = (expr.xreplace({symbol: sympy.Integer(n)}) for n in (0, 1, 2, 1000))
    return symbol if none != some[0] and some[0] == some[1] == some[2] else None


def _find_search_line(symbol: sympy.Symbol) -> str:
    """Return the line of the call whose result has a data-dependent number of rows; ``""`` for other numbers."""
    mode = find_proxy_mode()
    tracked = None if mode is None else mode.tracer.sympy_expr_tracker.get(symbol)
    node = None if tracked is None else make_proxy(tracked.proxy).node
    if node is None or node.target not in SIZE_CALLS:
        return ""
    return origin_of(cast("fx.Node", node.args[0]).meta).line


def trace_hit_rows(assumed: RowAssumptions) -> contextlib.AbstractContextManager[None]:
    """Unroll loops over the positions of a mask for all positions while the context lasts; record their lines."""

    def iterate(x: Tensor) -> Iterator[Tensor] | None:
        length = None if isinstance(x.shape[0], int) else _find_mask_length(x)
        if length is None:
            return None
        line = find_calling_line(sys._getframe())
        assumed.lengths[line] = min(length, assumed.lengths.get(line, length))
        return iter([torch.tensor([k] if x.dim() == 2 else k, device=x.device) for k in range(length)])

    return _replace_iteration(iterate)


def watch_hit_rows(assumed: RowAssumptions) -> contextlib.AbstractContextManager[None]:
    """Record which loops of eager leave positions out while the context lasts."""

    def iterate(x: Tensor) -> None:
        line = find_calling_line(sys._getframe())
        if x.shape[0] < assumed.lengths.get(line, 0):
            assumed.left_out.add(line)

    return _replace_iteration(iterate)


@contextlib.contextmanager
def _replace_iteration(iterate: Callable[[Tensor], Iterator[Tensor] | None]) -> Iterator[None]:
    """Call ``iterate`` with each column of integers that is iterated over while the context lasts."""
    plain: Any = Tensor.__iter__

    def choose(x: Tensor) -> Iterator[Any]:
        is_column = x.dim() == 1 or (x.dim() == 2 and x.shape[1] == 1)
        found = iterate(x) if x.dtype == torch.int64 and is_column else None
        return plain(x) if found is None else found

    with patch_attributes({(Tensor, "__iter__"): only_outside_dynamo(choose, plain)}):
        yield


def _find_mask_length(positions: Tensor) -> int | None:
    """Return the length of the mask whose positions a traced tensor holds; None for other tensors."""
    mode = find_proxy_mode()
    slot = None if mode is None else get_proxy_slot(positions, mode.tracer, None)
    node = getattr(getattr(slot, "proxy", None), "node", None)
    while isinstance(node, fx.Node) and node.target in RESHAPES:
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.target not in SEARCHES:
        return None
    (mask,) = node.args
    shape = [*mask.meta["val"].shape] if isinstance(mask, fx.Node) else []
    is_short = len(shape) == 1 and isinstance(shape[0], int) and shape[0] <= MAX_POSITIONS
    return shape[0] if is_short else None
