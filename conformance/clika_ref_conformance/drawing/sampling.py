"""Sampled calls of an operator, with errors in its samples reported in one consistent way."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from clika_ref.core.errors import ClikaError
from clika_ref.core.operators import Operator
from clika_ref.core.samples import Call, Choice, Descriptions, Draw, TensorDescription, TensorSample
from clika_ref_conformance.judged_dtypes import is_judged, make_unjudged_comparison
from clika_ref_conformance.verdicts import Comparison, Verdict

T = TypeVar("T")

DRIVER_PACKAGES = ("hypothesis", "clika_ref_conformance")
"""Packages whose exceptions are not errors of the samples: drivers raise them to request another draw."""

CRASHING_OPERATORS = frozenset({"dynamic_lstm", "gru", "lstm", "rnn_relu", "rnn_tanh"})
"""Recurrent operators; operands that are empty or do not fit crash the process, in eager and ONNX Runtime."""


class SampleError(ClikaError):
    """The samples of an operator break their rules; ``details`` has the location for the contract level."""

    def __init__(self, op: Operator, problem: str, details: str = "") -> None:
        super().__init__(f"the samples of {op.name} {problem}; see contract/{op.name}")
        self.details = f"the samples of {op.name} {problem}{details}"

    @property
    def comparison(self) -> Comparison:
        """The comparison result of a check that needs the samples."""
        return Comparison(Verdict.SAMPLE, str(self))


class UnjudgedDtypeError(SampleError):
    """The samples draw a tensor of a dtype that the suite does not judge, which is not an error of theirs."""

    def __init__(self, op: Operator, dtype: torch.dtype) -> None:
        super().__init__(op, f"draw {dtype}")
        self.op = op
        self.dtype = dtype

    @property
    def comparison(self) -> Comparison:
        """The comparison result of a check that has no other calls: it is not run."""
        return make_unjudged_comparison(self.op.name, self.dtype)


class JudgedDescriptions(Descriptions):
    """Descriptions limited to judged dtypes, unless that leaves no option."""

    def tensor(self, **settings: Any) -> TensorDescription:
        """Describe a tensor with those of its dtypes that are judged."""
        found = super().tensor(**settings)
        judged = tuple(d for d in found.dtypes if is_judged(d))
        return found if len(judged) in (0, len(found.dtypes)) else replace(found, dtypes=judged)

    def choice(self, *options: Any) -> Choice:
        """Describe a choice; options that are unjudged dtypes are left out, as the result may have them."""
        judged = tuple(o for o in options if not isinstance(o, torch.dtype) or is_judged(o))
        return Choice(judged or options)


@contextlib.contextmanager
def blame_samples(op: Operator) -> Iterator[None]:
    """Convert exceptions raised within the block to a `SampleError` of an operator.

    Raises:
        SampleError: the block raised an exception.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if type(error).__module__.partition(".")[0] in DRIVER_PACKAGES:
            raise
        raise SampleError(op, f"raise {type(error).__name__}: {error}", _find_error_location(op, error)) from error


def _find_error_location(op: Operator, error: BaseException) -> str:
    """Return the line of the samples that raised, or their first line if their return value was rejected."""
    code = getattr(op.sampler, "__code__", None)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    own = [f for f in frames if code is not None and f.filename == code.co_filename]
    if code is not None and not own:
        where = f"in {Path(code.co_filename).name}, line {code.co_firstlineno}"
        return f" ({where}: in the return value of the samples that begin there)"
    at = (own or frames)[-1]
    return f" (in {Path(at.filename).name}, line {at.lineno}: {at.line})"


def draw_call(op: Operator, draw: Draw) -> Call:
    """Return a call drawn by an operator's sampler, with all attributes filled in.

    Raises:
        UnjudgedDtypeError: a tensor of the call has a dtype that is not judged.
        SampleError: the sampler raises, or does not return a call of the operator.
    """
    call = draw_call_of_any_dtype(op, draw)
    dtype = find_unjudged_dtype(call)
    if dtype is not None:
        raise UnjudgedDtypeError(op, dtype)
    return call


def draw_call_of_any_dtype(op: Operator, draw: Draw, s: Descriptions | None = None) -> Call:
    """Return a call like `draw_call`, with tensors of any dtype; ``s`` defaults to `JudgedDescriptions`.

    Raises:
        SampleError: the sampler raises, or does not return a call of the operator.
    """
    assert op.sampler is not None, f"{op.name} has no samples; levels only draw from operators with samples"
    with blame_samples(op):
        call = op.sampler(draw, s or JudgedDescriptions())
    if not isinstance(call, Call):
        raise SampleError(op, f"return {call!r}, not a call; end them with `return s.call(operands..., attributes...)`")
    with blame_samples(op):
        return op.call(*call.operands, **call.attrs)


def find_unjudged_dtype(call: Call) -> torch.dtype | None:
    """Return the first dtype among the tensors of a call that is not judged, or None."""
    tensors = (o for o in call.operands if isinstance(o, TensorSample | torch.Tensor))
    return next((t.dtype for t in tensors if not is_judged(t.dtype)), None)


def collect_judged_calls(draws: Iterable[Callable[[], T]]) -> list[T]:
    """Return the results of the draws, leaving out calls of dtypes that are not judged.

    Raises:
        UnjudgedDtypeError: no other calls are left.
        SampleError: a sampler raises.
    """
    found: list[T] = []
    problem: UnjudgedDtypeError | None = None
    for draw in draws:
        try:
            found.append(draw())
        except UnjudgedDtypeError as error:
            problem = error
    if problem is not None and not found:
        raise problem
    return found
