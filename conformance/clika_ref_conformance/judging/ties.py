"""Operators that may choose any of several equal elements, and the correctness of their results."""

from __future__ import annotations

import torch

from clika_ref.core.ir import Node
from clika_ref_conformance.judging.expected_output import find_equal_elements
from clika_ref_conformance.judging.rounding import ConcreteCall, is_float

TIE_BREAKING_OPERATORS = frozenset({"topk", "sort", "argsort", "kthvalue", "median_dim", "nanmedian_dim", "mode"})
"""Operators that may choose any of several equal elements; others (argmax, max along a dim) return the first."""
UNIQUE_INDEX_OPERATORS = frozenset({"topk", "sort", "argsort"})
"""Operators that return every index at most once."""
TIE_NOISE = 2.0**-45
"""Relative size of the noise that breaks ties: far below the dtypes under test, far above float64's own unit."""


def has_open_ties(node: Node) -> bool:
    """Return whether a node may choose any of several equal elements."""
    return node.op.name in TIE_BREAKING_OPERATORS and not node.attrs.get("stable", False)


def break_ties(call: ConcreteCall, generator: torch.Generator) -> ConcreteCall:
    """Return the call with random noise on its operand that breaks ties."""
    x, *rest = call.operands
    if not is_float(x) or not x.numel():
        return call
    noise = torch.rand(x.shape, generator=generator, dtype=torch.float64) - 0.5
    scale = x.abs().nan_to_num(0.0, 0.0).clamp(min=2.0**-100)
    return ConcreteCall(call.name, call.function, (x + noise * scale * TIE_NOISE, *rest), call.attrs)


def match_choices(call: ConcreteCall, indices: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return a mask of chosen indices with an element equal to the one that eager chose."""
    x, dim = call.operands[0], call.attrs.get("dim", -1)
    if x.ndim == 0:
        return chosen == indices
    if chosen.numel() and (int(chosen.min()) < 0 or int(chosen.max()) >= x.shape[dim]):
        return chosen == indices
    flat = indices.ndim < x.ndim
    at, to = (indices.unsqueeze(dim), chosen.unsqueeze(dim)) if flat else (indices, chosen)
    wanted, got = x.gather(dim, at), x.gather(dim, to)
    if call.attrs.get("sorted") is False:
        wanted, got = wanted.sort(dim).values, got.sort(dim).values
    right = find_equal_elements(got, wanted)
    if call.name in UNIQUE_INDEX_OPERATORS and to.numel():
        ordered = to.sort(dim).values
        if bool((ordered.diff(dim=dim) == 0).any()):
            return torch.zeros_like(chosen, dtype=torch.bool)
    return right.squeeze(dim) if flat else right
