"""Trials: a whole plan is run on data and held against float, as what helps one model spoils another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from clika_ref.core.execution import interpret
from clika_ref.core.ir import Graph
from clika_ref.core.operators import Operator
from clika_ref.quantization.quantizing import Plan, quantize_graph


@dataclass
class Trial:
    """One graph, and inputs on which plans for it are compared."""

    graph: Graph
    operators: Mapping[str, Operator]
    inputs: Sequence[Tensor]

    @cached_property
    def _wanted(self) -> list[Tensor]:
        with torch.no_grad():
            return interpret(self.graph, self.inputs)[0]

    @torch.no_grad()
    def error(self, plan: Plan) -> float:
        """Return ``||Q - F||^2`` over all float outputs."""
        twin = self.graph.clone()
        quantize_graph(twin, plan, self.operators)
        pairs = zip(interpret(twin, self.inputs)[0], self._wanted, strict=True)
        return sum(float((q.double() - f.double()).square().sum()) for q, f in pairs if f.is_floating_point())
