"""Dtype selection: calls of an operator with one requested dtype."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from clika_ref.core.operators import Operator
from clika_ref.core.samples import FLOAT_DTYPES, Call, Choice, TensorDescription, TensorSample, random_draw
from clika_ref_conformance.drawing.sampling import SampleError, UnjudgedDtypeError, draw_call

UNSPECIFIED_DTYPES = (torch.float32,)
"""The dtypes of a description that names none, which stands for any float dtype."""

HALF_DTYPES = (torch.float16, torch.bfloat16)
"""FP16 and BF16, which eager accepts nearly everywhere and most samples do not list."""

DTYPE_PROBES = 12
"""Number of calls drawn to test a dtype; a branch taken by 1 call in 3 stays untested with a probability of 1 %."""


class DtypeSelector:
    """Decides the dtypes of one call such that it uses ``dtype``.

    A description without a dtype gets ``dtype`` if that is a float. Among descriptions with several dtypes, the first
    that lists ``dtype`` gets it; for FP16 and BF16 a list with any float is enough. Later descriptions stay free. With
    ``choices``, a choice among dtypes counts as such a list. That is wrong for an attribute that sets the dtype of the
    result, and right if tensors are drawn in the chosen dtype. `has_dtype_choices` finds out which applies.
    """

    def __init__(self, dtype: torch.dtype, *, choices: bool) -> None:
        self.dtype = dtype
        self.choices = choices
        self.has_set_dtype = False
        """Whether the axis has set a dtype in this call."""
        self.has_unlisted_dtype = False
        """Whether a description got a float dtype that it does not list and that is not the default."""

    def narrow(self, description: Any) -> Any:
        """Return a description with its dtypes restricted by the axis where the axis applies."""
        match description:
            case TensorDescription(dtypes=dtypes) if (
                dtypes == UNSPECIFIED_DTYPES and self.dtype in FLOAT_DTYPES and not self._is_unlisted
            ):
                self.has_set_dtype = True
                self.has_unlisted_dtype |= self.dtype not in UNSPECIFIED_DTYPES
                return replace(description, dtypes=(self.dtype,))
            case TensorDescription(dtypes=dtypes) if len(set(dtypes)) > 1 and self._applies_to(dtypes):
                return replace(description, dtypes=(self.dtype,))
            case Choice(options) if self.choices and all(isinstance(o, torch.dtype) for o in options):
                return Choice((self.dtype,)) if self._applies_to(options) else description
            case _:
                return description

    def _applies_to(self, offered: tuple[Any, ...]) -> bool:
        """Return whether the axis applies to these dtypes; it does so once per call."""
        has_floats = any(o in FLOAT_DTYPES for o in offered)
        if self._is_used or not (self.dtype in offered or (self.dtype in HALF_DTYPES and has_floats)):
            self._is_unlisted |= has_floats and self.dtype not in offered
            return False
        self.has_unlisted_dtype |= self.dtype not in offered
        self.has_set_dtype = self._is_used = True
        return True

    _is_used = False

    _is_unlisted = False
    """Whether a list of floats lacks the dtype; later descriptions of one float likely do, too."""


def has_dtype(call: Call, dtype: torch.dtype) -> bool:
    """Return whether a tensor of a call has a dtype, or an attribute has it in a call without tensors."""
    tensors = [o for o in call.operands if isinstance(o, TensorSample)]
    return any(t.dtype == dtype for t in tensors) if tensors else dtype in call.attrs.values()


@cache
def has_dtype_choices(op: Operator, dtype: torch.dtype) -> bool | None:
    """Return whether the axis must restrict choices among dtypes; None if an operator never takes the dtype."""
    shown = {choices: _count_dtype_probes(op, dtype, choices=choices) for choices in (False, True)}
    if shown[False] == DTYPE_PROBES or shown[False] >= shown[True] > 0:
        return False
    return True if shown[True] else None


def _count_dtype_probes(op: Operator, dtype: torch.dtype, *, choices: bool) -> int:
    """Count the probes that use a dtype; one with a failing sampler counts too, so that its error is reported."""
    count = 0
    for seed in range(DTYPE_PROBES):
        axis = DtypeSelector(dtype, choices=choices)
        decide = random_draw(random.Random(seed))  # noqa: S311 - no secret
        try:
            call = draw_call(op, lambda d, axis=axis, decide=decide: decide(axis.narrow(d)))
        except UnjudgedDtypeError:
            continue
        except SampleError:
            count += axis.has_set_dtype
            continue
        count += axis.has_set_dtype and has_dtype(call, dtype)
    return count


def select_dtypes(op: Operator, requested: tuple[torch.dtype, ...]) -> list[torch.dtype]:
    """Return the requested dtypes that an operator takes; if it takes none, the first dtype that it does take."""
    found = [dtype for dtype in requested if has_dtype_choices(op, dtype) is not None]
    return found or [_first_operand_dtype(op)]


DTYPE_SEARCH_DRAWS = 100
"""Number of calls drawn in search of one with a judged dtype."""


def _first_operand_dtype(op: Operator) -> torch.dtype:
    """Return the dtype of the first tensor operand of an operator."""
    axis, unjudged = DtypeSelector(torch.float32, choices=False), torch.float32
    for seed in range(DTYPE_SEARCH_DRAWS):
        decide = random_draw(random.Random(seed))  # noqa: S311 - no secret
        try:
            call = draw_call(op, lambda d, decide=decide: decide(axis.narrow(d)))
        except UnjudgedDtypeError as error:
            unjudged = error.dtype
        except SampleError:  # the run reports it
            return torch.float32
        else:
            return next((o.dtype for o in call.operands if isinstance(o, TensorSample)), torch.float32)
    return unjudged
