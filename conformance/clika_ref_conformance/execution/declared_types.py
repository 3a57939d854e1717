"""Check that eager's outputs have the types that the graph declares, at the actual sizes."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch

from clika_ref.core.execution import read_sizes
from clika_ref.core.ir import Graph
from clika_ref.core.symbols import evaluate


def find_mistyped_output(graph: Graph, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> str:
    """Describe the first output of a graph that does not have its declared type; empty if all have it.

    A wrong type rule computes nothing wrong itself, but misleads whatever reads the type later. Outputs with a
    data-dependent dim are skipped: their types are not inferred but given with the node.

    Args:
        graph: graph that was compiled.
        inputs: one tensor for each input.
        outputs: results of eager for the inputs.
    """
    sizes = read_sizes(graph, inputs)
    for index, (value, tensor) in enumerate(zip(graph.outputs, outputs, strict=True)):
        declared = value.type
        symbols = {str(s) for length in declared.shape if isinstance(length, sympy.Basic) for s in length.free_symbols}
        if not symbols <= sizes.keys():
            continue
        shape = tuple(evaluate(length, sizes) for length in declared.shape)
        if (declared.dtype, shape) != (tensor.dtype, tuple(tensor.shape)):
            found = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            given = f" where {', '.join(f'{name} is {size}' for name, size in sizes.items())}" if sizes else ""
            return f"output {index} is declared as {declared}, but eager returns {found}{given}. Correct its type rule."
    return ""
