"""Drawn calls on the values of a graph, some with attributes that relate to earlier calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from clika_ref.core.ir import Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.samples import TensorDescription, TensorSample, random_draw, realize
from clika_ref.core.symbols import is_symbolic
from clika_ref.core.types import TensorType
from clika_ref_conformance.drawing.eager_builder import EagerGraphBuilder, LeafTensor
from clika_ref_conformance.drawing.motifs.attribute_reuse import insert_special_numbers, reuse_attributes
from clika_ref_conformance.drawing.sampling import UnjudgedDtypeError, draw_call

ATTENTION = "scaled_dot_product_attention"  # it divides by the number of shared heads, which may be 0
UNVALIDATED_OPERATORS = (
    ATTENTION,
    "as_strided",
    "as_strided_scatter",
    "binary_cross_entropy",
    "ctc_loss",
    "embedding_bag",
    "weight_norm",
)
UNSAFE_OPERATORS = frozenset({*UNVALIDATED_OPERATORS, "dynamic_lstm", "lstm", "gru", "rnn_tanh", "rnn_relu"})
"""Operators with attributes that PyTorch does not validate; other values than the drawn ones corrupt memory."""

MAX_DIM_SIZE = 8
"""Maximum dim size of values that replace a drawn tensor, so that graphs stay small."""


@dataclass(frozen=True, slots=True)
class _ExistingSample(TensorSample):
    """A graph value used for a tensor that a sampler asked for."""

    value: Value | None = None


@dataclass
class CallGenerator:
    """Draws calls of operators onto the values of a growth.

    With probability ``standing``, a tensor that a sampler asks for is an existing value.
    """

    random: Random
    builder: EagerGraphBuilder
    reuse_share: float = 0.8
    constants: float = 0.3
    """Share of new tensors that are constants rather than inputs."""

    def __post_init__(self) -> None:
        """Create the generator of the elements from ``random``."""
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(62))

    def call(self, op: Operator, pool: Sequence[Value] = (), *, echoing: bool = False) -> Node | None:
        """Add one drawn call, on values of the pool where they fit; return None if the draw is illegal.

        With ``echoing``, its attributes may relate to those of earlier calls; see
        `clika_ref_conformance.drawing.motifs.attribute_reuse`.
        """
        if op.sampler is None:
            return None
        try:
            full = draw_call(op, self._make_draw(pool))
        except UnjudgedDtypeError as error:
            return self.builder.reject(op, str(error))
        operands = [self._resolve_operand(o) for o in full.operands]
        if echoing and op.name not in UNSAFE_OPERATORS:
            attrs = reuse_attributes(self.random, self.builder.graph, op.name, full.attrs)
            node = self.builder.add_call(op, insert_special_numbers(self.random, operands), attrs)
            if node is not None:
                return node
        return self.builder.add_call(op, operands, full.attrs)

    def _make_draw(self, pool: Sequence[Value]) -> Callable[[Any], Any]:
        anything = random_draw(self.random)

        def draw(description: Any, /) -> Any:
            if isinstance(description, TensorDescription) and self.random.random() < self.reuse_share:
                fitting = [v for v in pool if is_match(v.type, description)]
                if fitting:
                    value = self.random.choice(fitting)
                    d = description
                    sizes: Any = value.type.shape
                    return _ExistingSample(value.type.dtype, sizes, d.low, d.high, d.domain, d.nan, d.unique, value)
            return anything(description)

        return draw

    def _resolve_operand(self, operand: Any) -> Any:
        if isinstance(operand, _ExistingSample):
            return operand.value
        if not isinstance(operand, TensorSample | torch.Tensor):
            return operand
        constant = self.random.random() < self.constants
        literal = constant and self.random.random() < 1 / 4
        name = f"clika.lifted_tensor_{len(self.builder.graph.constants)}" if literal else ""
        made = operand if isinstance(operand, torch.Tensor) else realize(operand, self.generator)
        return LeafTensor(made, constant, name=name)


def is_match(kind: TensorType, description: TensorDescription) -> bool:
    """Return whether a value of a type matches a sampler's description of a tensor."""
    if kind.dtype not in description.dtypes or description.unique or is_symbolic(kind.shape):
        return False
    if description.shape is not None:
        return kind.shape == description.shape
    low, high = description.rank
    longest = max(description.size[1], MAX_DIM_SIZE)
    return low <= kind.rank <= high and all(description.size[0] <= int(size) <= longest for size in kind.shape)
