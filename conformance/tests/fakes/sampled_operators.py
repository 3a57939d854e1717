"""Operators of no plugin for the tests of drawing, and the suite that runs them."""

from __future__ import annotations

from dataclasses import replace

import torch
from clika_ref_conformance.profiles import PROFILES
from clika_ref_conformance.suite import Suite
from torch import Tensor

from clika_ref.core.accuracy import EXACT
from clika_ref.core.operators import operator
from clika_ref.core.registry import load_registry

PROFILE = replace(PROFILES["quick"], drawn=4, rows=8, shrink_seconds=5.0)


@operator(error=EXACT)
def shift(x: Tensor, *, by: float = 0.0, dim: int = 0, twice: bool = False) -> Tensor:
    """``x + by`` (``+ 2 * by`` where ``twice``), its slices along ``dim`` in the opposite order."""
    return (x + by * (2 if twice else 1)).flip(dim)


@shift.samples
def _(draw, s):
    x = draw(s.tensor(rank=(1, 3), dtype=(torch.float32, torch.float64, torch.int64)))
    dim = draw(s.integers(-x.rank, x.rank - 1))
    by = draw(s.choice(0, 2, 3)) if x.dtype == torch.int64 else draw(s.choice(0.0, 1.0, 1.5))
    return s.call(x, by=by, dim=dim, twice=draw(s.booleans()))


@shift.onnx
def _(op, x, *, by, dim, twice):
    moved = op.Add(*op.promote(x, by * (2 if twice else 1)))
    ends = [op.ints([n]) for n in (-1, -(2**62), dim, -1)]
    return op.Slice(moved, *ends)


def make_suite(*operators, folder, target="onnxruntime", **changes):
    """Return a suite of the given operators only."""
    registry = load_registry()
    only = replace(registry, operators={op.name: op for op in operators})
    return Suite(only, registry.targets[target], replace(PROFILE, **changes), folder)


def find_check(found, name):
    """Return the check with a name."""
    return next(check for check in found if check.name == name)
