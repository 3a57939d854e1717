"""Low-bit weights that are dequantized to float, and matrix products with them that are exact.

All scales are powers of two. The other operand has integers, with a maximum of 127 in each block of a row. A runtime
that quantizes it block-wise to INT8 therefore loses nothing, and no sum rounds in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph
from clika_ref.core.registry import Registry
from clika_ref.core.types import TensorType
from clika_ref_conformance.cases import CaseRun, GraphCase

INPUT_ROWS = 3
"""Number of rows of the matrix that is multiplied with a weight."""

MAX_INPUT = 127
"""Largest element of that matrix, at the start of every `MIN_BLOCK_SIZE` of a row."""

MIN_BLOCK_SIZE = 16
"""Minimum block size of block-wise quantization in a runtime."""


@dataclass(frozen=True)
class StoredWeightLayer:
    """A quantized constant ``[inputs, outputs]`` and its use."""

    name: str
    bits: int
    block_size: int | None
    """Number of consecutive inputs that share a scale; None means one scale per output."""
    inputs: int
    outputs: int
    is_multiplied: bool = True
    """Whether the graph returns a product with the weight, or the dequantized weight itself."""

    def is_known(self, registry: Registry) -> bool:
        """Return whether a plugin declares the operator that reads the weight."""
        return not self.is_multiplied or "matmul" in registry.operators


STORED_WEIGHTS = (
    StoredWeightLayer("int4 of an odd number", 4, None, 7, 3, is_multiplied=False),
    StoredWeightLayer("int4 in blocks", 4, 16, 64, 5, is_multiplied=False),
    StoredWeightLayer("int8 in blocks", 8, 16, 32, 5, is_multiplied=False),
    StoredWeightLayer("product with int4 per channel", 4, None, 64, 8),
    StoredWeightLayer("product with int4 in blocks", 4, 32, 128, 8),
    StoredWeightLayer("product with int4 in one block", 4, 64, 64, 16),
    StoredWeightLayer("product with int8 in blocks", 8, 16, 64, 8),
)


def make_stored_weight_case(
    weight: StoredWeightLayer, registry: Registry, seed: int
) -> tuple[GraphCase, dict[str, np.ndarray]]:
    """Return a graph that reads a stored weight as a case, and the exact result for each run."""
    random = np.random.default_rng(seed)
    end = 2 ** (weight.bits - 1)
    codes = random.integers(-end, end, (weight.inputs, weight.outputs))
    blocks = weight.inputs // weight.block_size if weight.block_size else 1
    scales = np.exp2(random.integers(-8, -3, (blocks, weight.outputs)))
    values = codes * scales.repeat(weight.inputs // blocks, 0)
    x = random.integers(-MAX_INPUT, MAX_INPUT + 1, (INPUT_ROWS, weight.inputs))
    x[:, ::MIN_BLOCK_SIZE] = MAX_INPUT
    graph = _build_graph(weight, registry, codes.astype(np.int8), scales.astype(np.float32))
    runs = [CaseRun("drawn", (torch.from_numpy(x.astype(np.float32)),)), CaseRun("zeros", (torch.zeros(x.shape),))]
    of_zeros = np.zeros((INPUT_ROWS, weight.outputs)) if weight.is_multiplied else values
    expected = {"drawn": x @ values if weight.is_multiplied else values, "zeros": of_zeros}
    return GraphCase(weight.name, graph, runs, {"weight": weight.name}), {
        k: v.astype(np.float32) for k, v in expected.items()
    }


def _build_graph(weight: StoredWeightLayer, registry: Registry, codes: np.ndarray, scales: np.ndarray) -> Graph:
    graph = Graph("stored_weight")
    x = graph.add_input(TensorType(torch.float32, (INPUT_ROWS, weight.inputs)), "x")
    build = Builder(graph, registry.operators)
    stored = graph.add_constant(torch.from_numpy(codes), "w")
    in_blocks = weight.block_size is not None
    scale = graph.add_constant(torch.from_numpy(scales if in_blocks else scales[0]), "w_scale")
    axis = 0 if in_blocks else 1
    read = build("dequantize", stored, scale, axis=axis, block_size=weight.block_size, bits=weight.bits)
    graph.add_output(build("matmul", x, read) if weight.is_multiplied else read)
    return graph
