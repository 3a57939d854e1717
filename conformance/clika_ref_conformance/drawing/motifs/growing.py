"""A graph in the making that is computed as it grows, so that every call that it takes is a legal one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import torch

from clika_ref.core.errors import PassError
from clika_ref.core.inference import infer
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.samples import Call, Descriptions, TensorDescription, TensorSample, random_draw, realize
from clika_ref.core.symbols import is_symbolic, resolve
from clika_ref.core.types import TensorType
from clika_ref_conformance.cases import Case, Run
from clika_ref_conformance.drawing.motifs.echoes import echo, telling

ATTENTION = "scaled_dot_product_attention"  # it divides by the number of shared heads, which may be 0
TRUSTING = (
    ATTENTION,
    "as_strided",
    "as_strided_scatter",
    "binary_cross_entropy",
    "ctc_loss",
    "embedding_bag",
    "weight_norm",
)
UNCHECKED = frozenset({*TRUSTING, "lstm", "gru", "rnn_tanh", "rnn_relu"})
"""Operators of which PyTorch trusts the attributes: with others than they were drawn with, they corrupt memory."""

LONGEST_SIDE = 8
"""A value may stand for a drawn tensor if none of its sides is longer: graphs stay small."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that becomes an input of the graph, or a constant where ``constant`` holds."""

    tensor: torch.Tensor
    constant: bool = False
    type: TensorType | None = None
    """The type of an input with dynamic sides."""
    name: str = ""


@dataclass(frozen=True, slots=True)
class _Standing(TensorSample):
    """A value of the graph that stands where a sampler asked for a tensor."""

    value: Value | None = None


class Growth:
    """A graph, and the tensor that each of its values holds on one set of inputs."""

    def __init__(self, operators: Mapping[str, Operator]) -> None:
        self.graph = Graph("drawn")
        self.operators = operators
        self.tensors: dict[Value, torch.Tensor] = {}
        self.sizes: dict[str, int] = {}

    def leaf(self, leaf: Leaf) -> Value:
        """Add an input or a constant."""
        if leaf.constant:
            floats = leaf.tensor.is_floating_point()
            data = torch.nn.Parameter(leaf.tensor.detach()) if floats else leaf.tensor
            value = self.graph.add_constant(data, leaf.name or f"layer{len(self.graph.constants)}.weight")
        else:
            kind = leaf.type or TensorType(leaf.tensor.dtype, tuple(leaf.tensor.shape))
            value = self.graph.add_input(kind, leaf.name or f"x{len(self.graph.inputs)}")
        self.tensors[value] = leaf.tensor.detach()
        return value

    def place(self, op: Operator, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Node | None:
        """Add a call on values, leaves, numbers and None; return None, and add nothing, where it is not legal."""
        tensors = [self._tensor(o) for o in operands]
        given = resolve_attrs(op, attrs, self.sizes)
        kinds = [_type(o) if isinstance(o, Leaf) else o for o in operands]
        try:
            with torch.no_grad():
                result = op(*tensors, **given)
            results = (result,) if isinstance(result, torch.Tensor) else tuple(result)
            types = _types(op, kinds, attrs, results, dynamic=bool(self.sizes))
        except Exception:  # noqa: BLE001 - whatever eager or inference refuses is no legal call
            return None
        inputs = [self.leaf(o) if isinstance(o, Leaf) else o for o in operands]
        node = self.graph.insert(Node(op, inputs, dict(attrs)), types)
        self.tensors.update(zip(node.outputs, results, strict=True))
        return node

    def finish(self, name: str, outputs: Sequence[Value] = ()) -> Case:
        """Return the case: the graph returns ``outputs``, or every value that a node makes and nobody reads."""
        unread = [v for node in self.graph.nodes for v in node.outputs if not v.uses]
        for value in outputs or unread:
            self.graph.add_output(value)
        return Case(name, self.graph, [Run("typical", tuple(self.tensors[v] for v in self.graph.inputs))])

    def _tensor(self, operand: Any) -> Any:
        if isinstance(operand, Leaf):
            return operand.tensor
        return self.tensors[operand] if isinstance(operand, Value) else resolve(operand, self.sizes)


SAMPLED = 4
"""Sampled calls by which it is found whether the sizes of an operator's results may depend on elements."""


@cache
def _is_always_inferable(op: Operator) -> bool:
    """Whether types can be inferred of sampled calls: a fact of the operator, so that every process draws alike."""
    for seed in range(SAMPLED):
        draw = random_draw(Random(seed))  # noqa: S311 - no secret
        call = op.sampler(draw, Descriptions()) if op.sampler else Call(())
        full = op.call(*call.operands, **call.attrs)
        kinds = [TensorType(o.dtype, o.shape) if isinstance(o, TensorSample) else o for o in full.operands]
        try:
            infer(op, kinds, full.attrs)
        except PassError:
            return False
    return True


def _types(
    op: Operator, operands: Sequence[Any], attrs: Mapping[str, Any], results: Sequence[torch.Tensor], *, dynamic: bool
) -> Sequence[TensorType]:
    """Infer the types of a call, or where no side is dynamic, read them off: inference takes longer than eager."""
    if dynamic or op.sampler is None or not _is_always_inferable(op):
        return infer(op, operands, attrs)
    return [TensorType(r.dtype, tuple(r.shape)) for r in results]


def resolve_attrs(op: Operator, attrs: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return attributes as eager takes them: sizes as numbers, and a device where the operator needs one."""
    given = {name: resolve(value, sizes) for name, value in attrs.items()}
    if op.takes_device and given["device"] is None:
        given["device"] = torch.device("cpu")
    return given


def _type(leaf: Leaf) -> TensorType:
    return leaf.type or TensorType(leaf.tensor.dtype, tuple(leaf.tensor.shape))


@dataclass
class Drawing:
    """Draws calls of operators onto the values of a growth: ``standing`` of the tensors asked for are those values."""

    random: Random
    growth: Growth
    standing: float = 0.8
    constants: float = 0.3
    """The share of new tensors that are constants rather than inputs."""

    def __post_init__(self) -> None:
        """Seed the elements from the same source as everything else."""
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(62))

    def call(self, op: Operator, pool: Sequence[Value] = (), *, echoing: bool = False) -> Node | None:
        """Add one drawn call, on values of the pool where they fit; None where the draw was not legal.

        With ``echoing`` it may answer calls that are there already; see `clika_ref_conformance.drawing.motifs.echoes`.
        """
        if op.sampler is None:
            return None
        drawn: Call = op.sampler(self._driver(pool), Descriptions())
        full = op.call(*drawn.operands, **drawn.attrs)
        operands = [self._operand(o) for o in full.operands]
        if echoing and op.name not in UNCHECKED:
            attrs = echo(self.random, self.growth.graph, op.name, full.attrs)
            node = self.growth.place(op, telling(self.random, operands), attrs)
            if node is not None:
                return node
        return self.growth.place(op, operands, full.attrs)

    def _driver(self, pool: Sequence[Value]) -> Callable[[Any], Any]:
        anything = random_draw(self.random)

        def draw(description: Any, /) -> Any:
            if isinstance(description, TensorDescription) and self.random.random() < self.standing:
                fitting = [v for v in pool if fits(v.type, description)]
                if fitting:
                    value = self.random.choice(fitting)
                    d = description
                    sides: Any = value.type.shape
                    return _Standing(value.type.dtype, sides, d.low, d.high, d.domain, d.unique, value)
            return anything(description)

        return draw

    def _operand(self, operand: Any) -> Any:
        if isinstance(operand, _Standing):
            return operand.value
        if not isinstance(operand, TensorSample):
            return operand
        constant = self.random.random() < self.constants
        literal = constant and self.random.random() < 1 / 4
        name = f"clika.lifted_tensor_{len(self.growth.graph.constants)}" if literal else ""
        return Leaf(realize(operand, self.generator), constant, name=name)


def fits(kind: TensorType, description: TensorDescription) -> bool:
    """Whether a value of a type may stand where a sampler describes a tensor."""
    if kind.dtype not in description.dtypes or description.unique or is_symbolic(kind.shape):
        return False
    if description.shape is not None:
        return kind.shape == description.shape
    low, high = description.rank
    longest = max(description.side[1], LONGEST_SIDE)
    return low <= kind.rank <= high and all(description.side[0] <= int(side) <= longest for side in kind.shape)
