"""Asking the samples of an operator for a call; what they raise is their fault, and said in one line anywhere."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

from clika_ref.core.errors import ClikaError
from clika_ref.core.operators import Operator
from clika_ref.core.samples import Call, Descriptions, Draw

PASSED_ON = ("hypothesis", "clika_ref_conformance")
"""Packages whose exceptions are no faults: a driver asks by them for another draw."""


class SampleError(ClikaError):
    """The samples of an operator break their rules; ``details`` say where and how, for the level that blames them."""

    def __init__(self, op: Operator, problem: str, details: str = "") -> None:
        super().__init__(f"the samples of {op.name} {problem}; see contract/{op.name}")
        self.details = f"the samples of {op.name} {problem}{details}"


@contextlib.contextmanager
def blaming(op: Operator) -> Iterator[None]:
    """Blame the samples of an operator for what is raised within the block.

    Raises:
        SampleError: anything was.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if type(error).__module__.partition(".")[0] in PASSED_ON:
            raise
        at = traceback.extract_tb(error.__traceback__)[-1]
        place = f" (in {Path(at.filename).name}, line {at.lineno}: {at.line})"
        raise SampleError(op, f"raise {type(error).__name__}: {error}", place) from error


def sampled(op: Operator, draw: Draw) -> Call:
    """Return a call that an operator's sampler made, every attribute spelled out.

    Raises:
        SampleError: the sampler raises, or returns no call of the operator.
    """
    assert op.sampler is not None, f"{op.name} has samples: a level asks no operator without"
    with blaming(op):
        call = op.sampler(draw, Descriptions())
        return op.call(*call.operands, **call.attrs)
