"""Graphs with their inputs, for tests of the judge."""

from __future__ import annotations

import torch
from clika_ref_conformance.judging.judge import CaseReference

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph
from clika_ref.core.registry import load_registry
from clika_ref.core.types import TensorType

OPERATORS = load_registry().operators


class Drawing:
    """A graph under construction, with its inputs."""

    def __init__(self, *inputs: torch.Tensor) -> None:
        self.graph = Graph("drawing")
        self.inputs = inputs
        self.values = [self.graph.add_input(TensorType(t.dtype, tuple(t.shape)), f"x{i}") for i, t in enumerate(inputs)]
        self.build = Builder(self.graph, OPERATORS)

    def reference(self, *outputs: object) -> CaseReference:
        for value in outputs:
            self.graph.add_output(value)
        return CaseReference(self.graph, self.inputs)


def make_call_reference(op: str, *operands: object, **attrs: object) -> CaseReference:
    """Return the reference of a graph with one node."""
    drawing = Drawing(*(o for o in operands if isinstance(o, torch.Tensor)))
    values = iter(drawing.values)
    found = drawing.build(op, *(next(values) if isinstance(o, torch.Tensor) else o for o in operands), **attrs)
    return drawing.reference(*(found if isinstance(found, tuple) else (found,)))


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def round_to_tf32(x: torch.Tensor) -> torch.Tensor:
    """Round to 10 bits of fraction, as tensor cores read their operands."""
    scale = 2.0 ** (torch.frexp(x).exponent - 11)
    return torch.round(x / scale) * scale
