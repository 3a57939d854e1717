"""Whether what eager returns is of the type that the graph declares, at the sizes at hand."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch

from clika_ref.core.execution import read_sizes
from clika_ref.core.ir import Graph
from clika_ref.core.symbols import evaluate


def mistyped(graph: Graph, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> str:
    """Say which output of a graph is not of its declared type, or return nothing.

    A wrong type rule computes nothing wrong by itself: it misleads whatever reads the type later. Left out are outputs
    with a side that the data decide: nothing infers their types, whoever adds the node gives them.

    Args:
        graph: what was compiled.
        inputs: one tensor for each input.
        outputs: what eager returns for them.

    """
    sizes = read_sizes(graph, inputs)
    for index, (value, tensor) in enumerate(zip(graph.outputs, outputs, strict=True)):
        declared = value.type
        if any(_is_open(side, sizes) for side in declared.shape):
            continue
        shape = tuple(evaluate(side, sizes) for side in declared.shape)
        if (declared.dtype, shape) != (tensor.dtype, tuple(tensor.shape)):
            found = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            given = f" where {', '.join(f'{name} is {size}' for name, size in sizes.items())}" if sizes else ""
            return f"output {index} is declared as {declared}, but eager returns {found}{given}; see its type rule"
    return ""


def _is_open(side: object, sizes: dict[str, int]) -> bool:
    return isinstance(side, sympy.Basic) and any(str(symbol) not in sizes for symbol in side.free_symbols)
