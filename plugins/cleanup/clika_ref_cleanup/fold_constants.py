"""Evaluate nodes with constant operands ahead of time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from clika_ref.core.deferred_constants import DeferredConstant, is_deferred
from clika_ref.core.errors import PassError
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.passes import Phase
from clika_ref.core.rewriter import erase_dead
from clika_ref.core.symbols import is_symbolic
from clika_ref_cleanup.cleanup_pass import CleanupPass

MEBIBYTE = 2**20

CONSTANT_PREFIX = "clika."
"""Prefix of constants that are not part of the user's module."""


def is_literal(value: Value) -> bool:
    """Whether a constant is a literal of the code (lifted by torch.export), or was folded from literals."""
    last = value.name.rpartition(".")[2]
    named = value.name.startswith(CONSTANT_PREFIX) and last.startswith(("lifted_tensor", "literal_"))
    return named and not isinstance(value.data, torch.nn.Parameter)


@dataclass(frozen=True)
class FoldLiterals(CleanupPass):
    """Evaluate nodes that read no parameter, buffer or input: ``arange``, ``full``, and arithmetic on them.

    Tensor literals in the user's code count as numbers: no module owns them, so nothing can change them. A result
    larger than ``limit_bytes`` is not folded. The stored graph thus keeps every parameter.
    """

    limit_bytes: int = MEBIBYTE

    name = "fold-literals"
    after = ("merge-common-subexpressions",)

    def __call__(self, graph: Graph, _: Mapping[str, Operator], /) -> None:
        """Fold literals; the results get names under ``clika.``."""
        _Folding(
            graph, self.limit_bytes, lambda value: is_literal(value) and not graph.is_overwritten(value.name)
        ).fold(f"{CONSTANT_PREFIX}literal_{{}}")


@dataclass(frozen=True)
class FoldConstants(CleanupPass):
    """Evaluate nodes that read only parameters, buffers and other constants, on the clone that is lowered.

    A result larger than ``limit_bytes`` is not folded, unless it replaces as many bytes of otherwise unused constants.
    State is not folded, since a call overwrites it, nor are operators in ``keep``: targets expect these at weights.
    """

    limit_bytes: int = MEBIBYTE
    keep: tuple[str, ...] = ("dequantize", "quantize")

    name = "fold-constants"
    phase = Phase.FUSE
    after = ("fold-batch-norm", "fold-literals", "push-transposes")
    removes = "node with constant inputs"

    def __call__(self, graph: Graph, _: Mapping[str, Operator], /) -> None:
        """Fold all constants except state."""
        _Folding(
            graph, self.limit_bytes, lambda value: not graph.is_overwritten(value.name), self.keep, states=True
        ).fold("{}")


@dataclass
class _Folding:
    graph: Graph
    limit_bytes: int
    may_read: Callable[[Value], bool]
    keep: tuple[str, ...] = ()
    states: bool = False
    """Whether folded constants carry a `DeferredConstant`, which training needs if their sources are parameters."""
    made: dict[Value, Value] = field(default_factory=dict)
    """For each computed value, the deferred constant that computes it."""
    known: dict[Value, torch.Tensor] = field(default_factory=dict)
    """Computed values with unfolded readers; others are released."""
    pending: dict[Value, int] = field(default_factory=dict)
    """Number of unfolded readers of each known value."""
    replaced: dict[Value, int] = field(default_factory=dict)
    """Bytes of constants that each value makes unnecessary."""

    def fold(self, name: str) -> None:
        """Evaluate nodes in order, add constants for folded values with other readers, and erase unused ones."""
        data = next((v.data for v in self.graph.constants.values() if v.deferred_data is None), None)
        device = torch.device("cpu") if data is None else data.device
        for node in self.graph.nodes:
            if self._is_foldable(node):
                self._compute(node, device)
        folded = [value for value in self.known if value.uses]
        for value in folded:
            constant = self.graph.add_constant(self._data(value), name.format(value.name), value.type)
            self.graph.replace(value, constant)
        read = [v for v in self.replaced if v.is_constant]
        erase_dead(self.graph, *(value.producer for value in folded if value.producer))
        for value in read:
            if not value.uses and self.graph.constants.get(value.name) is value:
                del self.graph.constants[value.name]

    def _data(self, value: Value) -> torch.Tensor | DeferredConstant:
        deferred = self.made[value].deferred_data if self.states else None
        if isinstance(deferred, DeferredConstant):
            return replace(deferred, known=self.known[value])
        return self.known[value].clone()  # a state dict saved to a file must not contain two views of one memory

    def _is_foldable(self, node: Node) -> bool:
        if node.op.random or node.bodies or node.op_type in self.keep:
            return False
        if any(map(is_symbolic, (*node.attrs.values(), *node.inputs))):
            return False
        if any(isinstance(v, Value) and not self._is_known(v) for v in node.inputs):
            return False
        if not all(value.type.is_static for value in node.outputs):
            return False
        uses = [use for value in node.outputs for use in value.uses]
        # A graph output keeps its node, and thereby its name.
        return bool(uses) and not any(use.user is self.graph for use in uses)

    def _is_known(self, value: Value) -> bool:
        if value in self.known:
            return True
        if is_deferred(value) or value.data is None:  # deferred constants are large, and computed when they are written
            return False
        return value.data.device.type != "meta" and self.may_read(value)

    def _compute(self, node: Node, device: torch.device) -> None:
        read = [v for v in node.inputs if isinstance(v, Value)]
        sizes = [_bytes(v) for v in node.outputs]
        gain = sum(map(self._count_replaced_bytes, set(read)))
        if sum(sizes) > max(self.limit_bytes, gain):
            return
        operands = [self._tensor(v) if isinstance(v, Value) else v for v in node.inputs]
        attrs: dict[str, Any] = dict(node.attrs)
        if node.op.takes_device and attrs["device"] is None:
            attrs["device"] = device
        try:
            with torch.no_grad():
                results = node.op(*operands, **attrs)
        except Exception as error:
            raise PassError(f"{node!r} in {node.origin} cannot be computed from constants: {error}") from error
        results = (results,) if isinstance(results, torch.Tensor) else results
        for value, result in zip(node.outputs, results, strict=True):
            self.known[value] = result.detach().contiguous()
            if self.states:
                sources = tuple(self.made.get(v, v) if isinstance(v, Value) else v for v in node.inputs)
                deferred = DeferredConstant(node.op, sources, tuple(node.attrs.items()), value.index)
                self.made[value] = Value(value.type, value.name, data=deferred)
            self.pending[value] = len(value.uses)
            self.replaced[value] = gain // len(sizes) if len(value.uses) == 1 else 0
        for value in read:
            if value in self.pending:
                self.pending[value] -= 1
                if not self.pending[value]:
                    del self.known[value]

    def _tensor(self, value: Value) -> torch.Tensor:
        return self.known[value] if value.data is None else value.data

    def _count_replaced_bytes(self, value: Value) -> int:
        if value not in self.replaced:  # a constant, counted if its only reader is folded
            self.replaced[value] = _bytes(value) if len(value.uses) == 1 else 0
        return self.replaced[value]


def _bytes(value: Value) -> int:
    return math.prod(map(int, value.type.shape)) * value.type.dtype.itemsize
