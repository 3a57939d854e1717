"""What eager computes at every value of a graph, and whether what it computes is defined at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from clika_ref.core.execution import interpret
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.types import TensorType

UNDEFINED = "a cast of a float that the integer dtype cannot hold: C++ leaves the result open, so processors differ"


def eager_values(graph: Graph, inputs: Sequence[torch.Tensor]) -> dict[Value, torch.Tensor]:
    """Return the tensor at each value of a graph: inputs, constants and every result.

    Raises:
        ClikaError: eager refuses a call.
    """
    values: dict[Value, torch.Tensor] = dict(zip(graph.inputs, inputs, strict=True))
    values.update({v: v.data for v in graph.constants.values() if v.data is not None})

    def keep(node: Node, results: tuple[torch.Tensor, ...]) -> None:
        values.update(zip(node.outputs, results, strict=True))

    with torch.no_grad():
        interpret(graph, inputs, keep)
    return values


def type_of(tensor: torch.Tensor) -> TensorType:
    """Return dtype and shape of a tensor."""
    return TensorType(tensor.dtype, tuple(tensor.shape))


def is_undefined(operands: Sequence[Any], results: Sequence[torch.Tensor], kind: str) -> bool:
    """Whether a call casts floats to integers that cannot hold them (NaN, infinities, negatives to uint8)."""
    if kind != "to" or results[0].dtype.is_floating_point or results[0].dtype == torch.bool:
        return False
    x = operands[0]
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return False
    limits = torch.iinfo(results[0].dtype)
    whole = x.double().trunc()
    return not bool(((whole >= limits.min) & (whole < limits.max + 1)).all())


def has_undefined(graph: Graph, values: dict[Value, torch.Tensor]) -> bool:
    """Whether any call of a graph is undefined on these values."""
    return any(
        is_undefined(
            [values[v] if isinstance(v, Value) else v for v in n.inputs], [values[v] for v in n.outputs], n.kind
        )
        for n in graph.nodes
    )
