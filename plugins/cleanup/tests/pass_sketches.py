"""Small hand-written graphs for the tests of passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from clika_ref_aten.plugin import clika_ref_operators

from clika_ref.core.deferred_constants import DeferredConstant
from clika_ref.core.inference import Builder
from clika_ref.core.invariants import verify
from clika_ref.core.ir import Graph, Value
from clika_ref.core.operators import operator
from clika_ref.core.passes import Pass, Pipeline
from clika_ref.core.symbols import Symbol, SymbolSource, make_symbol
from clika_ref.core.types import TensorType

OPERATORS = {op.name: op for op in clika_ref_operators()}


@operator(random=True)
def noise(x: torch.Tensor) -> torch.Tensor:
    """Return random numbers."""
    return torch.rand_like(x)


class Sketch:
    """A graph in the making: call it to add a node, then give its outputs and run a pass on it."""

    def __init__(self) -> None:
        """Start empty."""
        self.graph = Graph("sketch")
        self.build = Builder(self.graph, OPERATORS)

    def __call__(self, op: str, *operands: Any, **attrs: Any) -> Any:
        """Add a node."""
        return self.build(op, *operands, **attrs)

    def input(self, *shape: Any, dtype: torch.dtype = torch.float32, name: str = "x") -> Value:
        """Add an input; a dim given as text is dynamic."""
        sides = tuple(make_symbol(side) if isinstance(side, str) else side for side in shape)
        value = self.graph.add_input(TensorType(dtype, sides), name)
        for dim, side in enumerate(shape):
            if isinstance(side, str) and side not in self.graph.symbols:
                self.graph.symbols[side] = Symbol(side, 0, None, SymbolSource(value.name, dim))
        return value

    def constant(self, data: torch.Tensor, name: str = "weight") -> Value:
        """Add a constant; floats become a parameter."""
        return self.graph.add_constant(torch.nn.Parameter(data) if data.is_floating_point() else data, name)

    def returns(self, *values: Value) -> Sketch:
        """Append outputs."""
        for value in values:
            self.graph.add_output(value)
        return self

    @property
    def kinds(self) -> list[str]:
        """The operators of the nodes, in order."""
        return [node.op_type for node in self.graph.nodes]

    def clean(self, *passes: Pass, sizes: dict[str, int] | None = None) -> list[str]:
        """Run passes with the numeric check, check the invariants of every pass, and return the remaining op types."""
        drawn = [_fill(v.type, {**dict.fromkeys(self.graph.symbols, 3), **(sizes or {})}) for v in self.graph.inputs]
        outputs = [(v.name, v.type) for v in self.graph.outputs]
        state = list(self.graph.state)
        tensors = {name: (v.data, v.data.clone()) for name, v in self.graph.constants.items() if v.data is not None}
        Pipeline(passes, OPERATORS, check_inputs=drawn).run(self.graph)
        verify(self.graph)
        assert [(v.name, v.type) for v in self.graph.outputs] == outputs
        assert list(self.graph.state) == state
        for name, (data, before) in tensors.items():
            assert torch.equal(_bits(data), _bits(before)), f"{name} was changed in place"
        self._compute_formulas()
        revision = self.graph.revision
        for p in passes:
            p(self.graph, OPERATORS)
        assert self.graph.revision == revision, "not idempotent"
        return self.kinds

    def _compute_formulas(self) -> None:
        """Check that deferred constants compute their data."""
        for value in self.graph.constants.values():
            if (
                isinstance(value.deferred_data, DeferredConstant)
                and value.data is not None
                and value.data.device.type != "meta"
            ):
                found = replace(value.deferred_data, known=None)()
                assert torch.equal(_bits(found), _bits(value.data)), f"{value.name} is not equal to its deferred data"


def _bits(data: torch.Tensor) -> torch.Tensor:
    flat = data.detach().contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def _fill(type: TensorType, sizes: dict[str, int]) -> torch.Tensor:
    shape = [side if isinstance(side, int) else sizes[str(side)] for side in type.shape]
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64) * 3
    if type.dtype.is_floating_point and numbers.numel() > 3:
        numbers.view(-1)[:3] = torch.tensor([-0.0, float("nan"), float("inf")])
    return numbers.to(type.dtype) if type.dtype.is_floating_point else numbers.abs().to(type.dtype)
