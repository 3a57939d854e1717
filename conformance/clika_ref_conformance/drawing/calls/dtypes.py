"""Dtype selection: calls of an operator with one requested dtype."""

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
"""The dtypes of a description that names none, which stands for any float dtype."""

HALVES = (torch.float16, torch.bfloat16)
"""FP16 and BF16, which eager accepts nearly everywhere and most samples do not list."""

PROBES = 12
"""Number of calls drawn to test a dtype; a branch taken by 1 call in 3 is missed with a probability of 1 %."""


class DtypeAxis:
    """Decides the dtypes of one call such that it uses ``dtype``.

    A description without a dtype gets ``dtype`` if that is a float. Among descriptions with several dtypes, the first
    that lists ``dtype`` gets it; for FP16 and BF16 a list with any float is enough. Later descriptions stay free. With
    ``choices``, a choice among dtypes counts as such a list. That is wrong for an attribute that sets the dtype of the
    result, and right if tensors are drawn in the chosen dtype. `choices_count` finds out which applies.
    """

    def __init__(self, dtype: torch.dtype, *, choices: bool) -> None:
        self.dtype = dtype
        self.choices = choices
        self.met = False
        """Whether the axis has set a dtype in this call."""
        self.beyond = False
        """Whether a description got a float dtype that it does not list and that is not the default."""

    def narrow(self, description: Any) -> Any:
        """Return a description with its dtypes restricted by the axis where the axis applies."""
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
        """Return whether the axis applies to these dtypes; it does so once per call."""
        has_floats = any(o in FLOATING for o in offered)
        if self._held or not (self.dtype in offered or (self.dtype in HALVES and has_floats)):
            self._refused |= has_floats and self.dtype not in offered
            return False
        self.beyond |= self.dtype not in offered
        self.met = self._held = True
        return True

    _held = False

    _refused = False
    """Whether a list of floats lacks the dtype; later descriptions of one float likely do, too."""


def shows(call: Call, dtype: torch.dtype) -> bool:
    """Return whether a tensor of a call has a dtype, or an attribute has it in a call without tensors."""
    tensors = [o for o in call.operands if isinstance(o, TensorSample)]
    return any(t.dtype == dtype for t in tensors) if tensors else dtype in call.attrs.values()


@cache
def choices_count(op: Operator, dtype: torch.dtype) -> bool | None:
    """Return whether the axis must restrict choices among dtypes; None if an operator never takes the dtype."""
    shown = {choices: _shown(op, dtype, choices=choices) for choices in (False, True)}
    if shown[False] == PROBES or shown[False] >= shown[True] > 0:
        return False
    return True if shown[True] else None


def _shown(op: Operator, dtype: torch.dtype, *, choices: bool) -> int:
    """Count the probes that use a dtype; one with a failing sampler counts too, so that its error is reported."""
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
    """Return the wanted dtypes that an operator takes; if it takes none, the first dtype that it does take."""
    found = [dtype for dtype in wanted if choices_count(op, dtype) is not None]
    return found or [_own(op)]


OWN_DRAWS = 100
"""Number of calls drawn in search of one with a judged dtype."""


def _own(op: Operator) -> torch.dtype:
    """Return the dtype of the first tensor operand of an operator."""
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
