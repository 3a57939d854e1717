"""A few operators declared here, so that the core is tested without any plugin."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.types import Number

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph, Value
from clika_ref.core.operators import Operator, operator
from clika_ref.core.symbols import Symbol, SymbolSource, make_symbol
from clika_ref.core.types import TensorType


@operator()
def neg(x: Tensor) -> Tensor:
    """``-x``."""
    return -x


@operator()
def add(x: Tensor, y: Tensor | Number) -> Tensor:
    """``x + y``."""
    return x + y


@operator()
def split_in_half(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the halves of ``x`` along dim 0."""
    middle = x.shape[0] // 2
    return x[:middle], x[middle:]


@operator()
def reshape(x: Tensor, *, shape: Sequence[int]) -> Tensor:
    """Return ``x`` in another shape."""
    return x.reshape(shape)


@operator()
def nonzero(x: Tensor) -> Tensor:
    """Return the indices of elements that are not 0, ``int64[n, rank]``."""
    return x.nonzero()


@operator()
def full(*, size: Sequence[int], value: float, device: torch.device | None = None) -> Tensor:
    """Return a tensor full of one number."""
    return torch.full(tuple(size), value, device=device)


@operator(random=True)
def noise(x: Tensor) -> Tensor:
    """Return random numbers in the shape of ``x``."""
    return torch.rand_like(x)


TABLE: dict[str, Operator] = {op.name: op for op in (neg, add, split_in_half, reshape, nonzero, full, noise)}


class Draft(Graph):
    """A graph that is quick to write: call it to add a node."""

    def __call__(self, op: str, *operands: Any, types: Sequence[TensorType] = (), **attrs: Any) -> Any:
        """Add a node at the end."""
        return Builder(self, TABLE)(op, *operands, types=types, **attrs)

    def takes(self, *shape: Any, name: str = "x") -> Value:
        """Add a float32 input; a dim given as text is dynamic."""
        sides = tuple(make_symbol(side) if isinstance(side, str) else side for side in shape)
        value = self.add_input(TensorType(torch.float32, sides), name)
        for dim, side in enumerate(shape):
            if isinstance(side, str) and side not in self.symbols:
                self.symbols[side] = Symbol(side, 0, None, SymbolSource(value.name, dim))
        return value

    def returns(self, *values: Value) -> "Draft":
        """Append outputs."""
        for value in values:
            self.add_output(value)
        return self

    @property
    def kinds(self) -> list[str]:
        """The operators of the nodes, in order."""
        return [node.op_type for node in self.nodes]


@pytest.fixture
def graph() -> Draft:
    """Return an empty graph."""
    return Draft("draft")


@pytest.fixture
def operator_table() -> dict[str, Operator]:
    """Return the operators of these tests by name."""
    return dict(TABLE)
