"""Loops over Python values that a traced condition may leave: each branch runs the rest of the loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from clika_ref.capture.branch_conversion.site_record import SiteRecord
from clika_ref.capture.branch_conversion.variables import SharedVariables

if TYPE_CHECKING:
    from clika_ref.capture.branch_conversion.traced_branches import BranchTracer

MAX_ITERATIONS = 200
"""Maximum number of iterations of a loop that a traced condition may leave; each adds a nested condition."""


@dataclass(frozen=True)
class _Ended:
    """An iteration ended the loop, and all code after it ran."""

    result: Any = None


_LEFT = object()
"""The result of an iteration that leaves the loop by ``break``."""


class UnrolledLoop:
    """A run of a loop, whose body is a function.

    The body returns what the loop does next: None for the next iteration, or the result of `leave` or `finish`.
    """

    def __init__(
        self,
        site: SiteRecord,
        assign: FunctionType,
        body: FunctionType,
        otherwise: FunctionType,
        after: FunctionType | None = None,
    ) -> None:
        """Prepare a run.

        Args:
            site: the loop.
            assign: assigns an item to the variables of the loop.
            body: runs an iteration.
            otherwise: runs after the last iteration.
            after: the code after the loop, which returns the result of the function; None if the variables are merged
                after the loop.
        """
        self.site = site
        self._assign, self._body, self._otherwise, self._after = assign, body, otherwise, after
        self._items: Iterator[Any] = iter(())

    def run(self, items: Iterable[Any]) -> Any:
        """Run the loop; return the result of the function, if code after the loop returns one."""
        return self._run_rest(iter(items))

    def leave(self) -> Any:
        """Return what the loop does after ``break``."""
        return _LEFT

    def finish(self, result: Any) -> Any:
        """Return what the loop does after ``return result``."""
        return _Ended(result)

    def _run_rest(self, items: Iterator[Any]) -> Any:
        for item in items:
            self._items = items
            self._assign(item)
            ended = self._end(self._body(self))
            if ended is not None:
                return ended.result
        return self._otherwise()

    def _end(self, following: Any) -> _Ended | None:
        """Return the end of the loop, after it was left; None if it goes on."""
        if following is _LEFT:
            return _Ended(None if self._after is None else self._after())
        return following

    def trace_exit(
        self,
        site: SiteRecord,
        tracer: BranchTracer,
        predicate: torch.Tensor | torch.SymBool,
        when_true: FunctionType,
        when_false: FunctionType,
    ) -> Any:
        """Add a condition to the trace, in each branch of which the rest of the loop runs; return the end of the loop.

        Raises:
            BranchConversionError: the loop has too many iterations, or a branch cannot be converted.
        """
        items = [*itertools.islice(self._items, MAX_ITERATIONS)]
        if len(items) == MAX_ITERATIONS:
            raise site.reject(
                f"it may leave the loop at {self.site.location}, which has more than {MAX_ITERATIONS} iterations"
            )

        tracer.count_unrolled(site)

        def complete(branch: FunctionType) -> Callable[[], Any]:
            def run() -> Any:
                self._items = iter(items)
                ended = self._end(branch())
                return self._run_rest(self._items) if ended is None else ended.result

            return run

        parts = (when_true, when_false, self._assign, self._body, self._otherwise)
        functions = parts if self._after is None else (*parts, self._after)
        variables = SharedVariables.of(functions, self.site.description)
        returns = self._after is not None
        branches = (variables.isolate(b, returns=returns, run=complete(b)) for b in (when_true, when_false))
        result = tracer.trace_condition(site, predicate, *branches)
        if returns:
            return _Ended(result)
        variables.assign(result)
        return _Ended()
