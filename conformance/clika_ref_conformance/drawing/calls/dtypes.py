"""The dtype axis: one dtype, put into the calls that an operator's samples describe."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from clika_ref.core.operators import Operator
from clika_ref.core.samples import FLOATING, Call, Choice, TensorDescription, TensorSample, random_draw
from clika_ref_conformance.drawing.sampling import SampleError, UnjudgedError, sampled

ANY_FLOAT = (torch.float32,)
"""The dtypes of a description that names none: it means any float."""

HALVES = (torch.float16, torch.bfloat16)
"""Floats that eager takes nearly everywhere, and that most samples do not list."""

PROBES = 12
"""Calls by which it is found out whether a dtype can be had: a branch that 1 call in 3 takes is missed by 1 %."""


class DtypeAxis:
    """Decides the dtypes of one call such that it shows ``dtype``.

    A description that names no dtype becomes ``dtype`` where that is a float; the first that lists ``dtype`` among
    several is held to it, or that lists floats where ``dtype`` is one of half precision, and later ones stay free. With
    ``choices``, a choice among dtypes counts as such a list: that is wrong for an attribute that asks for the dtype of
    the result, and right where tensors are drawn in what was chosen. `choices_count` finds out which.
    """

    def __init__(self, dtype: torch.dtype, *, choices: bool) -> None:
        self.dtype = dtype
        self.choices = choices
        self.met = False
        """Whether the call took the dtype from the axis."""
        self.beyond = False
        """Whether a description became another float than those that it names, or than the default."""

    def narrow(self, description: Any) -> Any:
        """Return a description with its dtypes decided by the axis, as far as they are its to decide."""
        match description:
            case TensorDescription(dtypes=dtypes) if (
                dtypes == ANY_FLOAT and self.dtype in FLOATING and not self._refused
            ):
                self.met = True
                self.beyond |= self.dtype not in ANY_FLOAT
                return replace(description, dtypes=(self.dtype,))
            case TensorDescription(dtypes=dtypes) if len(set(dtypes)) > 1 and self._wants(dtypes):
                return replace(description, dtypes=(self.dtype,))
            case Choice(options) if self.choices and all(isinstance(o, torch.dtype) for o in options):
                return Choice((self.dtype,)) if self._wants(options) else description
            case _:
                return description

    def _wants(self, offered: tuple[Any, ...]) -> bool:
        """Whether these are the dtypes to which the axis applies; it does so once."""
        has_floats = any(o in FLOATING for o in offered)
        if self._held or not (self.dtype in offered or (self.dtype in HALVES and has_floats)):
            self._refused |= has_floats and self.dtype not in offered
            return False
        self.beyond |= self.dtype not in offered
        self.met = self._held = True
        return True

    _held = False

    _refused = False
    """Whether a list of floats lacks the dtype: what names one float behind it most likely asks for the same."""


def shows(call: Call, dtype: torch.dtype) -> bool:
    """Whether a tensor of a call has a dtype, or an attribute names it where there is no tensor."""
    tensors = [o for o in call.operands if isinstance(o, TensorSample)]
    return any(t.dtype == dtype for t in tensors) if tensors else dtype in call.attrs.values()


@cache
def choices_count(op: Operator, dtype: torch.dtype) -> bool | None:
    """Whether choices among dtypes must be held to the axis, or None where an operator does not take the dtype."""
    shown = {choices: _shown(op, dtype, choices=choices) for choices in (False, True)}
    if shown[False] == PROBES or shown[False] >= shown[True] > 0:
        return False
    return True if shown[True] else None


def _shown(op: Operator, dtype: torch.dtype, *, choices: bool) -> int:
    """Count the probes that show a dtype; one at which the sampler fails counts, so that its failure is reported."""
    count = 0
    for seed in range(PROBES):
        axis = DtypeAxis(dtype, choices=choices)
        decide = random_draw(random.Random(seed))  # noqa: S311 - no secret
        try:
            call = sampled(op, lambda d, axis=axis, decide=decide: decide(axis.narrow(d)))
        except UnjudgedError:
            continue
        except SampleError:
            count += axis.met
            continue
        count += axis.met and shows(call, dtype)
    return count


def columns(op: Operator, wanted: tuple[torch.dtype, ...]) -> list[torch.dtype]:
    """Return the wanted dtypes that an operator takes; where it takes none of them, the first that it takes at all."""
    found = [dtype for dtype in wanted if choices_count(op, dtype) is not None]
    return found or [_own(op)]


OWN_DRAWS = 100
"""Calls that are drawn in search of one in a dtype that is judged."""


def _own(op: Operator) -> torch.dtype:
    """Return the dtype of the first tensor that an operator takes."""
    axis, unjudged = DtypeAxis(torch.float32, choices=False), torch.float32
    for seed in range(OWN_DRAWS):
        decide = random_draw(random.Random(seed))  # noqa: S311 - no secret
        try:
            call = sampled(op, lambda d, decide=decide: decide(axis.narrow(d)))
        except UnjudgedError as error:
            unjudged = error.dtype
        except SampleError:  # the run reports it
            return torch.float32
        else:
            return next((o.dtype for o in call.operands if isinstance(o, TensorSample)), torch.float32)
    return unjudged
