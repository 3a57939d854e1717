"""Drawn calls in which descriptions of tensors are answered by values that exist, where one fits."""

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
"""Of any tensor: larger ones cost time and find nothing more."""
LARGEST = 1e6
"""Values beyond are not built upon: products of them overflow, and everything behind is infinite."""
DTYPES = (torch.float32, torch.int64, torch.bool)
"""Of new tensors, where a description leaves the choice."""
USUAL_RANGE = (-3.0, 3.0)
"""Elements of a description that does not say which; integers that say so are indices or sizes."""


def accept_all(_: Node) -> None:
    """Refuse nothing: what `GraphDrawing` asks where no target is meant."""
    return


@dataclass(frozen=True, slots=True)
class PlacedSample(TensorSample):
    """A tensor that a sampler was given: a value of the graph, or one to be made if the call is taken."""

    value: Value | None = None
    constant: bool = False


@dataclass
class GraphDrawing:
    """Draws calls onto the values of a graph, steered towards lengths that are there.

    Args:
        draw: decides all that is to be decided; the descriptions of tensors too, where a new one is needed.
        refusal: says why the target cannot run a node, or returns None; such nodes are not taken.

    """

    draw: Draw
    refusal: Callable[[Node], str | None] = accept_all
    dtypes: Sequence[torch.dtype] = DTYPES
    samples: list[TensorSample] = field(default_factory=list[TensorSample])
    """Of each input of the graph, in order."""
    seed: int = 0
    tried: int = 0
    _wanted: Value | None = None
    _was_steered: bool = False

    def __post_init__(self) -> None:
        """Start from an empty graph."""
        self.growth = Growth(self._objection)

    def add(self, op: Operator, first: Value | None = None) -> Node | None:
        """Draw one call and append it, or return None where it is none.

        Args:
            op: the operator.
            first: the value that should answer the first description that it fits.

        """
        return self.take(op, self.drawn(op, first))

    def drawn(self, op: Operator, first: Value | None = None) -> Call:
        """Draw one call, without taking it; its tensors are `PlacedSample`s."""
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
        """Append a drawn call, or return None where eager or the target refuses it."""
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
        """Return how often calls of an operator were not taken."""
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
        """Ask for the call anew where the value that is wanted would fit if other lengths had been drawn.

        It is tried once for a call; what eager then refuses is rejected like any other call.
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
        back = min(self.draw(Integers(0, 7)), self.draw(Integers(0, 7)), len(found) - 1)  # rather what is new
        return found[-1 - back]

    def _refusal(self, node: Node, results: Sequence[TensorType]) -> str | None:
        """Ask the target about a node on inputs of its own, so that a refusal leaves no trace in the graph."""
        if node.is_random:
            return "random"
        trial = Graph()
        inputs = [trial.add_input(t, "x") if isinstance(t, TensorType) else t for t in node.inputs]
        return self.refusal(trial.insert(Node(node.op, inputs, node.attrs), results))


def fits(d: TensorDescription, tensor: torch.Tensor) -> bool:
    """Whether a tensor that exists may stand where a description asks for one.

    Floats outside the domain are legal and give NaN; indices must lie in theirs, and elements without ties are made.
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
    """Whether what is computed from a tensor still says something: most of it finite, none of it huge."""
    if not tensor.is_floating_point():
        return True
    finite = tensor.isfinite()
    return 2 * int(finite.sum()) >= tensor.numel() and not bool((tensor[finite].abs() > LARGEST).any())


def _is_input(operand: Any) -> bool:
    return isinstance(operand, Leaf) and not operand.constant
