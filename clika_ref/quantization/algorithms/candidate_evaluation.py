"""Candidate evaluation: run a whole plan on data and compare it with float, as no algorithm helps every model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from clika_ref.core.ir import Graph
from clika_ref.core.operators import Operator
from clika_ref.quantization.algorithms.sqnr import relative_squared_error
from clika_ref.quantization.graph_runs import run_graph
from clika_ref.quantization.qdq.insertion import Plan, quantize_graph


@dataclass
class CandidateEvaluation:
    """A graph, and inputs to compare its plans on."""

    graph: Graph
    operators: Mapping[str, Operator]
    """The operators of the registry."""
    inputs: Sequence[Tensor]

    @cached_property
    def outputs(self) -> list[Tensor]:
        """Outputs of the graph in float: one tensor for each output, without integer tensors."""
        with torch.no_grad():
            return [o for o in run_graph(self.graph, self.inputs) if o.is_floating_point()]

    @torch.no_grad()
    def error(self, plan: Plan) -> float:
        """Return ``||Q - F||^2 / ||F||^2``, averaged over all float outputs that are not 0."""
        twin = self.graph.clone()
        quantize_graph(twin, plan, self.operators)
        found = [o for o in run_graph(twin, self.inputs) if o.is_floating_point()]
        return relative_squared_error(found, self.outputs)
