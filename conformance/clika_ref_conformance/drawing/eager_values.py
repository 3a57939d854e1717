"""Eager results for every value of a graph, and a check that they are well defined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from clika_ref.core.execution import interpret
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.types import TensorType


def compute_eager_values(graph: Graph, inputs: Sequence[torch.Tensor]) -> dict[Value, torch.Tensor]:
    """Return the tensor of each value of a graph: inputs, constants and all results.

    Raises:
        ClikaError: eager rejects a call.
    """
    values: dict[Value, torch.Tensor] = dict(zip(graph.inputs, inputs, strict=True))
    values.update({v: v.data for v in graph.constants.values() if v.data is not None})

    def store_results(node: Node, results: tuple[torch.Tensor, ...]) -> None:
        values.update(zip(node.outputs, results, strict=True))

    with torch.no_grad():
        interpret(graph, inputs, store_results)
    return values


def type_of(tensor: torch.Tensor) -> TensorType:
    """Return the dtype and shape of a tensor."""
    return TensorType(tensor.dtype, tuple(tensor.shape))


def is_undefined(operands: Sequence[Any], attrs: Mapping[str, Any], results: Sequence[torch.Tensor]) -> bool:
    """Return whether a call casts floats to an integer dtype that cannot hold them.

    Examples are NaN and infinities, and negative numbers for uint8. Besides `to`, reductions with a ``dtype`` argument
    cast (``sum(x, dtype=torch.int32)``).
    """
    dtype = attrs.get("dtype")
    if not isinstance(dtype, torch.dtype) or dtype.is_floating_point or dtype == torch.bool or dtype.is_complex:
        return False
    limits = torch.iinfo(dtype)
    if not results or results[0].dtype != dtype:
        return False
    truncated = [x.double().trunc() for x in operands if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return not all(bool(((x >= limits.min) & (x < limits.max + 1)).all()) for x in truncated)


def has_undefined_calls(graph: Graph, values: Mapping[Value, torch.Tensor]) -> bool:
    """Return whether any call of a graph is undefined on these values."""
    return any(
        is_undefined(
            [values[v] if isinstance(v, Value) else v for v in n.inputs], n.attrs, [values[v] for v in n.outputs]
        )
        for n in graph.nodes
    )


def is_zero_sign_sensitive(graph: Graph, values: Mapping[Value, torch.Tensor]) -> bool:
    """Return whether an output depends on the sign of a zero (``1 / relu(-0.0)``).

    Every error class (`clika_ref.core.accuracy`) leaves that sign unspecified.
    """

    def drop_zero_signs(_: Node, results: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(r + 0.0 if r.is_floating_point() else r for r in results)

    with torch.no_grad():
        outputs, _ = interpret(graph, [values[v] for v in graph.inputs], drop_zero_signs)
    pairs = zip([values[v] for v in graph.outputs], outputs, strict=True)
    return not all(torch.equal(a.isnan(), b.isnan()) and torch.equal(a[~a.isnan()], b[~b.isnan()]) for a, b in pairs)
