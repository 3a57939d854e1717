"""Whether what a target returned is right: eager on the same inputs, exact arithmetic, and a bound between the two."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from clika_ref.core.execution import interpret
from clika_ref.core.ir import Graph
from clika_ref_conformance.verdicts import Comparison, Verdict


class Reference:
    """What a graph must return for one set of inputs, computed once and then held against any number of targets."""

    def __init__(self, graph: Graph, inputs: Sequence[torch.Tensor], *, seed: int = 0) -> None:
        self.graph = graph
        self.inputs = [t.clone() for t in inputs]
        self.seed = seed
        with torch.no_grad():
            self.eager, _ = interpret(graph, self.inputs)

    def judge(self, actual: Sequence[torch.Tensor]) -> Comparison:
        """Compare the outputs of a target."""
        for index, (e, a) in enumerate(zip(self.eager, actual, strict=True)):
            if e.dtype != a.dtype or e.shape != a.shape:
                message = f"output {index} is {a.dtype}{list(a.shape)} instead of {e.dtype}{list(e.shape)}"
                return Comparison(Verdict.STRUCTURE, message)
            scale = float(e.double().nan_to_num(0, 0, 0).abs().max()) if e.numel() else 0.0
            eps = torch.finfo(e.dtype).eps if e.dtype.is_floating_point else 0.0
            if not torch.allclose(e.double(), a.double(), rtol=0, atol=100 * eps * scale, equal_nan=True):
                return Comparison(Verdict.VALUE, f"output {index} is {a} instead of {e}")
        return Comparison(Verdict.PASS)
