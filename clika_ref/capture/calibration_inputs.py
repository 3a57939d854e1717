"""The calibration inputs of the user, read once: a few of them first, to trace with, then all, to calibrate."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from clika_ref.capture.callables import Callee
from clika_ref.capture.inputs import ForwardFn, ModelCall, model_call, refuse_no_list
from clika_ref.core.errors import ModelError

ARGUMENT = "calibration_inputs"

PEEKED = 4
"""Elements of what can be read only once that are traced with: sides in which they differ are dynamic."""

TOLD_APART = 8
"""Elements of a list that are traced with, at most."""


class CalibrationInputs:
    """Calls of a model that the elements of an iterable stand for.

    Of a list, which is in memory anyway, those are traced with that differ from the first in another side than the ones
    before them, wherever they stand; of a generator or a DataLoader the first ones.

    Raises:
        ModelError: it cannot be iterated over, or holds no element.
    """

    def __init__(
        self,
        inputs: Iterable[Any],
        transform: Callable[[Any], Any] | None = None,
        forward_fn: ForwardFn | None = None,
    ) -> None:
        refuse_no_list(inputs, ARGUMENT)
        self._transform, self._forward_fn = transform, forward_fn
        self.count = _count(inputs)
        self._inputs = inputs
        self._elements: Iterator[Any] = iter(inputs)
        self._known: dict[int, ModelCall] = {}
        self._ahead: list[Any] = []

    def examples(self, callee: Callee) -> list[ModelCall]:
        """Return the calls to trace with.

        Raises:
            ModelError: there are none, or one does not fit the model.
        """
        inputs = self._inputs
        for number in telling(inputs) if isinstance(inputs, list | tuple) else range(PEEKED):
            self._ahead += itertools.islice(self._elements, max(number + 1 - len(self._ahead), 0))
            if number < len(self._ahead):
                self._known[number] = self._call(callee, number, self._ahead[number])
        if not self._known:
            msg = f"{ARGUMENT} hold no element; give at least one batch, and no generator that was read before"
            raise ModelError(msg)
        return [*self._known.values()]

    def ahead(self, callee: Callee) -> Iterator[ModelCall]:
        """Yield calls in order, of which no more are read than are asked for; `calls` yields them all the same."""
        for number in itertools.count():
            self._ahead += itertools.islice(self._elements, number == len(self._ahead))
            if number == len(self._ahead):
                return
            if number not in self._known:
                self._known[number] = self._call(callee, number, self._ahead[number])
            yield self._known[number]

    def calls(self, callee: Callee) -> Iterator[ModelCall]:
        """Yield all calls in order; those that were made before are not made again."""
        for number, element in enumerate(itertools.chain(self._ahead, self._elements)):
            yield self._known.pop(number, None) or self._call(callee, number, element)

    def _call(self, callee: Callee, number: int, element: Any) -> ModelCall:
        return model_call(callee, element, self._transform, self._forward_fn, number + 1)


@dataclass(frozen=True)
class Unread:
    """Calibration inputs that nobody has begun to read, and how an element of them becomes a call."""

    inputs: Iterable[Any]
    transform: Callable[[Any], Any] | None = None
    forward_fn: ForwardFn | None = None

    @property
    def count(self) -> int | None:
        """How many elements there are, where that can be known without reading them."""
        return _count(self.inputs)

    @property
    def can_be_read_again(self) -> bool:
        """Whether reading some of them leaves them as they are, as it does not of a generator."""
        return not isinstance(self.inputs, Iterator)

    def begin(self) -> CalibrationInputs:
        """Begin to read them.

        Raises:
            ModelError: they cannot be iterated over.
        """
        return CalibrationInputs(self.inputs, self.transform, self.forward_fn)


def _count(inputs: Iterable[Any]) -> int | None:
    try:
        return len(inputs)  # type: ignore[arg-type]
    except TypeError:  # generators, and loaders over iterable datasets, which have __len__ but refuse
        return None


def telling(elements: Sequence[Any]) -> list[int]:
    """Return the places of elements that show which sides differ: the first, and each that differs in another one."""
    chosen: list[int] = []
    differing: set[Any] = set()
    first: list[Any] = []
    for number, element in enumerate(elements):
        described = [_described(leaf) for leaf in pytree.tree_leaves(element)]
        if not number:
            first, new = described, {None}
        else:
            new = _differences(first, described) - differing
        if new:
            differing |= new
            chosen.append(number)
        if len(chosen) == TOLD_APART:
            break
    return chosen


def _described(leaf: Any) -> tuple[Any, ...]:
    return (leaf.dtype, *leaf.shape) if isinstance(leaf, torch.Tensor) else (type(leaf), repr(leaf))


def _differences(first: Sequence[tuple[Any, ...]], other: Sequence[tuple[Any, ...]]) -> set[Any]:
    """Return the places in which two descriptions differ: leaf and side, or the structure as a whole."""
    if [len(d) for d in first] != [len(d) for d in other]:
        return {tuple(len(d) for d in other)}
    return {
        (leaf, side)
        for leaf, (own, its) in enumerate(zip(first, other, strict=True))
        for side, (a, b) in enumerate(zip(own, its, strict=True))
        if a != b
    }
