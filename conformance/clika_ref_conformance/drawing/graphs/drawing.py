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
    Integers,
    TensorDescription,
    TensorSample,
    realize,
)
from clika_ref.core.types import TensorType
from clika_ref_conformance.drawing.eager_values import is_undefined
from clika_ref_conformance.drawing.graphs.steering import Again, Steered, changes_for, plain
from clika_ref_conformance.drawing.growing import NOT_JUDGED, Growth, Leaf, Tried
from clika_ref_conformance.drawing.sampling import JudgedDescriptions, blaming, unjudged_operand

MOST_ELEMENTS = 4096
"""Maximum number of elements of a tensor; larger ones cost time and find no more faults."""
LARGEST = 1e6
"""Larger values are not used as operands: their products overflow, and all later results are infinite."""
DTYPES = (torch.float32, torch.int64, torch.bool)
"""Dtypes of new tensors where a description leaves the choice."""
USUAL_RANGE = (-3.0, 3.0)
"""Element range of a description that sets none; integers with a range of their own are indices or sizes."""


def accept_all(_: Node) -> None:
    """Accept every node: the default of `GraphDrawing` without a target."""
    return


@dataclass(frozen=True, slots=True)
class PlacedSample(TensorSample):
    """A tensor given to a sampler: an existing value, or a new tensor to create if the call is accepted."""

    value: Value | None = None
    constant: bool = False


@dataclass
class GraphDrawing:
    """Draws calls onto the values of a graph, and adjusts drawn sizes to those of existing values.

    Args:
        draw: decides every description, including tensor descriptions that need a new tensor.
        refusal: returns the reason why the target does not support a node, or None; unsupported nodes are not added.

    """

    draw: Draw
    refusal: Callable[[Node], str | None] = accept_all
    dtypes: Sequence[torch.dtype] = DTYPES
    samples: list[TensorSample] = field(default_factory=list[TensorSample])
    """One sample for each input of the graph, in order."""
    seed: int = 0
    tried: int = 0
    _wanted: Value | None = None
    _was_steered: bool = False

    def __post_init__(self) -> None:
        """Start from an empty graph."""
        self.growth = Growth(self._objection)

    def add(self, op: Operator, first: Value | None = None) -> Node | None:
        """Draw one call and append it, or return None if it is rejected.

        Args:
            op: the operator.
            first: the value to use for the first description that it fits.

        """
        return self.take(op, self.drawn(op, first))

    def drawn(self, op: Operator, first: Value | None = None) -> Call:
        """Draw one call without adding it; its tensors are `PlacedSample` objects."""
        assert op.sampler is not None
        self._wanted, self._was_steered = first, first is None
        steered = Steered(self.draw, self._answer)
        while True:
            try:
                with blaming(op):
                    call = op.sampler(steered, JudgedDescriptions())
                    operands = tuple(map(plain, call.operands))
                    return op.call(*operands, **{k: plain(v) for k, v in call.attrs.items()})
            except Again as again:
                steered.repeat(again.changes)

    def take(self, op: Operator, call: Call) -> Node | None:
        """Append a drawn call, or return None if eager or the target rejects it."""
        self.tried += 1
        if any(isinstance(o, TensorSample) and math.prod(o.shape) > MOST_ELEMENTS for o in call.operands):
            return self.growth.reject(op, "too large")
        if unjudged_operand(call) is not None:
            return self.growth.reject(op, NOT_JUDGED)
        operands = {id(o): self._operand(o) for o in call.operands if isinstance(o, TensorSample | torch.Tensor)}
        node = self.growth.place(op, [operands.get(id(o), o) for o in call.operands], call.attrs)
        if node is not None:
            new = {id(o): o for o in call.operands if _is_input(operands.get(id(o)))}
            self.samples.extend(new.values())
        return node

    def refusals(self, op: Operator) -> int:
        """Return the number of rejected calls of an operator."""
        return sum(other is op for other, _ in self.growth.rejected)

    def _operand(self, sample: TensorSample | torch.Tensor) -> Value | Leaf:
        if isinstance(sample, torch.Tensor):
            return Leaf(sample, constant=True, name="w")
        if isinstance(sample, PlacedSample) and sample.value is not None:
            return sample.value
        self.seed += 1
        tensor = realize(sample, torch.Generator().manual_seed(self.seed))
        constant = isinstance(sample, PlacedSample) and sample.constant
        return Leaf(tensor, constant, name="w" if constant else "")

    def _objection(self, tried: Tried) -> str | None:
        if any(r.numel() > MOST_ELEMENTS for r in tried.results):
            return "too large"
        if is_undefined(tried.operands, tried.node.attrs, tried.results):
            return "undefined"
        return self._refusal(tried.node, tried.types)

    def _answer(self, description: Any, /) -> Any:
        if not isinstance(description, TensorDescription):
            return self.draw(description)
        value = self._existing(description)
        if value is not None:
            t = self.growth.tensors[value]
            return PlacedSample(t.dtype, tuple(t.shape), description.low, description.high, value=value)
        known = tuple(d for d in description.dtypes if d in self.dtypes) or description.dtypes[:1]
        new: TensorSample = self.draw(replace(description, dtypes=known))
        constant = bool(self.samples) and self.draw(Choice((False, True)))
        return PlacedSample(new.dtype, plain(new.shape), new.low, new.high, new.domain, new.unique, constant=constant)

    def _steer(self, d: TensorDescription) -> None:
        """Request a repeated draw if the wanted value would fit with other drawn sizes.

        This is tried once per call. If eager rejects the result, it is handled like any other rejected call.
        """
        value = self._wanted
        if value is None or self._was_steered or d.shape is None or value.type.rank != len(d.shape):
            return
        there = tuple(self.growth.tensors[value].shape)
        changes = changes_for(d.shape, there) if fits(replace(d, shape=there), self.growth.tensors[value]) else None
        if changes is not None and 0 not in there:
            self._was_steered = True
            raise Again(changes)

    def _existing(self, d: TensorDescription) -> Value | None:
        if self._wanted is not None and fits(d, self.growth.tensors[self._wanted]):
            value, self._wanted = self._wanted, None
            return value
        self._steer(d)
        found = [v for v, t in self.growth.tensors.items() if fits(d, t) and _is_tame(t)]
        usual = (d.low, d.high) == USUAL_RANGE
        if not found or self.draw(Integers(0, 9)) >= (7 if usual else 2):
            return None
        back = min(self.draw(Integers(0, 7)), self.draw(Integers(0, 7)), len(found) - 1)  # prefer recent values
        return found[-1 - back]

    def _refusal(self, node: Node, results: Sequence[TensorType]) -> str | None:
        """Query the target about a node on separate inputs, so that a rejection leaves the graph unchanged."""
        if node.is_random:
            return "random"
        trial = Graph()
        inputs = [trial.add_input(t, "x") if isinstance(t, TensorType) else t for t in node.inputs]
        return self.refusal(trial.insert(Node(node.op, inputs, node.attrs), results))


def fits(d: TensorDescription, tensor: torch.Tensor) -> bool:
    """Return whether an existing tensor matches a description.

    Floats outside the domain are legal and give NaN. Indices must lie within their domain, and tensors of unique
    elements are always new.
    """
    if tensor.dtype not in d.dtypes or d.unique or tensor.numel() > MOST_ELEMENTS:
        return False
    is_index = not tensor.is_floating_point() and tensor.dtype != torch.bool
    if is_index and (d.domain is not None or (d.low, d.high) != USUAL_RANGE):
        return False
    if d.shape is not None:
        return tuple(tensor.shape) == d.shape
    low, high = d.side
    return d.rank[0] <= tensor.ndim <= d.rank[1] and all(low <= n <= max(high, 8) for n in tensor.shape)


def _is_tame(tensor: torch.Tensor) -> bool:
    """Return whether results computed from a tensor are still informative: mostly finite elements, no huge ones."""
    if not tensor.is_floating_point():
        return True
    finite = tensor.isfinite()
    return 2 * int(finite.sum()) >= tensor.numel() and not bool((tensor[finite].abs() > LARGEST).any())


def _is_input(operand: Any) -> bool:
    return isinstance(operand, Leaf) and not operand.constant
