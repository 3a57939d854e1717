"""Second driver: a Hypothesis strategy for the calls that an operator's samples describe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import assume, reject
from hypothesis import strategies as st

from clika_ref.core.operators import Operator
from clika_ref.core.samples import Call, Choice, Floats, Integers, TensorDescription, TensorSample
from clika_ref_conformance.drawing.calls.drawn import DrawnCall
from clika_ref_conformance.drawing.calls.dtypes import DtypeAxis, choices_count, shows
from clika_ref_conformance.drawing.sampling import SampleError, UnjudgedError, sampled


def calls(op: Operator, dtype: torch.dtype) -> st.SearchStrategy[DrawnCall]:
    """Return the strategy of all calls of an operator that use ``dtype``.

    Choices shrink to their first option, integers toward 0 or the nearest bound, and shapes to few, short dims.
    """

    @st.composite
    def strategy(draw: Callable[[st.SearchStrategy[Any]], Any]) -> DrawnCall:
        axis = DtypeAxis(dtype, choices=bool(choices_count(op, dtype)))
        problem = ""
        call = Call(())
        try:
            call = sampled(op, lambda d: _decided(draw, axis.narrow(d)))
        except UnjudgedError:
            reject()
        except SampleError as error:
            problem = str(error)
        assume(problem or choices_count(op, dtype) is None or shows(call, dtype))
        return DrawnCall(call, draw(_SEEDS), draw(_VECTORS), axis.beyond, problem)

    return strategy()


_SEEDS = st.integers(0, 2**16)
_VECTORS = st.integers(0, 255)


def _decided(draw: Callable[[st.SearchStrategy[Any]], Any], description: Any) -> Any:
    match description:
        case Choice(options):
            return options[draw(st.integers(0, len(options) - 1))]
        case Integers(low, high):
            return draw(st.integers(low, high))
        case Floats(low, high):
            return draw(st.floats(low, high, allow_subnormal=False))
        case TensorDescription():
            return _tensor(draw, description)
        case _:
            msg = f"draw() takes a description made by `s`, not {description!r}"
            raise TypeError(msg)


def _tensor(draw: Callable[[st.SearchStrategy[Any]], Any], d: TensorDescription) -> TensorSample:
    dtypes = list(dict.fromkeys(d.dtypes))
    dtype = dtypes[draw(st.integers(0, len(dtypes) - 1)) if len(dtypes) > 1 else 0]
    shape = d.shape
    if shape is None:
        shape = tuple(draw(st.integers(*d.side)) for _ in range(draw(st.integers(*d.rank))))
    return d.decided(dtype, shape)
