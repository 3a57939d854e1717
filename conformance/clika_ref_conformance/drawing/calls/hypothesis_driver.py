"""Second driver: a Hypothesis strategy for the calls that an operator's samples describe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import assume, reject
from hypothesis import strategies as st

from clika_ref.core.operators import Operator
from clika_ref.core.samples import Call, Choice, FloatRange, IntegerRange, TensorDescription, TensorSample
from clika_ref_conformance.drawing.calls.drawn_call import DrawnCall
from clika_ref_conformance.drawing.calls.dtypes import DtypeSelector, has_dtype, has_dtype_choices
from clika_ref_conformance.drawing.sampling import SampleError, UnjudgedDtypeError, draw_call


def make_call_strategy(op: Operator, dtype: torch.dtype) -> st.SearchStrategy[DrawnCall]:
    """Return the strategy of all calls of an operator that use ``dtype``.

    Choices shrink to their first option, integers toward 0 or the nearest bound, and shapes to few, short dims.
    """

    @st.composite
    def draw_call_with_seed(draw: Callable[[st.SearchStrategy[Any]], Any]) -> DrawnCall:
        axis = DtypeSelector(dtype, choices=bool(has_dtype_choices(op, dtype)))
        problem = ""
        call = Call(())
        try:
            call = draw_call(op, lambda d: _decide(draw, axis.narrow(d)))
        except UnjudgedDtypeError:
            reject()
        except SampleError as error:
            problem = str(error)
        assume(problem or has_dtype_choices(op, dtype) is None or has_dtype(call, dtype))
        return DrawnCall(call, draw(_SEEDS), draw(_VECTORS), axis.has_unlisted_dtype, problem)

    return draw_call_with_seed()


_SEEDS = st.integers(0, 2**16)
_VECTORS = st.integers(0, 255)


def _decide(draw: Callable[[st.SearchStrategy[Any]], Any], description: Any) -> Any:
    match description:
        case Choice(options):
            return options[draw(st.integers(0, len(options) - 1))]
        case IntegerRange(low, high):
            return draw(st.integers(low, high))
        case FloatRange(low, high):
            return draw(st.floats(low, high, allow_subnormal=False))
        case TensorDescription():
            return _draw_tensor(draw, description)
        case _:
            raise TypeError(f"cannot draw {description!r}: it is not a description made with `s`")


def _draw_tensor(draw: Callable[[st.SearchStrategy[Any]], Any], d: TensorDescription) -> TensorSample:
    dtypes = list(dict.fromkeys(d.dtypes))
    dtype = dtypes[draw(st.integers(0, len(dtypes) - 1)) if len(dtypes) > 1 else 0]
    shape = d.shape
    if shape is None:
        shape = tuple(draw(st.integers(*d.size)) for _ in range(draw(st.integers(*d.rank))))
    return d.make_sample(dtype, shape)
