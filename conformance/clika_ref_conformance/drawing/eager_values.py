"""What eager computes at every value of a graph, and whether what it computes is defined at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from clika_ref.core.execution import interpret
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.types import TensorType


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


def is_undefined(operands: Sequence[Any], attrs: Mapping[str, Any], results: Sequence[torch.Tensor]) -> bool:
    """Whether a call casts floats to integers that cannot hold them (NaN, infinities, negatives to uint8).

    Casts are `to`, and reductions that are told a ``dtype`` (``sum(x, dtype=torch.int32)``).
    """
    dtype = attrs.get("dtype")
    if not isinstance(dtype, torch.dtype) or dtype.is_floating_point or dtype == torch.bool or dtype.is_complex:
        return False
    limits = torch.iinfo(dtype)
    if not results or results[0].dtype != dtype:
        return False
    wholes = [x.double().trunc() for x in operands if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return not all(bool(((x >= limits.min) & (x < limits.max + 1)).all()) for x in wholes)


def has_undefined(graph: Graph, values: Mapping[Value, torch.Tensor]) -> bool:
    """Whether any call of a graph is undefined on these values."""
    return any(
        is_undefined(
            [values[v] if isinstance(v, Value) else v for v in n.inputs], n.attrs, [values[v] for v in n.outputs]
        )
        for n in graph.nodes
    )


def reads_signs_of_zeros(graph: Graph, values: Mapping[Value, torch.Tensor]) -> bool:
    """Whether an output depends on the sign of a zero, which every error class leaves open (``1 / relu(-0.0)``)."""

    def unsigned(_: Node, results: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(r + 0.0 if r.is_floating_point() else r for r in results)

    with torch.no_grad():
        outputs, _ = interpret(graph, [values[v] for v in graph.inputs], unsigned)
    pairs = zip([values[v] for v in graph.outputs], outputs, strict=True)
    return not all(torch.equal(a.isnan(), b.isnan()) and torch.equal(a[~a.isnan()], b[~b.isnan()]) for a, b in pairs)
