"""Drawn calls that reuse existing graph values for described tensors where one fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.samples import (
    Call,
    Choice,
    Draw,
    IntegerRange,
    TensorDescription,
    TensorSample,
    realize,
)
from clika_ref.core.types import TensorType
from clika_ref_conformance.drawing.eager_builder import UNJUDGED_DTYPE, CandidateCall, EagerGraphBuilder, LeafTensor
from clika_ref_conformance.drawing.eager_values import is_undefined
from clika_ref_conformance.drawing.graphs.size_steering import (
    RedrawRequest,
    RepeatableDraw,
    find_size_changes,
    to_plain_numbers,
)
from clika_ref_conformance.drawing.sampling import JudgedDescriptions, blame_samples, find_unjudged_dtype

MAX_ELEMENTS = 4096
"""Maximum number of elements of a tensor; larger ones cost time and find no more faults."""
MAX_OPERAND_VALUE = 1e6
"""Larger values are not used as operands: multiplying them overflows, and all later results are infinite."""
NEW_TENSOR_DTYPES = (torch.float32, torch.int64, torch.bool)
"""Dtypes of new tensors where a description leaves the choice."""
DEFAULT_RANGE = (-3.0, 3.0)
"""Element range of a description that sets none; integers with a range of their own are indices or sizes."""


def accept_all(_: Node) -> None:
    """Accept every node: the default of `GraphGenerator` without a target."""
    return


@dataclass(frozen=True, slots=True)
class ValueSample(TensorSample):
    """A tensor given to a sampler: an existing value, or a new tensor to create if the call is accepted."""

    value: Value | None = None
    constant: bool = False


@dataclass
class GraphGenerator:
    """Draws calls onto the values of a graph, and adjusts drawn sizes to those of existing values.

    Args:
        draw: decides every description, including tensor descriptions that need a new tensor.
        unsupported_reason: returns the reason why the target rejects a node, or None; such nodes are not added.

    """

    draw: Draw
    unsupported_reason: Callable[[Node], str | None] = accept_all
    dtypes: Sequence[torch.dtype] = NEW_TENSOR_DTYPES
    samples: list[TensorSample] = field(default_factory=list[TensorSample])
    """One sample for each input of the graph, in order."""
    seed: int = 0
    tried: int = 0
    _first: Value | None = None
    _has_requested_sizes: bool = False

    def __post_init__(self) -> None:
        """Start from an empty graph."""
        self.builder = EagerGraphBuilder(self._rejection_reason)

    def add(self, op: Operator, first: Value | None = None) -> Node | None:
        """Draw one call and append it, or return None if it is rejected.

        Args:
            op: the operator.
            first: the value to use for the first description that it fits.

        """
        return self.take(op, self.draw_call(op, first))

    def draw_call(self, op: Operator, first: Value | None = None) -> Call:
        """Draw one call without adding it; its tensors are `ValueSample` objects."""
        assert op.sampler is not None
        self._first, self._has_requested_sizes = first, first is None
        steered = RepeatableDraw(self.draw, self._answer)
        while True:
            try:
                with blame_samples(op):
                    call = op.sampler(steered, JudgedDescriptions())
                    operands = tuple(map(to_plain_numbers, call.operands))
                    return op.call(*operands, **{k: to_plain_numbers(v) for k, v in call.attrs.items()})
            except RedrawRequest as again:
                steered.repeat(again.changes)

    def take(self, op: Operator, call: Call) -> Node | None:
        """Append a drawn call, or return None if eager or the target rejects it."""
        self.tried += 1
        if any(isinstance(o, TensorSample) and math.prod(o.shape) > MAX_ELEMENTS for o in call.operands):
            return self.builder.reject(op, "too large")
        if find_unjudged_dtype(call) is not None:
            return self.builder.reject(op, UNJUDGED_DTYPE)
        operands = {
            id(o): self._resolve_operand(o) for o in call.operands if isinstance(o, TensorSample | torch.Tensor)
        }
        node = self.builder.add_call(op, [operands.get(id(o), o) for o in call.operands], call.attrs)
        if node is not None:
            leaves = {i: leaf for i, leaf in operands.items() if isinstance(leaf, LeafTensor) and not leaf.constant}
            self.samples.extend({id(o): o for o in call.operands if id(o) in leaves}.values())
        return node

    def count_rejections(self, op: Operator) -> int:
        """Return the number of rejected calls of an operator."""
        return sum(other is op for other, _ in self.builder.rejected)

    def _resolve_operand(self, sample: TensorSample | torch.Tensor) -> Value | LeafTensor:
        if isinstance(sample, torch.Tensor):
            return LeafTensor(sample, constant=True, name="w")
        if isinstance(sample, ValueSample) and sample.value is not None:
            return sample.value
        self.seed += 1
        tensor = realize(sample, torch.Generator().manual_seed(self.seed))
        constant = isinstance(sample, ValueSample) and sample.constant
        return LeafTensor(tensor, constant, name="w" if constant else "")

    def _rejection_reason(self, tried: CandidateCall) -> str | None:
        if any(r.numel() > MAX_ELEMENTS for r in tried.results):
            return "too large"
        if is_undefined(tried.operands, tried.node.attrs, tried.results):
            return "undefined"
        return self._unsupported_reason(tried.node, tried.types)

    def _answer(self, description: Any, /) -> Any:
        if not isinstance(description, TensorDescription):
            return self.draw(description)
        value = self._find_value(description)
        if value is not None:
            t = self.builder.tensors[value]
            return ValueSample(t.dtype, tuple(t.shape), description.low, description.high, value=value)
        known = tuple(d for d in description.dtypes if d in self.dtypes) or description.dtypes[:1]
        new: TensorSample = self.draw(replace(description, dtypes=known))
        constant = bool(self.samples) and self.draw(Choice((False, True)))
        return ValueSample(
            new.dtype, to_plain_numbers(new.shape), new.low, new.high, new.domain, new.unique, constant=constant
        )

    def _request_sizes(self, d: TensorDescription) -> None:
        """Request a repeated draw if the wanted value would fit with other drawn sizes.

        This is tried once per call. If eager rejects the result, it is handled like any other rejected call.
        """
        value = self._first
        if value is None or self._has_requested_sizes or d.shape is None or value.type.rank != len(d.shape):
            return
        there = tuple(self.builder.tensors[value].shape)
        changes = (
            find_size_changes(d.shape, there)
            if is_match(replace(d, shape=there), self.builder.tensors[value])
            else None
        )
        if changes is not None and 0 not in there:
            self._has_requested_sizes = True
            raise RedrawRequest(changes)

    def _find_value(self, d: TensorDescription) -> Value | None:
        if self._first is not None and is_match(d, self.builder.tensors[self._first]):
            value, self._first = self._first, None
            return value
        self._request_sizes(d)
        found = [v for v, t in self.builder.tensors.items() if is_match(d, t) and _is_informative(t)]
        usual = (d.low, d.high) == DEFAULT_RANGE
        if not found or self.draw(IntegerRange(0, 9)) >= (7 if usual else 2):
            return None
        back = min(self.draw(IntegerRange(0, 7)), self.draw(IntegerRange(0, 7)), len(found) - 1)  # prefer recent values
        return found[-1 - back]

    def _unsupported_reason(self, node: Node, results: Sequence[TensorType]) -> str | None:
        """Query the target about a node on separate inputs, so that a rejection leaves the graph unchanged."""
        if node.is_random:
            return "random"
        trial = Graph()
        inputs = [trial.add_input(t, "x") if isinstance(t, TensorType) else t for t in node.inputs]
        return self.unsupported_reason(trial.insert(Node(node.op, inputs, node.attrs), results))


def is_match(d: TensorDescription, tensor: torch.Tensor) -> bool:
    """Return whether an existing tensor matches a description.

    Floats outside the domain are legal and give NaN. Indices must lie within their domain, and tensors of unique
    elements are always new.
    """
    if tensor.dtype not in d.dtypes or d.unique or tensor.numel() > MAX_ELEMENTS:
        return False
    is_index = not tensor.is_floating_point() and tensor.dtype != torch.bool
    if is_index and (d.domain is not None or (d.low, d.high) != DEFAULT_RANGE):
        return False
    if d.shape is not None:
        return tuple(tensor.shape) == d.shape
    low, high = d.size
    return d.rank[0] <= tensor.ndim <= d.rank[1] and all(low <= n <= max(high, 8) for n in tensor.shape)


def _is_informative(tensor: torch.Tensor) -> bool:
    """Return whether results computed from a tensor are still informative: mostly finite elements, no huge ones."""
    if not tensor.is_floating_point():
        return True
    finite = tensor.isfinite()
    return 2 * int(finite.sum()) >= tensor.numel() and not bool((tensor[finite].abs() > MAX_OPERAND_VALUE).any())
