"""Branches, loops and conditions in rewritten code, which decide at run time how they are evaluated."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch

from clika_ref.capture.branch_conversion.expressions import SiteDescription
from clika_ref.capture.branch_conversion.site_record import SiteRecord
from clika_ref.capture.branch_conversion.traced_branches import BranchTracer
from clika_ref.capture.branch_conversion.traced_loops import trace_loop
from clika_ref.capture.branch_conversion.traced_values import (
    combine_conditions,
    is_number_tensor,
    is_traced,
    read_number,
    to_predicate,
)
from clika_ref.capture.branch_conversion.unrolled_loops import UnrolledLoop
from clika_ref.capture.branch_conversion.variables import Branch, SharedVariables

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "less": operator.lt,
    "less_or_equal": operator.le,
    "greater": operator.gt,
    "greater_or_equal": operator.ge,
    "equal": operator.eq,
    "not_equal": operator.ne,
    "is_same": operator.is_,
    "is_other": operator.is_not,
    "is_in": lambda a, b: a in b,
    "is_not_in": lambda a, b: a not in b,
}
"""The comparison operators by their names in rewritten code."""

AUGMENTATIONS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "Add": (operator.iadd, operator.add),
    "Sub": (operator.isub, operator.sub),
    "Mult": (operator.imul, operator.mul),
    "MatMult": (operator.imatmul, operator.matmul),
    "Div": (operator.itruediv, operator.truediv),
    "FloorDiv": (operator.ifloordiv, operator.floordiv),
    "Mod": (operator.imod, operator.mod),
    "Pow": (operator.ipow, operator.pow),
    "LShift": (operator.ilshift, operator.lshift),
    "RShift": (operator.irshift, operator.rshift),
    "BitAnd": (operator.iand, operator.and_),
    "BitOr": (operator.ior, operator.or_),
    "BitXor": (operator.ixor, operator.xor),
}
"""The operators of augmented assignments, in place for tensors and lists, and not for numbers."""


class BranchSite(SiteRecord):
    """A branch, loop or condition, whose methods rewritten code calls.

    With a plain condition they do what the original code does, and with a traced one they add a condition or a loop to
    the trace.
    """

    def __init__(self, file: str, function: str, description: SiteDescription, tracer: BranchTracer) -> None:
        super().__init__(file, function, description)
        self.tracer = tracer

    def run_if(self, test: Any, when_true: FunctionType, when_false: FunctionType) -> None:
        """Run one of two branches, which assign variables."""
        if not is_traced(test):
            (when_true if self._decide(test) else when_false)()
            return
        self._start()
        variables = SharedVariables.of((when_true, when_false), self.description)
        branches = [variables.isolate(branch, returns=False) for branch in (when_true, when_false)]
        variables.assign(self.tracer.trace_condition(self, to_predicate(test), *branches))

    def run_return(self, test: Any, when_true: FunctionType, when_false: FunctionType) -> Any:
        """Return the result of one of two branches, which end the function."""
        if not is_traced(test):
            return (when_true if self._decide(test) else when_false)()
        self._start()
        variables = SharedVariables.of((when_true, when_false), self.description)
        branches = [variables.isolate(branch, returns=True) for branch in (when_true, when_false)]
        return self.tracer.trace_condition(self, to_predicate(test), *branches)

    def run_exit(self, loop: UnrolledLoop, test: Any, when_true: FunctionType, when_false: FunctionType) -> Any:
        """Return what a loop does after one of two branches, at least one of which leaves the iteration."""
        if not is_traced(test):
            return (when_true if self._decide(test) else when_false)()
        self._start()
        loop.site.check()
        return loop.trace_exit(self, self.tracer, to_predicate(test), when_true, when_false)

    def run_for(self, items: Iterable[Any], *parts: FunctionType) -> Any:
        """Run a loop over the items; return its result if it has code after it that returns."""
        return UnrolledLoop(self, *parts).run(items)

    def run_while(self, test: FunctionType, body: FunctionType) -> None:
        """Run a loop, whose test and body assign variables."""
        while True:
            condition = test()
            if is_traced(condition):
                self._start()
                variables = SharedVariables.of((test, body), self.description)
                trace_loop(self, self.tracer, variables, test, body)
                return
            if not self._decide(condition):
                return
            body()

    def select(self, test: Any, when_true: FunctionType, when_false: FunctionType) -> Any:
        """Return the value of one of two expressions."""
        if not is_traced(test):
            return when_true() if self._decide(test) else when_false()
        return self._select(test, when_true, when_false)

    def truth_and(self, first: Any, second: FunctionType) -> Any:
        """Return whether both are true; the second one is not evaluated after a plain false one."""
        if not is_traced(first):
            return second() if first else first
        return combine_conditions(torch.logical_and, first, second())

    def truth_or(self, first: Any, second: FunctionType) -> Any:
        """Return whether one of both is true; the second one is not evaluated after a plain true one."""
        if not is_traced(first):
            return first or second()
        return combine_conditions(torch.logical_or, first, second())

    def value_and(self, first: Any, second: FunctionType) -> Any:
        """Return ``first and second()``."""
        if not is_traced(first):
            return second() if first else first
        return self._select(first, second, lambda: first)

    def value_or(self, first: Any, second: FunctionType) -> Any:
        """Return ``first or second()``."""
        if not is_traced(first):
            return first or second()
        return self._select(first, lambda: first, second)

    def negate(self, value: Any) -> Any:
        """Return ``not value``."""
        return combine_conditions(torch.logical_not, value) if is_traced(value) else not value

    def to_number(self, function: Any, value: Any) -> Any:
        """Return ``function(value)``, where the function is probably ``bool``, ``int`` or ``float``."""
        is_tensor = isinstance(value, torch.Tensor) and is_traced(value)
        return read_number(value, function) if is_tensor and function in (bool, int, float) else function(value)

    def read_item(self, value: Any) -> Any:
        """Return ``value.item()``."""
        if not isinstance(value, torch.Tensor) or not is_traced(value):
            return value.item()
        return read_number(value, float if value.is_floating_point() else bool if value.dtype == torch.bool else int)

    def compare(self, left: Any, *steps: tuple[str, FunctionType]) -> Any:
        """Return the value of a chain of comparisons, such as ``a < b < c``."""
        result: Any = True
        for name, operand in steps:
            right = operand()
            found = COMPARISONS[name](left, right)
            result = combine_conditions(torch.logical_and, result, found) if is_traced(result) else found
            if not is_traced(result) and not result:
                return result
            left = right
        return result

    def augment(self, name: str, target: Any, value: Any) -> Any:
        """Return the new value of a variable after ``target += value``, or with the operator of that name."""
        in_place, plain = AUGMENTATIONS[name]
        return (plain if is_number_tensor(target) else in_place)(target, value)

    def require_plain(self, test: Any) -> Any:
        """Return a condition that must be plain, as this branch cannot be converted.

        Raises:
            BranchConversionError: it is traced.
        """
        if is_traced(test):
            self._start()
        return test

    def _select(self, test: Any, *branches: FunctionType) -> Any:
        self._start()
        isolated = (Branch(branch, branch) for branch in branches)
        return self.tracer.trace_condition(self, to_predicate(test), *isolated)

    def _decide(self, test: Any) -> bool:
        decision = bool(test)
        self.taken[decision] += 1
        return decision

    def _start(self) -> None:
        self.check()
        self.is_converted = True
